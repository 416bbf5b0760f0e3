"""y_i = x_i + c y_{i+1} inside each sample of a packed stream, from its end back: a parallel scan in blocks.

Shapes: n tokens of S samples, filled up to whole blocks of C; K = n / C blocks. Blocks are cut from the stream as it is, whatever
sample a token belongs to. With e_k = y of the first token of block k + 1, which is what enters block k:

    y_j = sum_{i >= j} c^(i-j) x_i  +  c^(C-j) e_k          j, i = 0 .. C-1 inside block k

The first term is one [C, C] matmul for all blocks. The e_k obey the equation of the y_i again, with c^C for c and one C-th as
many of them: log_C n levels. In a block in which a sample ends, c is 0 there. Powers of numbers <= 1 only: nothing overflows,
nothing is divided, no [S, longest] tensor exists. Numbers are finite: as 0 * NaN is NaN, others would reach the next sample.
Blelloch, "Prefix sums and their applications" (1990), section 1.4; Kogge and Stone (1973) on recurrences of this kind.

Totals of blocks, which add up over the whole sample, are float64. The sum inside a block has C terms at most, each bounded by
2 max|y|, so that float32 is enough for it at any length. That is float32 proper: autocast is off there, and other devices than
the CPU, which may round what they multiply (TF32), sum in float64.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

# Larger blocks sum more terms in float32: 32 doubles the error and saves nothing.
BLOCK = 16


def whole_blocks(num_tokens: int) -> int:
    """`num_tokens` rounded up to whole blocks."""
    return -(-num_tokens // BLOCK) * BLOCK


def discounted_sums(x: Tensor, last: Tensor, factor: float, *, dtype: torch.dtype) -> Tensor:
    """y of all tokens in `dtype` from `x`, float64 in whole blocks; each sample ends at a token of `last` int64 [S]."""
    blocks = x.view(-1, BLOCK)
    steps = torch.arange(BLOCK, dtype=torch.float64, device=x.device)
    powers = factor ** (steps[:, None] - steps).clamp(min=0)
    inside = product_dtype(x.device, dtype)
    with torch.autocast(x.device.type, enabled=False):
        y = (blocks.to(inside) @ powers.tril().to(inside)).to(dtype)
    # blocks in which a sample ends, one step for all of them at once: `cut_reach` is what multiplies e_k there
    cut, row = torch.unique_consecutive(last // BLOCK, return_inverse=True)
    cut_y, cut_reach = blocks[cut], torch.full((len(cut), BLOCK), factor, dtype=torch.float64, device=x.device)
    cut_reach[row, last % BLOCK] = 0.0
    _scan_blocks(cut_y, cut_reach)
    entering = blocks @ powers[:, 0]
    entering[cut] = cut_y[:, 0]
    entering = _entering(entering, torch.full_like(entering, factor**BLOCK).index_fill_(0, cut, 0.0))
    y.addcmul_(entering[:, None].to(dtype), (factor * powers[-1]).to(dtype))
    y[cut] = torch.addcmul(cut_y, cut_reach, entering[cut, None]).to(dtype)
    return y.view(-1)


def product_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """In which a block is multiplied for a result in `dtype`: one that no matmul setting of the device rounds."""
    return dtype if device.type == "cpu" else torch.float64


def varied_sums(x: Tensor, factor: Tensor) -> Tensor:
    """y_i = x_i + factor_i y_{i+1} of all tokens; `factor` is 0 where a sample ends, and is written over. Float64, whole blocks."""
    blocks, reach = x.clone().view(-1, BLOCK), factor.view(-1, BLOCK)
    _scan_blocks(blocks, reach)
    if len(blocks) > 1:
        blocks.addcmul_(reach, _entering(blocks[:, 0], reach[:, 0])[:, None])
    return blocks.view(-1)


def _scan_blocks(blocks: Tensor, reach: Tensor) -> None:
    """The scan inside each block [K, C], in place; `reach` goes in as the factors and becomes their products up to the end."""
    sums, products = blocks.unbind(1), reach.unbind(1)
    for j in reversed(range(BLOCK - 1)):
        sums[j].addcmul_(products[j], sums[j + 1])
        products[j].mul_(products[j + 1])


def _entering(totals: Tensor, through: Tensor) -> Tensor:
    """e_k of each block [K], from the sums of the blocks and the factors through them."""
    fill = (0, whole_blocks(len(totals)) - len(totals))
    firsts = varied_sums(pad(totals, fill), pad(through, fill))
    return pad(firsts[1 : len(totals)], (0, 1))
