"""Sums over trainable tokens: of a loss, with the step's denominator, and of a metric (SEMANTICS 3, 9).

Shapes: N response tokens, S samples.
"""

import torch
from torch import Tensor

from slime_ppo.ppo_utils.packed import select


def token_weights(sample_weights: Tensor, lens: Tensor) -> Tensor:
    """Weight of each token [N] from Denominator.sample_weights [S] of these samples."""
    return torch.repeat_interleave(sample_weights, lens)


def masked_weighted_sum(x: Tensor, mask: Tensor, weights: Tensor) -> Tensor:
    """Sum over trainable tokens of `x` [N] times `weights` [N], in the dtype of `x`: this part's share of the step's loss.

    The shares of all micro-batches and ranks add up to the objective of the mode; nothing is divided afterwards.
    """
    return (select(x, mask) * weights.to(x.dtype)).sum()


def masked_sum(x: Tensor, mask: Tensor) -> tuple[float, int]:
    """(sum in float64, number of trainable tokens) of `x` [N], a metric or an indicator; a mean is reduced once, from these."""
    kept = x.detach()[mask]
    return float(kept.double().sum()), kept.numel()
