"""Triton kernels behind vocab_rows.row_statistics and vocab_rows.dense_gradient, which state the equations.

Shapes: T tokens, v columns on this rank. Arithmetic in float32 from logits of any narrower type.

Forward: one program a row, which reads the row once and keeps a running (m, s, t); when a block of columns brings a higher
maximum m', what was summed before moves to it:

    shift = (m - m') / temperature,   s' = s e^shift,   t' = (t + s shift) e^shift

(logarithms of base two inside: scale = log2(e) / temperature, and t is multiplied by log 2 at the end.)

Backward: one program per row and block of columns, which reads its block, then writes the gradient there. No program reads
what another one writes, so that the gradient may lie over the logits.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from slime_ppo.ppo_utils.vocab_rows import LOG_ZERO

# A block of a row: enough loads in flight to hide memory latency at two programs a multiprocessor, and no register spills.
_BLOCK = 8192
_WARPS = 16
_LOG_ZERO = tl.constexpr(LOG_ZERO)
_LOG_2 = tl.constexpr(math.log(2.0))


@triton.jit  # type: ignore[untyped-decorator]
def _row_statistics_kernel(
    logits: tl.tensor,
    columns: tl.tensor,
    stats: tl.tensor,
    num_real: tl.tensor,
    row_stride: tl.tensor,
    column_stride: tl.tensor,
    scale: tl.tensor,
    WITH_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)  # T * v passes 2^31
    x_row = logits + row * row_stride
    top = float("-inf")
    total = 0.0
    weighted = 0.0
    for start in range(0, num_real, BLOCK):
        at = start + tl.arange(0, BLOCK).to(tl.int64)
        x = tl.load(x_row + at * column_stride, mask=at < num_real, other=float("-inf")).to(tl.float32)
        new_top = tl.maximum(top, tl.max(x, 0))
        # while all is -inf there is no weight; subtracting -inf from itself would make it NaN
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        z = (x - base) * scale
        p = tl.exp2(z)
        shift = tl.maximum((top - base) * scale, _LOG_ZERO)
        kept = tl.exp2(shift)
        if WITH_ENTROPY:
            weighted = (weighted + total * shift) * kept + tl.sum(p * tl.maximum(z, _LOG_ZERO), 0)
        total = total * kept + tl.sum(p, 0)
        top = new_top
    column = tl.load(columns + row)
    label = tl.load(x_row + column * column_stride, mask=column >= 0, other=float("-inf")).to(tl.float32)
    tl.store(stats + row * 4, top)
    tl.store(stats + row * 4 + 1, total)
    tl.store(stats + row * 4 + 2, weighted * _LOG_2)
    tl.store(stats + row * 4 + 3, label)


@triton.jit  # type: ignore[untyped-decorator]
def _dense_gradient_kernel(
    logits: tl.tensor,
    grad: tl.tensor,
    columns: tl.tensor,
    lse: tl.tensor,
    entropy: tl.tensor,
    grad_log_probs: tl.tensor,
    grad_entropy: tl.tensor,
    num_real: tl.tensor,
    width: tl.tensor,
    row_stride: tl.tensor,
    column_stride: tl.tensor,
    grad_row_stride: tl.tensor,
    grad_column_stride: tl.tensor,
    scale: tl.tensor,
    temperature: tl.tensor,
    WITH_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)  # T * v passes 2^31
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    g_lp = tl.load(grad_log_probs + row)
    used = g_lp != 0.0
    if WITH_ENTROPY:
        g_h = tl.load(grad_entropy + row)
        used = used | (g_h != 0.0)
    # a row without upstream gradient is not even read: it may hold NaN
    inside = at < tl.where(used, num_real, 0)
    x = tl.load(logits + row * row_stride + at * column_stride, mask=inside, other=float("-inf")).to(tl.float32)
    z = (x - tl.load(lse + 2 * row)) * scale - tl.load(lse + 2 * row + 1) * scale
    weight = -g_lp
    if WITH_ENTROPY:
        weight = -(g_h * _LOG_2) * tl.maximum(z, _LOG_ZERO) - (g_lp + g_h * tl.load(entropy + row))
    g = tl.exp2(z) * weight + tl.where(at == tl.load(columns + row), g_lp, 0.0)
    g = tl.where(inside, g / temperature, 0.0)
    tl.store(grad + row * grad_row_stride + at * grad_column_stride, g.to(grad.dtype.element_ty), mask=at < width)


def _scale(temperature: float) -> float:
    """Factor from logits to exponents of two."""
    return math.log2(math.e) / temperature


def row_statistics(logits: Tensor, columns: Tensor, *, num_real: int, temperature: float, with_entropy: bool) -> Tensor:
    """(m, s, t, x_y) of each row, float32 [T, 4], over the first `num_real` columns of `logits` [T, v].

    `columns` int64 [T]: where this rank holds the label, -1 where it does not (x_y is -inf there). t is 0 without entropy.
    """
    stats = torch.empty((len(logits), 4), dtype=torch.float32, device=logits.device)
    if len(logits):
        with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
            _row_statistics_kernel[(len(logits),)](
                logits,
                columns,
                stats,
                num_real,
                *logits.stride(),
                _scale(temperature),
                WITH_ENTROPY=with_entropy,
                BLOCK=_BLOCK,
                num_warps=_WARPS,
            )
    return stats


def dense_gradient(
    logits: Tensor,
    columns: Tensor,
    lse: Tensor,
    entropy: Tensor,
    grad: Tensor,
    *,
    num_real: int,
    temperature: float,
    grad_log_probs: Tensor,
    grad_entropy: Tensor | None,
) -> None:
    """Writes d loss / d logits into `grad` [T, v], which may be `logits` itself; zero in the columns from `num_real` on.

    `lse` float32 [T, 2] (RowTotals.lse); `entropy` and the upstream gradients float32 [T]; `columns` as above. Rows
    without upstream gradient get zero.
    """
    if grad.numel() == 0:
        return
    per_row = (columns, lse, entropy, grad_log_probs, grad_log_probs if grad_entropy is None else grad_entropy)
    columns, lse, entropy, g_lp, g_h = (x.contiguous() for x in per_row)
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
        _dense_gradient_kernel[(len(grad), triton.cdiv(grad.shape[1], _BLOCK))](
            logits,
            grad,
            columns,
            lse,
            entropy,
            g_lp,
            g_h,
            num_real,
            grad.shape[1],
            *logits.stride(),
            *grad.stride(),
            _scale(temperature),
            temperature,
            WITH_ENTROPY=grad_entropy is not None,
            BLOCK=_BLOCK,
            num_warps=_WARPS,
        )
    # autograd did not see the write; whoever else saved `grad`'s memory for a backward pass must get autograd's error
    torch.autograd.graph.increment_version(grad)
