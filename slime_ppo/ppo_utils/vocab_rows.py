"""What one rank computes of its columns of the logits: statistics of each row, and the gradient. The equations' only home.

Shapes: T tokens, V the real vocabulary, v columns on this rank, W ranks of the group.

Rank r holds columns [r v, (r + 1) v); columns at or above V are padding: outside the softmax, zero gradient. With
z = x / temperature, four numbers a row are all that other ranks need:

    m = max x,   s = sum e^((x - m)/temperature),   t = sum e^(..) (x - m)/temperature,   x_y = logit of the label or -inf

Merged, they give log p(y) = (x_y - m)/temperature - log s and H = log s - t / s. The backward pass recomputes p from m and
temperature log s, two numbers whose sum is the row's log-sum-exp (one number of the logits' size would be rounded to it):

    d loss / d x = (g_lp (1[y] - p) - g_H p (log p + H)) / temperature

Nothing here talks to other ranks. The logits are read once forward and once backward, in blocks of rows that stay in cache:
no second [T, v] buffer exists but the gradient, and not even that where it is written over the logits. Powers are taken of
two, e^z = 2^(z log2 e): on a CPU that is the cheaper function, and its factor and the temperature are one multiplication.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from slime_ppo.errors import ParallelError
from slime_ppo.ppo_utils.triton_kernels import has_kernels

# Size of a block of rows in float32. On a CPU three rows of a vocabulary of 151,936: two blocks and the logits stay in cache.
# Elsewhere (logits that the kernels do not take) as much as keeps a device busy.
_BLOCK_BYTES, _BLOCK_BYTES_OF_DEVICE = 1 << 21, 1 << 27
# Stands for log 0 where it is multiplied by a probability of 0: -inf * 0 is NaN. Its power is 0 in float64 as well, and times
# any upstream gradient it stays finite.
LOG_ZERO = -1e4


@dataclass(frozen=True)
class VocabShard:
    """Which columns of the vocabulary this rank holds: [start, start + num_real), then padding."""

    start: int
    num_real: int
    group: dist.ProcessGroup | None

    @staticmethod
    def of(width: int, *, vocab_size: int, group: dist.ProcessGroup | None) -> "VocabShard":
        """The shard of this rank, which holds `width` columns, as many as every other rank of the group: that is not checked,
        it would cost a collective. Raises ParallelError when all ranks together hold too few."""
        rank, world = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        if world * width < vocab_size:
            raise ParallelError(
                f"{world} ranks with {width} logit columns each hold fewer than the {vocab_size} ids of the "
                "vocabulary; pass the tensor-parallel group whose ranks hold the other columns"
            )
        start = rank * width
        return VocabShard(start=start, num_real=min(max(vocab_size - start, 0), width), group=group)

    def local(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Column of each id on this rank (0 where another rank holds it), int64, and whether this rank holds it."""
        ids = ids.long()  # a place in the logits is a column times a stride, which passes 2^31
        owned = (ids >= self.start) & (ids < self.start + self.num_real)
        return torch.where(owned, ids - self.start, 0), owned

    def gather(self, part: Tensor) -> Tensor:
        """`part` [...] of every rank, [W, ...], in rank order. One collective; none when there is nothing to send."""
        if self.group is None or part.numel() == 0:
            return part[None]
        world = dist.get_world_size(self.group)
        whole = part.new_empty((world * part.shape[0], *part.shape[1:]))
        dist.all_gather_into_tensor(whole, part.contiguous(), group=self.group)
        return whole.view(world, *part.shape)


@dataclass(frozen=True)
class RowTotals:
    """Softmax totals of each row over the whole vocabulary, each [T]; `top` and `label` are logits before the temperature."""

    top: Tensor
    log_sum: Tensor
    label: Tensor
    entropy: Tensor

    def log_probs(self, temperature: float) -> Tensor:
        return (self.label - self.top) / temperature - self.log_sum

    def lse(self, temperature: float) -> Tensor:
        """Log-sum-exp in units of the raw logits, [T, 2]: two numbers whose sum it is, for the backward pass, whose
        log p = (x - lse[:, 0] - lse[:, 1]) / temperature is as exact with large logits as with small ones."""
        return torch.stack([self.top, temperature * self.log_sum], -1)


