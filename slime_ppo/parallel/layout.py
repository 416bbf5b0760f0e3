"""Sizes and ranks of one role's parallel layout, as numbers; no process group is made here."""

from dataclasses import dataclass

from slime_ppo.errors import ParallelError


@dataclass(frozen=True)
class ParallelLayout:
    """`num_ranks` = dp_size * cp_size * tp_size. Rank order is Megatron's: tensor parallel fastest, then context parallel, then
    data parallel.

    Example: ParallelLayout(num_ranks=4, tp_size=2): ranks (0, 1) and (2, 3) are the two tensor-parallel groups,
    data-parallel ranks 0 and 1. With cp_size=2 they are the context-parallel ranks 0 and 1 of the one data-parallel rank.
    """

    num_ranks: int
    tp_size: int = 1
    cp_size: int = 1

    def __post_init__(self) -> None:
        if self.num_ranks < 1 or self.tp_size < 1 or self.num_ranks % self.tp_size:
            raise ParallelError(f"{self.num_ranks} ranks cannot be split into tensor-parallel groups of {self.tp_size}")
        if self.cp_size < 1 or self.num_ranks % (self.tp_size * self.cp_size):
            raise ParallelError(
                f"{self.num_ranks} ranks cannot be split into groups of {self.tp_size} (tensor parallel) x {self.cp_size} "
                "(context parallel)"
            )

    @property
    def dp_size(self) -> int:
        return self.num_ranks // (self.tp_size * self.cp_size)

    @property
    def sequence_parallel(self) -> bool:
        """Activations between the parallel linears are split over TP whenever there is TP."""
        return self.tp_size > 1

    def tp_rank(self, rank: int) -> int:
        return rank % self.tp_size

    def cp_rank(self, rank: int) -> int:
        return rank // self.tp_size % self.cp_size

    def dp_rank(self, rank: int) -> int:
        return rank // (self.tp_size * self.cp_size)
