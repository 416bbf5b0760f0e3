"""Generalised advantage estimation over the trainable tokens of packed samples (SEMANTICS 5).

Shapes: N response tokens, n trainable ones, S samples. Schulman et al., "High-dimensional continuous control using
generalized advantage estimation" (2016), eq. 11 and 16:

    delta_i = r_i + gamma V_{i+1} - V_i,    A_i = delta_i + gamma lambda A_{i+1},    i+1 = the next *trainable* token.

Masked tokens are dropped before anything is computed, so that inserting them anywhere changes nothing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from slime_ppo.errors import ConfigError
from slime_ppo.ppo_utils.packed import sample_index, segment_sum


@dataclass(frozen=True)
class Advantages:
    """`advantages` and `returns` [N], 0 where masked."""

    advantages: Tensor
    returns: Tensor


@torch.no_grad()
def generalized_advantages(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    lens: Tensor,
    *,
    gamma: float,
    lambd: float,
    lambd_critic: float,
    adaptive: float | None = None,
    bootstrap_values: Tensor | None = None,
) -> Advantages:
    """Advantages with `lambd`, and returns = V + A computed with `lambd_critic`; both before whitening.

    `rewards`, `values` [N]. `adaptive` a > 0 replaces lambd by clamp(1 - 1/(a n), 0, 1), n = trainable tokens of the
    sample (VAPO, Yue et al. 2025, eq. 8); returns keep lambd_critic. `bootstrap_values` [S] is V after the whole response of
    truncated samples, 0 for all others; None = every sample ends with value 0. Accumulated in float64, given back in
    float32 (float64 if the rewards are). No collective. Raises ConfigError on adaptive <= 0.
    """
    if adaptive is not None and not adaptive > 0:
        raise ConfigError(f"adaptive lambda has a = {adaptive}; expected a number > 0 (--adaptive-lambd)")
    kept = mask.nonzero()[:, 0]
    counts = segment_sum(mask.to(torch.int64), lens)
    row = sample_index(counts)
    # trainable tokens of the sample from each token on, itself included: n, n-1, ..., 1
    left = counts.cumsum(0)[row] - torch.arange(len(kept), device=kept.device)
    r, v = rewards[kept].double(), values[kept].double()
    after = v.new_zeros(len(counts)) if bootstrap_values is None else bootstrap_values.double()
    delta = r + gamma * torch.where(left > 1, v.roll(-1), after[row]) - v
    returns = v + _discounted_sums(delta, gamma * torch.full_like(v, lambd_critic), left)
    lambdas = torch.full_like(v, lambd) if adaptive is None else (1.0 - 1.0 / (adaptive * counts[row].double())).clamp(0.0, 1.0)
    advantages = _discounted_sums(delta, gamma * lambdas, left)
    dtype = torch.float64 if rewards.dtype == torch.float64 else torch.float32
    zeros = torch.zeros(len(mask), dtype=dtype, device=mask.device)
    return Advantages(zeros.index_copy(0, kept, advantages.to(dtype)), zeros.index_copy(0, kept, returns.to(dtype)))


def _discounted_sums(x: Tensor, factor: Tensor, left: Tensor) -> Tensor:
    """y_i = x_i + factor_i y_{i+1} inside each sample, whose factor is constant; `left` tokens remain from i on.

    By doubling: after the pass with distance d, y_i holds the terms i .. i + 2d - 1, so that log2(longest sample) passes
    suffice. Only powers of factors <= 1: nothing overflows, and nothing is divided.
    """
    y, power, distance = x, factor, 1
    longest = int(left.max()) if len(left) else 0
    while distance < longest:
        carried = torch.where(left[:-distance] > distance, power[:-distance] * y[distance:], 0.0)
        y = torch.cat([y[:-distance] + carried, y[-distance:]])
        power, distance = power * power, 2 * distance
    return y
