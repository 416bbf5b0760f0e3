"""Statistics and gradient over ragged supports as Triton kernels: those of support_rows.py on CUDA.

Shapes: T tokens, K recorded ids, v columns on this rank. One program a row walks the row's ids and then its label, which is
entry number `count`; an id equal to the label is passed over, so that the label enters once. Nothing is compacted, no
intermediate of size K exists, and the entries of a row are distinct: no atomics, the same bits on every run.
Arithmetic in float32 from logits of any narrower type.
"""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from slime_ppo.ppo_utils.vocab_rows import VocabShard

if TYPE_CHECKING:
    from slime_ppo.ppo_utils.support_rows import RowGradients, TokenSupports

# Entries that a program handles at a time; most supports fit into one block.
_BLOCK = 64


@triton.jit  # type: ignore[untyped-decorator]
def _entries(
    ids: tl.tensor, label: tl.tensor, block: tl.tensor, end: tl.tensor, start: tl.tensor, num_real: tl.tensor, BLOCK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Columns of one block of a row's entries, which of them this rank holds, and which is the label."""
    place = block + tl.arange(0, BLOCK)
    is_label = place == end
    token = tl.where(is_label, label, tl.load(ids + place, mask=place < end, other=0).to(tl.int64))
    owned = (place <= end) & (token >= start) & (token < start + num_real)
    return token - start, owned & (is_label | (token != label)), is_label


@triton.jit  # type: ignore[untyped-decorator]
def _statistics(
    logits: tl.tensor,
    labels: tl.tensor,
    ids: tl.tensor,
    ends: tl.tensor,
    counts: tl.tensor,
    stats: tl.tensor,
    row_stride: tl.tensor,
    column_stride: tl.tensor,
    start: tl.tensor,
    num_real: tl.tensor,
    temperature: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    own = logits + row * row_stride
    label = tl.load(labels + row).to(tl.int64)
    end = tl.load(ends + row)
    begin = end - tl.load(counts + row)
    top = tl.full((), float("-inf"), tl.float32)
    for block in range(begin, end + 1, BLOCK):
        column, kept, _ = _entries(ids, label, block, end, start, num_real, BLOCK)
        x = tl.load(own + column * column_stride, mask=kept, other=float("-inf")).to(tl.float32)
        top = tl.maximum(top, tl.max(x, 0))
    # an entry of -inf below a top of -inf has no weight; their difference would be NaN
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros((), tl.float32)
    weighted = tl.zeros((), tl.float32)
    for block in range(begin, end + 1, BLOCK):
        column, kept, _ = _entries(ids, label, block, end, start, num_real, BLOCK)
        x = tl.load(own + column * column_stride, mask=kept, other=float("-inf")).to(tl.float32)
        log_p = (x - base) / temperature
        p = tl.exp(log_p)
        total += tl.sum(p, 0)
        weighted += tl.sum(tl.where(p == 0, 0.0, p * log_p), 0)
    # loaded alone, because a maximum over the block would pass over NaN
    owned = (label >= start) & (label < start + num_real)
    x_label = tl.load(own + (label - start) * column_stride, mask=owned, other=float("-inf")).to(tl.float32)
    tl.store(stats + 4 * row, top)
    tl.store(stats + 4 * row + 1, total)
    tl.store(stats + 4 * row + 2, weighted)
    tl.store(stats + 4 * row + 3, x_label)


@triton.jit  # type: ignore[untyped-decorator]
def _gradient(
    grad: tl.tensor,
    logits: tl.tensor,
    labels: tl.tensor,
    ids: tl.tensor,
    ends: tl.tensor,
    counts: tl.tensor,
    lse: tl.tensor,
    entropy: tl.tensor,
    grad_log_probs: tl.tensor,
    grad_entropy: tl.tensor,
    grad_stride: tl.tensor,
    row_stride: tl.tensor,
    column_stride: tl.tensor,
    start: tl.tensor,
    num_real: tl.tensor,
    temperature: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    g_lp = tl.load(grad_log_probs + row)
    g_h = tl.load(grad_entropy + row)
    # the row's own numbers may be NaN where nothing comes from upstream
    if (g_lp != 0) | (g_h != 0):
        label = tl.load(labels + row).to(tl.int64)
        end = tl.load(ends + row)
        begin = end - tl.load(counts + row)
        top = tl.load(lse + 2 * row)
        log_sum = tl.load(lse + 2 * row + 1)
        row_entropy = tl.load(entropy + row)
        for block in range(begin, end + 1, BLOCK):
            column, kept, is_label = _entries(ids, label, block, end, start, num_real, BLOCK)
            x = tl.load(logits + row * row_stride + column * column_stride, mask=kept, other=float("-inf"))
            log_p = (x.to(tl.float32) - top - log_sum) / temperature
            p = tl.exp(log_p)
            pull = tl.where(p == 0, 0.0, p * (log_p + row_entropy))
            part = (g_lp * (is_label.to(tl.float32) - p) - g_h * pull) / temperature
            place = grad + row * grad_stride + column
            before = tl.load(place, mask=kept, other=0.0).to(tl.float32)
            tl.store(place, (before + part).to(grad.dtype.element_ty), mask=kept)


def support_statistics_kernel(
    logits: Tensor, labels: Tensor, supports: "TokenSupports", shard: VocabShard, *, temperature: float
) -> Tensor:
    """support_rows.support_statistics, float32 [T, 4]."""
    stats = torch.empty((len(logits), 4), dtype=torch.float32, device=logits.device)
    if len(logits) == 0:
        return stats
    counts = supports.counts.contiguous()
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
        _statistics[(len(logits),)](
            logits,
            labels.contiguous(),
            supports.ids.contiguous(),
            counts.cumsum(0),
            counts,
            stats,
            logits.stride(0),
            logits.stride(1),
            shard.start,
            shard.num_real,
            temperature,
            BLOCK=_BLOCK,
        )
    return stats


def add_support_gradient_kernel(
    grad: Tensor,
    logits: Tensor,
    labels: Tensor,
    supports: "TokenSupports",
    shard: VocabShard,
    *,
    rows: "RowGradients",
    temperature: float,
) -> None:
    """support_rows.add_support_gradient, in place on `grad` [T, v], whose rows are contiguous."""
    if len(logits) == 0:
        return
    counts = supports.counts.contiguous()
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
        _gradient[(len(logits),)](
            grad,
            logits,
            labels.contiguous(),
            supports.ids.contiguous(),
            counts.cumsum(0),
            counts,
            rows.lse.contiguous(),
            rows.entropy.contiguous(),
            rows.grad_log_probs.contiguous(),
            rows.grad_entropy.contiguous(),
            grad.stride(0),
            logits.stride(0),
            logits.stride(1),
            shard.start,
            shard.num_real,
            temperature,
            BLOCK=_BLOCK,
        )
