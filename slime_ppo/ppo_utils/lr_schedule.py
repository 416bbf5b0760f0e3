"""The learning rate as a pure function of the planned optimizer step (SEMANTICS 11). No torch."""

import math
from typing import Literal, assert_never

from slime_ppo.errors import ConfigError

DecayStyle = Literal["constant", "linear", "cosine"]


def learning_rate(step: int, *, lr: float, min_lr: float, warmup_iters: int, decay_iters: int, decay_style: DecayStyle) -> float:
    """Learning rate of the 0-based planned `step` of a role; steps that are skipped count as well.

    Warm-up: lr (step + 1) / warmup_iters for step < warmup_iters, so that the first step already moves. Then from lr at
    step = warmup_iters down to min_lr at step = decay_iters and beyond, along a line or half a cosine; constant stays at lr.
    """
    if step < 0:
        raise ConfigError(f"planned step {step} is negative; steps are counted from 0")
    if step < warmup_iters:
        return lr * (step + 1) / warmup_iters
    if decay_style == "constant":
        return lr
    span = decay_iters - warmup_iters
    progress = min((step - warmup_iters) / span, 1.0) if span > 0 else 1.0
    if decay_style == "linear":
        return lr - (lr - min_lr) * progress
    if decay_style == "cosine":
        return min_lr + (lr - min_lr) * 0.5 * (1.0 + math.cos(math.pi * progress))
    assert_never(decay_style)
