"""Generalised advantage estimation over the trainable tokens of packed samples (SEMANTICS 5).

Shapes: N response tokens, n trainable ones, S samples. Schulman et al., "High-dimensional continuous control using
generalized advantage estimation" (2016), eq. 11 and 16:

    delta_i = r_i + gamma V_{i+1} - V_i,    A_i = delta_i + gamma lambda A_{i+1},    i+1 = the next *trainable* token.

Masked tokens are dropped before anything is computed, so that inserting them anywhere changes nothing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from slime_ppo.errors import ConfigError
from slime_ppo.ppo_utils.cp_ops import ContextShard
from slime_ppo.ppo_utils.discounted_sums import discounted_sums, varied_sums, whole_blocks
from slime_ppo.ppo_utils.packed import require_finite, require_layout, sample_index, trainable_counts


@dataclass(frozen=True)
class Advantages:
    """`advantages` and `returns` of this rank's response tokens ([N]; [n] under context parallelism), 0 where masked."""

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
    context: ContextShard | None = None,
) -> Advantages:
    """Advantages with `lambd`, and returns = V + A computed with `lambd_critic`; both before whitening.

    `rewards`, `values` [N], finite where trainable. `adaptive` a > 0 replaces lambd by clamp(1 - 1/(a n), 0, 1), n = trainable
    tokens of the sample (VAPO, Yue et al. 2025, eq. 8); returns keep lambd_critic. `bootstrap_values` [S] is V after the whole
    response of truncated samples, 0 for all others; None = every sample ends with value 0. Given back in float32, within
    1e-5 max|A| of float64 arithmetic at any length, whatever dtype comes in (float64 throughout if the rewards are).

    With `context`, rewards and values are those of this rank, and so are the results; mask [N], lens [S] and bootstrap_values
    [S] are of the whole samples: one all-gather, then every rank computes all N and keeps its own. Without, no collective.
    Raises ConfigError on adaptive <= 0, DataError on shapes that do not fit `lens`, and NumericsError on NaN or
    inf where trainable, which names the token and the sample by its place in the batch.
    """
    if adaptive is not None and not adaptive > 0:
        raise ConfigError(f"adaptive lambda has a = {adaptive}; expected a number > 0 (--adaptive-lambd)")
    dtype = torch.float64 if rewards.dtype == torch.float64 else torch.float32
    if context is not None:
        rewards, values = context.gather(rewards, values)
    require_layout(mask, lens, tokens={"rewards": rewards, "values": values}, samples={"bootstrap_values": bootstrap_values})
    whole = {"rewards": rewards, "values": values, "bootstrap_values": bootstrap_values}
    kept = None if bool(mask.all()) else mask.nonzero()[:, 0]
    if kept is not None:
        rewards, values = rewards.index_select(0, kept), values.index_select(0, kept)
    counts = lens if kept is None else trainable_counts(mask, lens)
    after = torch.zeros_like(counts) if bootstrap_values is None else bootstrap_values
    last, after = (counts.cumsum(0) - 1)[counts > 0], after.double()[counts > 0]
    delta = _deltas(rewards, values.double(), last, after, gamma=gamma)
    if not bool(delta.sum().isfinite()):
        _refuse_not_finite(whole, mask, lens)
    critic_side = advantages = discounted_sums(delta, last, gamma * lambd_critic, dtype=dtype)
    if adaptive is not None:
        factors = pad(gamma * _adaptive_lambdas(adaptive, counts)[sample_index(counts)], (0, len(delta) - len(values)))
        advantages = varied_sums(delta, factors.index_fill_(0, last, 0.0)).to(dtype)
    elif lambd != lambd_critic:
        advantages = discounted_sums(delta, last, gamma * lambd, dtype=dtype)
    columns = [advantages[: len(values)], values.to(dtype) + critic_side[: len(values)]]
    if kept is not None:
        columns = [column.new_zeros(len(mask)).scatter_(0, kept, column) for column in columns]
    return Advantages(*(column if context is None else context.take(column) for column in columns))


def _deltas(rewards: Tensor, v: Tensor, last: Tensor, after: Tensor, *, gamma: float) -> Tensor:
    """delta of the trainable tokens in float64, filled up with 0 to whole blocks. `last`: each sample's last token."""
    delta = torch.zeros(whole_blocks(len(v)), dtype=torch.float64, device=v.device)
    inner = delta[: len(v)]
    inner.copy_(rewards).sub_(v)
    inner[:-1].add_(v[1:], alpha=gamma)
    inner[last] = rewards[last].double() + gamma * after - v[last]
    return delta


def _refuse_not_finite(columns: dict[str, Tensor | None], mask: Tensor, lens: Tensor) -> None:
    """Name what the sum of all deltas, one pass, gave away. Finite numbers whose sum is too large for float64 go through."""
    for name, column in columns.items():
        if column is not None:
            per_token = column if name != "bootstrap_values" else column[sample_index(lens)]
            require_finite(per_token, mask, lens, sample_ids=range(len(lens)), name=name)


def _adaptive_lambdas(adaptive: float, counts: Tensor) -> Tensor:
    """clamp(1 - 1/(a n), 0, 1) of each sample, [S]."""
    return (1.0 - 1.0 / (adaptive * counts.clamp(min=1).double())).clamp(0.0, 1.0)
