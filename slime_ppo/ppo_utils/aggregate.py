"""Sums over trainable tokens: of a loss, with the step's denominator, and of a metric (SEMANTICS 3, 9).

Shapes: n response tokens of this rank, S samples.
"""

import torch
from torch import Tensor

from slime_ppo.errors import DataError
from slime_ppo.ppo_utils.denominator import Denominator
from slime_ppo.ppo_utils.packed import select


def loss_sum(x: Tensor, mask: Tensor, lens: Tensor, denominator: Denominator) -> Tensor:
    """This part's share of the step's loss, a scalar in the dtype of `x` [n]:

        sum over samples s and their trainable tokens t of denominator.sample_weights[s] * x_t

    `lens` [S]: tokens of each sample in `x` (under context parallelism the local counts, 0 allowed); `denominator` is that of
    the step, seen by exactly these samples (Denominator.select). The shares of all micro-batches and ranks add up to the
    objective of the mode, for the loss and for its gradient: nothing is divided afterwards. No collective.
    Raises DataError when the denominator is one of other samples than these.
    """
    if denominator.sample_weights.shape != (len(lens),):
        raise DataError(
            f"a loss of {len(lens)} samples was given a denominator of {len(denominator.sample_weights)} samples; "
            "expected the step's denominator selected to the samples of this micro-batch (Denominator.select)"
        )
    weights = torch.as_tensor(denominator.sample_weights, dtype=x.dtype, device=x.device)
    per_token = torch.repeat_interleave(weights, lens.to(x.device), output_size=x.numel())
    return (select(x, mask) * per_token).sum()


def masked_sum(x: Tensor, mask: Tensor) -> tuple[float, int]:
    """(sum in float64, number of trainable tokens) of `x` [n], a metric or an indicator; a mean is reduced once, from these."""
    kept = x.detach()[mask]
    return float(kept.double().sum()), kept.numel()
