"""Sizes and ranks of one role's parallel layout, as numbers; no process group is made here."""

from dataclasses import dataclass

from slime_ppo.errors import ParallelError


@dataclass(frozen=True)
class ParallelLayout:
    """`num_ranks` = pp_size * dp_size * cp_size * tp_size. Rank order is Megatron's: tensor parallel fastest, then context
    parallel, then data parallel, then pipeline stages.

    `vpp_size` stages of the model lie on each pipeline rank (1: no virtual stages). The experts of a mixture are laid over the
    same ranks in another way: num_ranks = pp_size * expert_dp_size * ep_size * etp_size, `ep_size` ranks with different
    experts, each expert split over `etp_size`.

    Example: ParallelLayout(num_ranks=4, tp_size=2): ranks (0, 1) and (2, 3) are the two tensor-parallel groups,
    data-parallel ranks 0 and 1. With cp_size=2 they are the context-parallel ranks 0 and 1 of the one data-parallel rank, with
    pp_size=2 its first and second stage.
    """

    num_ranks: int
    tp_size: int = 1
    cp_size: int = 1
    pp_size: int = 1
    vpp_size: int = 1
    ep_size: int = 1
    etp_size: int = 1

    def __post_init__(self) -> None:
        sizes = ("tp_size", "cp_size", "pp_size", "vpp_size", "ep_size", "etp_size")
        wrong = [f"{name} {getattr(self, name)}" for name in ("num_ranks", *sizes) if getattr(self, name) < 1]
        if wrong:
            raise ParallelError(f"a layout needs whole numbers from 1; found {', '.join(wrong)}")
        for names, what in (
            (("tp_size", "cp_size", "pp_size"), "tensor x context x pipeline parallel"),
            (("etp_size", "ep_size", "pp_size"), "expert tensor x expert x pipeline parallel"),
        ):
            own = [getattr(self, name) for name in names]
            if self.num_ranks % (own[0] * own[1] * own[2]):
                raise ParallelError(f"{self.num_ranks} ranks cannot be split into groups of {' x '.join(map(str, own))} ({what})")
        if self.vpp_size > 1 and self.pp_size == 1:
            raise ParallelError(f"{self.vpp_size} virtual stages per rank need a pipeline; pp_size is 1")

    @property
    def dp_size(self) -> int:
        return self.num_ranks // (self.tp_size * self.cp_size * self.pp_size)

    @property
    def expert_dp_size(self) -> int:
        """Ranks that hold the same experts."""
        return self.num_ranks // (self.etp_size * self.ep_size * self.pp_size)

    @property
    def sequence_parallel(self) -> bool:
        """Activations between the parallel linears are split over TP whenever there is TP."""
        return self.tp_size > 1

    @property
    def micro_batch_multiple(self) -> int:
        """What the number of micro-batches of a pass must divide by: the interleaved schedule deals them in rounds of pp_size."""
        return self.pp_size if self.vpp_size > 1 else 1

    def tp_rank(self, rank: int) -> int:
        return rank % self.tp_size

    def cp_rank(self, rank: int) -> int:
        return rank // self.tp_size % self.cp_size

    def dp_rank(self, rank: int) -> int:
        return rank // (self.tp_size * self.cp_size) % self.dp_size

    def pp_rank(self, rank: int) -> int:
        return rank // (self.tp_size * self.cp_size * self.dp_size)

    def ep_rank(self, rank: int) -> int:
        return rank // self.etp_size % self.ep_size

    def etp_rank(self, rank: int) -> int:
        return rank % self.etp_size

    def is_last_stage(self, rank: int) -> bool:
        """The rank holds the end of the model, where logits and values are made."""
        return self.pp_rank(rank) == self.pp_size - 1
