"""The packed layout: flat per-token tensors with sample lengths, and selection by mask.

Shapes: N response tokens of all samples, S samples.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from slime_ppo.errors import DataError, NumericsError


def sample_index(lens: Tensor) -> Tensor:
    """Sample of each token, int64 [N]: lens [2, 0, 3] -> [0, 0, 2, 2, 2]."""
    return torch.repeat_interleave(torch.arange(len(lens), device=lens.device), lens)


def segment_sum(x: Tensor, lens: Tensor) -> Tensor:
    """Sum of each sample's entries [S], in the dtype of `x` [N]."""
    return x.new_zeros(len(lens)).index_add_(0, sample_index(lens), x)


def trainable_counts(mask: Tensor, lens: Tensor) -> Tensor:
    """Trainable tokens of each sample, int64 [S], from `mask` [N]."""
    before = torch.nn.functional.pad(mask.cumsum(0), (1, 0))
    ends = lens.cumsum(0)
    return before[ends] - before[ends - lens]


def select(x: Tensor, mask: Tensor) -> Tensor:
    """`x` [N] where `mask` is true, exactly 0 elsewhere, in value and gradient (SEMANTICS 3: select, never multiply).

    0 * NaN is NaN, so a loss selects its inputs before any arithmetic and its output after.
    """
    return torch.where(mask, x, torch.zeros((), dtype=x.dtype, device=x.device))


def require_layout(
    mask: Tensor, lens: Tensor, *, tokens: Mapping[str, Tensor | None], samples: Mapping[str, Tensor | None]
) -> None:
    """Raise DataError unless `mask` [N] and `tokens` (name -> [N]) fit `lens` [S], and `samples` (name -> [S]) do; None fits.

    Reads one number back from the device.
    """
    num_tokens = int(lens.sum())
    for name, column in (("mask", mask), *tokens.items()):
        if column is not None and column.shape != (num_tokens,):
            raise DataError(
                f"{name} has shape {tuple(column.shape)}, but the lens of {len(lens)} samples add up to {num_tokens} response "
                "tokens; expected one entry per token. Cut lens and columns from the same samples"
            )
    for name, column in samples.items():
        if column is not None and column.shape != lens.shape:
            raise DataError(
                f"{name} has shape {tuple(column.shape)}, but lens has {len(lens)} samples; expected one entry per sample. "
                "Cut lens and columns from the same samples"
            )


def require_finite(x: Tensor, mask: Tensor, lens: Tensor, *, sample_ids: Sequence[int] | Tensor, name: str) -> None:
    """Raise NumericsError when `x` [N] is NaN or infinite at a trainable token; masked tokens may hold anything.

    The message names the sample id and the response index of the first such token. Reads one flag back from the device.
    """
    bad = mask & ~torch.isfinite(x)
    if not bool(bad.any()):
        return
    position = int(bad.nonzero()[0, 0])
    row = int(sample_index(lens)[position])
    token = position - int(lens[:row].sum())
    raise NumericsError(
        f"{name} of sample {int(sample_ids[row])} is {float(x[position])} at response token {token}, which is trainable "
        f"({int(bad.sum())} such tokens in this batch of {len(lens)} samples); expected finite numbers. "
        "Look at that sample's inputs to this stage; a masked token may hold any value"
    )
