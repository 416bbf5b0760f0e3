"""Log-prob of the chosen token, and entropy, from logits whose vocabulary is split over ranks.

Shapes: T tokens, V the real vocabulary, v columns on this rank, W ranks of the group.

Rank r holds columns [r v, (r + 1) v); columns at or above V are padding: outside the softmax, zero gradient. With
z = x / temperature, four numbers a row are all that other ranks need:

    m = max x,   s = sum e^((x - m)/temperature),   t = sum e^(..) (x - m)/temperature,   x_y = logit of the label or -inf

One all-gather of [T, 4] merges them: log p(y) = (x_y - m)/temperature - log s and H = log s - t / s. The backward pass
recomputes p from the row's log-sum-exp and needs no collective:

    d loss / d z = g_lp (1[y] - p) - g_H p (log p + H)

The logits are read once forward and once backward, in blocks of rows that stay in cache: no second [T, v] buffer exists but
the gradient itself.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from slime_ppo.errors import ParallelError

EntropyMode = Literal["none", "metric", "grad"]

# Size of a block of rows in float32: two of them fit in a core's cache.
_BLOCK_BYTES = 1 << 20
# Stands for log 0 where it is multiplied by a probability of 0: -inf * 0 is NaN.
_LOG_ZERO = -1e30


@dataclass(frozen=True)
class TokenLogProbs:
    """`log_probs` [T]; `entropy` [T], None when it was not asked for. float32 (float64 for float64 logits)."""

    log_probs: Tensor
    entropy: Tensor | None


@dataclass(frozen=True)
class VocabShard:
    """Which columns of the vocabulary this rank holds: [start, start + num_real), then padding."""

    start: int
    num_real: int
    group: dist.ProcessGroup | None

    @staticmethod
    def of(width: int, *, vocab_size: int, group: dist.ProcessGroup | None) -> "VocabShard":
        """The shard of this rank, which holds `width` columns. Raises ParallelError when all ranks together hold too few."""
        rank, world = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        if world * width < vocab_size:
            raise ParallelError(
                f"{world} ranks with {width} logit columns each hold fewer than the {vocab_size} ids of the "
                "vocabulary; pass the tensor-parallel group whose ranks hold the other columns"
            )
        start = rank * width
        return VocabShard(start=start, num_real=min(max(vocab_size - start, 0), width), group=group)

    def local(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Column of each id on this rank (0 where another rank holds it), and whether this rank holds it."""
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
        """Log-sum-exp in units of the raw logits: log p = (x - lse) / temperature."""
        return self.top + temperature * self.log_sum


