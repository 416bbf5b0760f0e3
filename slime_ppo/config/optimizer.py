"""Section `optimizer`: AdamW and its learning-rate schedule. The critic's differences are in section `critic`."""

from dataclasses import dataclass
from typing import Literal

from slime_ppo.config.fields import option


@dataclass(frozen=True)
class OptimizerConfig:
    """The schedule is a function of the planned step; skipped steps advance it."""

    lr: float = option(1e-6, help="peak learning rate", at_least=0)
    min_lr: float = option(0.0, help="learning rate at the end of the decay, both roles", at_least=0)
    lr_decay_style: Literal["constant", "linear", "cosine"] = option("constant", help="decay after the warm-up")
    lr_warmup_iters: int = option(0, help="linear warm-up from 0", unit="optimizer steps", at_least=0)
    lr_decay_iters: int | None = option(
        None,
        help="steps after which --min-lr is reached, warm-up included",
        unit="optimizer steps",
        default_text="all planned steps of the role",
        at_least=1,
    )
    weight_decay: float = option(0.0, help="decoupled weight decay", at_least=0)
    clip_grad: float = option(1.0, help="largest gradient norm; 0 = off", at_least=0)
    adam_beta1: float = option(0.9, help="decay of the gradient's mean", at_least=0, below=1)
    adam_beta2: float = option(0.95, help="decay of the gradient's square", at_least=0, below=1)
    adam_eps: float = option(1e-8, help="added to the root of the square", above=0)
