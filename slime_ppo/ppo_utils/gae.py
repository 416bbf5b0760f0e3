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
from slime_ppo.ppo_utils.packed import sample_index, trainable_counts

# Tokens of a block of the scan. Its passes touch one number in a block's row: two cache lines of them, in float64.
_BLOCK = 16


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
    response of truncated samples, 0 for all others; None = every sample ends with value 0. Accumulated in float64, whatever
    comes in, and given back in float32 (float64 if the rewards are).

    With `context`, rewards and values are those of this rank, and so are the results; mask [N], lens [S] and bootstrap_values
    [S] are of the whole samples: one all-gather, then every rank computes all N and keeps its own. Without, no collective.
    Raises ConfigError on adaptive <= 0.
    """
    if adaptive is not None and not adaptive > 0:
        raise ConfigError(f"adaptive lambda has a = {adaptive}; expected a number > 0 (--adaptive-lambd)")
    dtype = torch.float64 if rewards.dtype == torch.float64 else torch.float32
    if context is not None:
        rewards, values = context.gather(rewards, values)
    kept = None if bool(mask.all()) else mask.nonzero()[:, 0]
    if kept is not None:
        rewards, values = rewards.index_select(0, kept), values.index_select(0, kept)
    counts = trainable_counts(mask, lens)
    after = torch.zeros_like(counts) if bootstrap_values is None else bootstrap_values
    last, after, v = (counts.cumsum(0) - 1)[counts > 0], after.double()[counts > 0], values.double()
    advantages = critic_side = _deltas(rewards, v, last, after, gamma=gamma)
    if adaptive is not None or lambd != lambd_critic:
        lambdas = v.new_tensor(lambd) if adaptive is None else _adaptive_lambdas(adaptive, counts)[sample_index(counts)]
        advantages = critic_side.clone()
        _discount(advantages, _factors(gamma * lambdas, last, len(advantages)))
    _discount(critic_side, _factors(v.new_tensor(gamma * lambd_critic), last, len(critic_side)))
    # the second line may write over what the first one reads
    columns = [advantages[: len(v)].to(dtype, copy=True)]
    columns.append(critic_side[: len(v)].add_(v).to(dtype))
    if kept is not None:
        columns = [column.new_zeros(len(mask)).scatter_(0, kept, column) for column in columns]
    return Advantages(*(column if context is None else context.take(column) for column in columns))


def _deltas(rewards: Tensor, v: Tensor, last: Tensor, after: Tensor, *, gamma: float) -> Tensor:
    """delta of the n trainable tokens in float64, filled up with 0 to whole blocks. `last`: each sample's last token."""
    delta = torch.zeros(-(-len(v) // _BLOCK) * _BLOCK, dtype=torch.float64, device=v.device)
    inner = delta[: len(v)]
    inner.copy_(rewards).sub_(v)
    inner[:-1].add_(v[1:], alpha=gamma)
    inner[last] = rewards[last].double() + gamma * after - v[last]
    return delta


def _adaptive_lambdas(adaptive: float, counts: Tensor) -> Tensor:
    """clamp(1 - 1/(a n), 0, 1) of each sample, [S]."""
    return (1.0 - 1.0 / (adaptive * counts.clamp(min=1).double())).clamp(0.0, 1.0)


def _factors(factor: Tensor, last: Tensor, size: int) -> Tensor:
    """What multiplies the next token's advantage, [size]: `factor` (a number, or [n], filled up with 0); 0 at the `last` tokens."""
    factors = factor.repeat(size) if factor.ndim == 0 else pad(factor, (0, size - len(factor)))
    return factors.index_fill_(0, last, 0.0)


def _discount(y: Tensor, factor: Tensor) -> None:
    """Turn x, given in `y`, into y_i = x_i + factor_i y_{i+1}. Both are whole blocks, and both are written over.

    In blocks of C tokens: inside its block a token is summed as a loop would do it, one step for all blocks at once, and beside it
    the product of the factors up to the block's end. What enters a block is y of the next block's first token, and those
    first tokens obey the same equation, one C-th as many: log_C n levels of 2 C launches. Products of factors <= 1 only:
    nothing overflows, nothing is divided (Blelloch, "Prefix sums and their applications", 1990, section 1.4).
    """
    blocks, reach = y.view(-1, _BLOCK), factor.view(-1, _BLOCK)
    sums, products = blocks.unbind(1), reach.unbind(1)
    for j in reversed(range(_BLOCK - 1)):
        sums[j].addcmul_(products[j], sums[j + 1])
        products[j].mul_(products[j + 1])
    if len(blocks) > 1:
        fill = (0, -len(blocks) % _BLOCK)
        firsts = pad(sums[0], fill)
        _discount(firsts, pad(products[0], fill))
        blocks[:-1].addcmul_(reach[:-1], firsts[1 : len(blocks), None])