def arithmetic_dtype(logits: Tensor) -> torch.dtype:
    """float32 whatever the logits are stored in (bf16 arithmetic would cost 5e-2); float64 for float64."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _row_blocks(num_rows: int, width: int, *, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Slices of rows, each with two scratch blocks that are reused."""
    rows = max(1, min(num_rows, _BLOCK_BYTES // (4 * max(width, 1))))
    first, second = (torch.empty((rows, width), dtype=dtype, device=device) for _ in range(2))
    for start in range(0, num_rows, rows):
        size = min(rows, num_rows - start)
        yield slice(start, start + size), first[:size], second[:size]


def row_statistics(logits: Tensor, labels: Tensor, shard: VocabShard, *, temperature: float, with_entropy: bool) -> Tensor:
    """This rank's (m, s, t, x_y) of each row, [T, 4]; t is 0 without entropy. An empty shard is (-inf, 0, 0, -inf)."""
    dtype = arithmetic_dtype(logits)
    stats = torch.zeros((len(logits), 4), dtype=dtype, device=logits.device)
    stats[:, [0, 3]] = float("-inf")
    if shard.num_real == 0:
        return stats
    real = logits[:, : shard.num_real]
    column, owned = shard.local(labels)
    picked = real.gather(1, column[:, None])[:, 0].to(dtype)
    stats[:, 3] = torch.where(owned, picked, float("-inf"))
    for rows, log_p, p in _row_blocks(len(logits), shard.num_real, dtype=dtype, device=logits.device):
        top = real[rows].amax(-1).to(dtype)
        stats[rows, 0] = top
        # a row of -inf only has no weight; subtracting its -inf from itself would make it NaN
        torch.sub(real[rows], torch.where(top == float("-inf"), 0.0, top)[:, None], out=log_p)
        if temperature != 1.0:
            log_p.div_(temperature)
        torch.exp(log_p, out=p)
        stats[rows, 1] = p.sum(-1)
        if with_entropy:
            stats[rows, 2] = torch.linalg.vecdot(p, log_p.clamp_(min=_LOG_ZERO))
    return stats


def merge_rows(parts: Tensor, *, temperature: float) -> RowTotals:
    """Totals over the ranks from their statistics [W, T, 4]. A label that no rank holds has log-prob -inf."""
    tops, sums, weighted, labels = parts.unbind(-1)
    top = tops.amax(0)
    shift = ((tops - top) / temperature).clamp(min=_LOG_ZERO)
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
) -> Tensor:
    """d loss / d logits [T, v] from the upstream gradients [T]; rows whose upstream gradient is 0 are exactly 0, NaN or not."""
    dtype = arithmetic_dtype(logits)
    g_lp = torch.zeros_like(lse) if grad_log_probs is None else grad_log_probs.to(dtype)
    g_h = None if grad_entropy is None else grad_entropy.to(dtype)
    grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
    grad[:, shard.num_real :] = 0
    column, owned = shard.local(labels)
    at_label = torch.where(owned, g_lp, 0.0)
    num_rows = len(logits) if shard.num_real else 0
    for rows, log_p, p in _row_blocks(num_rows, shard.num_real, dtype=dtype, device=logits.device):
        torch.sub(logits[rows, : shard.num_real], lse[rows, None], out=log_p)
        if temperature != 1.0:
            log_p.div_(temperature)
        torch.exp(log_p, out=p)
        if g_h is None:
            p.mul_(-g_lp[rows, None])
        else:
            log_p.clamp_(min=_LOG_ZERO).mul_(-g_h[rows, None]).sub_((g_lp[rows] + g_h[rows] * entropy[rows])[:, None])
            p.mul_(log_p)
        p.scatter_add_(1, column[rows, None], at_label[rows, None])
        if temperature != 1.0:
            p.div_(temperature)
        grad[rows, : shard.num_real] = p
    unused = g_lp == 0 if g_h is None else (g_lp == 0) & (g_h == 0)
    return grad.index_fill_(0, unused.nonzero()[:, 0], 0.0)


def refuse_second_derivative() -> None:
    """Called in a backward pass, where autograd is on only with create_graph=True. Without this the second derivative would
    come out as zero, silently, wherever the first is not the only term."""
    if torch.is_grad_enabled():
        raise NotImplementedError(
            "log-probs have no second derivative here; call backward or autograd.grad without create_graph=True"
        )


class _VocabLogProbs(torch.autograd.Function):
    """Keeps the caller's logits and two numbers a row."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, shard: VocabShard, temperature: float, entropy: EntropyMode) -> Any:
        stats = row_statistics(logits, labels, shard, temperature=temperature, with_entropy=entropy != "none")
        totals = merge_rows(shard.gather(stats), temperature=temperature)
        ctx.save_for_backward(logits, labels, totals.lse(temperature), totals.entropy)
        ctx.shard, ctx.temperature = shard, temperature
        ctx.set_materialize_grads(False)
        if entropy == "none":
            return totals.log_probs(temperature), None
        if entropy == "metric":
            ctx.mark_non_differentiable(totals.entropy)
        return totals.log_probs(temperature), totals.entropy

    @staticmethod
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> Any:
        refuse_second_derivative()
        logits, labels, lse, entropy = ctx.saved_tensors
        upstream = {"grad_log_probs": grad_log_probs, "grad_entropy": grad_entropy}
        return (
            dense_gradient(logits, labels, ctx.shard, lse, entropy, temperature=ctx.temperature, **upstream),
            None,
            None,
            None,
            None,
        )


def vocab_log_probs(
    logits: Tensor,
    labels: Tensor,
    *,
    vocab_size: int,
    temperature: float,
    group: dist.ProcessGroup | None,
    entropy: EntropyMode,
) -> TokenLogProbs:
    """Log-probs of `labels` int64 [T] under softmax(logits / temperature) over the real vocabulary, and its entropy.

    `logits` [T, v] are this rank's columns, `labels` are ids of the whole vocabulary (SEMANTICS 1, 2). Every rank of
    `group` calls with the same labels and gets the same result; one collective forward, none backward (each rank's
    gradient is that of its own columns, given that all ranks backpropagate the same loss). None = not split.
    `entropy`: "none"; "metric" (no gradient); "grad". A label outside [0, vocab_size) gets log-prob -inf.
    Second derivatives raise NotImplementedError. Raises ParallelError when the ranks hold too few columns.
    """
    shard = VocabShard.of(logits.shape[1], vocab_size=vocab_size, group=group)
    log_probs, entropies = _VocabLogProbs.apply(logits, labels, shard, temperature, entropy)  # type: ignore[no-untyped-call]
    return TokenLogProbs(log_probs=log_probs, entropy=entropies)
