"""What a trained role needs to know, with its defaults resolved, so that no later code asks which role it is."""

from dataclasses import dataclass
from typing import Literal

from slime_ppo.parallel.layout import ParallelLayout

RoleName = Literal["actor", "critic"]
ROLE_NAMES: tuple[RoleName, ...] = ("actor", "critic")


@dataclass(frozen=True)
class RoleSettings:
    """One role. Sizes are those of ParallelLayout; LR counts are optimizer steps of this role. `checkpoint_folder` takes the role's
    checkpoints, `save_folder` its final weights as a Hugging Face folder."""

    role: RoleName
    hf_folder: str
    checkpoint_folder: str
    save_folder: str
    num_nodes: int
    num_ranks_per_node: int
    tp_size: int
    cp_size: int
    pp_size: int
    vpp_size: int
    ep_size: int
    etp_size: int
    lr: float
    min_lr: float
    lr_decay_style: Literal["constant", "linear", "cosine"]
    lr_warmup_iters: int
    lr_decay_iters: int
    planned_steps: int
    clip_grad: float
    weight_decay: float
    adam_betas: tuple[float, float]
    adam_eps: float

    @property
    def num_ranks(self) -> int:
        """World size of the role."""
        return self.num_nodes * self.num_ranks_per_node

    @property
    def layout(self) -> ParallelLayout:
        """Raises ParallelError where `check_config` has not made sure that the sizes fit."""
        return ParallelLayout(
            num_ranks=self.num_ranks,
            tp_size=self.tp_size,
            cp_size=self.cp_size,
            pp_size=self.pp_size,
            vpp_size=self.vpp_size,
            ep_size=self.ep_size,
            etp_size=self.etp_size,
        )

    @property
    def dp_size(self) -> int:
        """Data-parallel size; `check_config` has made sure that it is whole."""
        return self.num_ranks // (self.tp_size * self.cp_size * self.pp_size)