def arithmetic_dtype(logits: Tensor) -> torch.dtype:
    """float32 whatever the logits are stored in (bf16 arithmetic would cost 5e-2); float64 for float64."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _row_blocks(real: Tensor) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Slices of rows of `real` [T, v], their logits in the arithmetic's dtype, and two scratch blocks that are reused.

    Logits of another dtype are converted into the first scratch block, which the caller overwrites only after reading them.
    """
    num_rows, width = real.shape
    dtype = arithmetic_dtype(real)
    num_bytes = _BLOCK_BYTES if real.device.type == "cpu" else _BLOCK_BYTES_OF_DEVICE
    num = max(1, min(num_rows, num_bytes // (4 * max(width, 1))))
    first, second = (torch.empty((num, width), dtype=dtype, device=real.device) for _ in range(2))
    for start in range(0, num_rows, num):
        rows = slice(start, min(start + num, num_rows))
        size = rows.stop - start
        x = real[rows] if real.dtype == dtype else first[:size].copy_(real[rows])
        yield rows, x, first[:size], second[:size]


def row_statistics(logits: Tensor, labels: Tensor, shard: VocabShard, *, temperature: float, with_entropy: bool) -> Tensor:
    """This rank's (m, s, t, x_y) of each row, [T, 4]; t is 0 without entropy. An empty shard is (-inf, 0, 0, -inf)."""
    dtype = arithmetic_dtype(logits)
    stats = torch.zeros((len(logits), 4), dtype=dtype, device=logits.device)
    stats[:, [0, 3]] = float("-inf")
    if shard.num_real == 0:
        return stats
    column, owned = shard.local(labels)
    if has_kernels(logits):
        from slime_ppo.ppo_utils.triton_kernels import vocab

        columns = torch.where(owned, column, -1)
        return vocab.row_statistics(logits, columns, num_real=shard.num_real, temperature=temperature, with_entropy=with_entropy)
    real = logits[:, : shard.num_real]
    stats[:, 3] = torch.where(owned, real.gather(1, column[:, None])[:, 0].to(dtype), float("-inf"))
    for rows, x, z, p in _row_blocks(real):
        top = x.amax(-1)
        stats[rows, 0] = top
        # clamped: a row of -inf only has no weight, and subtracting its -inf from itself would make it NaN
        torch.sub(x, top.clamp(min=torch.finfo(dtype).min)[:, None], out=z).mul_(math.log2(math.e) / temperature)
        torch.exp2(z, out=p)
        stats[rows, 1] = p.sum(-1)
        if with_entropy:
            # where p is 0 and z is -inf the product is NaN and stands for 0; a true NaN is in s as well
            stats[rows, 2] = p.mul_(z).nansum(-1).mul_(math.log(2.0))
    return stats


def merge_rows(parts: Tensor, *, temperature: float) -> RowTotals:
    """Totals over the ranks from their statistics [W, T, 4]. A label that no rank holds has log-prob -inf."""
    tops, sums, weighted, labels = parts.unbind(-1)
    top = tops.amax(0)
    shift = ((tops - top) / temperature).clamp(min=LOG_ZERO)
    scale = shift.exp()
    total = (sums * scale).sum(0)
    log_sum = total.log()
    entropy = log_sum - ((weighted + sums * shift) * scale).sum(0) / total
    return RowTotals(top=top, log_sum=log_sum, label=labels.amax(0), entropy=entropy)


def dense_gradient(
    logits: Tensor,
    labels: Tensor,
    shard: VocabShard,
    lse: Tensor,
    entropy: Tensor,
    *,
    temperature: float,
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
    out: Tensor | None = None,
) -> Tensor:
    """d loss / d logits [T, v] from the upstream gradients [T]; rows whose upstream gradient is 0 are exactly 0, NaN or not.

    `lse` [T, 2]: RowTotals.lse. `out`: where to write it, of the logits' shape and dtype; may be `logits` itself; None
    allocates it.
    """
    dtype = arithmetic_dtype(logits)
    g_lp = torch.zeros_like(entropy) if grad_log_probs is None else grad_log_probs.to(dtype)
    g_h = None if grad_entropy is None else grad_entropy.to(dtype)
    grad = torch.empty_like(logits, memory_format=torch.contiguous_format) if out is None else out
    column, owned = shard.local(labels)
    if has_kernels(logits):
        from slime_ppo.ppo_utils.triton_kernels import vocab

        columns = torch.where(owned, column, -1)
        vocab.dense_gradient(
            logits,
            columns,
            lse,
            entropy,
            grad,
            num_real=shard.num_real,
            temperature=temperature,
            grad_log_probs=g_lp,
            grad_entropy=g_h,
        )
        return grad
    grad[:, shard.num_real :] = 0
    at_label = torch.where(owned, g_lp, 0.0) / temperature
    scale = math.log2(math.e) / temperature
    top, log_sum = lse[:, :1], lse[:, 1:] * scale
    for rows, x, z, p in _row_blocks(logits[:, : shard.num_real]) if shard.num_real else ():
        torch.sub(x, top[rows], out=z)
        torch.add(-log_sum[rows], z, alpha=scale, out=z)
        torch.exp2(z, out=p)
        if g_h is None:
            p.mul_(-g_lp[rows, None] / temperature)
        else:
            z.clamp_(min=LOG_ZERO).mul_(g_h[rows, None] * (-math.log(2.0) / temperature))
            z.sub_((g_lp[rows] + g_h[rows] * entropy[rows])[:, None] / temperature)
            p.mul_(z)
        p.scatter_add_(1, column[rows, None], at_label[rows, None])
        grad[rows, : shard.num_real] = p
    unused = g_lp == 0 if g_h is None else (g_lp == 0) & (g_h == 0)
    return grad.index_fill_(0, unused.nonzero()[:, 0], 0.0)
