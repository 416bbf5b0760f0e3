"""Log-prob of the chosen token, and entropy, from logits whose vocabulary is split over ranks.

Shapes: T tokens, v columns of the vocabulary on this rank.

    log p(y) = z_y - log sum e^z,   H = - sum p log p,   z = logits / temperature, over the real vocabulary

vocab_rows.py has the equations that a rank needs for its own columns, forward and backward. This file puts them together: one
all-gather of four numbers a row (maximum, sum, weighted sum, label's logit) forward, no collective backward, and autograd.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from slime_ppo.errors import DataError
from slime_ppo.ppo_utils.vocab_rows import (
    RowTotals,
    VocabShard,
    arithmetic_dtype,
    dense_gradient,
    merge_rows,
    row_statistics,
)

__all__ = [
    "EntropyMode",
    "RowTotals",
    "TokenLogProbs",
    "VocabShard",
    "arithmetic_dtype",
    "dense_gradient",
    "merge_rows",
    "refuse_second_derivative",
    "require_label_per_row",
    "row_statistics",
    "vocab_log_probs",
]

EntropyMode = Literal["none", "metric", "grad"]


@dataclass(frozen=True)
class TokenLogProbs:
    """`log_probs` [T]; `entropy` [T], None when it was not asked for. float32 (float64 for float64 logits)."""

    log_probs: Tensor
    entropy: Tensor | None


def refuse_second_derivative() -> None:
    """Called in a backward pass, where autograd is on only with create_graph=True. Without this the second derivative would
    come out as zero, silently, wherever the first is not the only term."""
    if torch.is_grad_enabled():
        raise NotImplementedError(
            "log-probs have no second derivative here; call backward or autograd.grad without create_graph=True"
        )


def require_label_per_row(logits: Tensor, labels: Tensor) -> None:
    """Raise DataError unless `labels` [T] fit `logits` [T, v]; labels of one entry would be used for every row."""
    if labels.shape != logits.shape[:1]:
        raise DataError(f"labels {tuple(labels.shape)} and logits {tuple(logits.shape)} do not agree; expected one label per row")


def _refuse_to_overwrite(logits: Tensor) -> None:
    """Raises ValueError for logits whose memory is not theirs alone to give away."""
    owner = logits if logits._base is None else logits._base
    if owner.requires_grad and owner.is_leaf:
        raise ValueError(
            f"overwrite_logits=True would write the gradient over a leaf tensor of shape {tuple(owner.shape)} that requires "
            "grad, such as a parameter; pass logits that a model computed, or leave overwrite_logits off"
        )
    if any(stride == 0 and size > 1 for stride, size in zip(logits.stride(), logits.shape, strict=True)):
        raise ValueError(
            f"overwrite_logits=True needs an element of memory for each logit; shape {tuple(logits.shape)} with strides "
            f"{logits.stride()} shares them (expanded); pass logits.contiguous(), or leave overwrite_logits off"
        )


class _VocabLogProbs(torch.autograd.Function):
    """Keeps the caller's logits and three numbers a row."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, shard: VocabShard, temperature: float, entropy: EntropyMode, overwrite: bool
    ) -> Any:
        stats = row_statistics(logits, labels, shard, temperature=temperature, with_entropy=entropy != "none")
        totals = merge_rows(shard.gather(stats), temperature=temperature)
        ctx.save_for_backward(logits, labels, totals.lse(temperature), totals.entropy)
        ctx.shard, ctx.temperature, ctx.overwrite, ctx.overwritten = shard, temperature, overwrite, False
        ctx.set_materialize_grads(False)
        if entropy == "none":
            return totals.log_probs(temperature), None
        if entropy == "metric":
            ctx.mark_non_differentiable(totals.entropy)
        return totals.log_probs(temperature), totals.entropy

    @staticmethod
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> Any:
        refuse_second_derivative()
        if ctx.overwritten:
            raise RuntimeError(
                "second backward through log-probs with overwrite_logits=True: the first one wrote its gradient over the "
                "logits; sum the losses and call backward once, or leave overwrite_logits off"
            )
        logits, labels, lse, entropy = ctx.saved_tensors
        ctx.overwritten = ctx.overwrite
        grad = dense_gradient(
            logits,
            labels,
            ctx.shard,
            lse,
            entropy,
            temperature=ctx.temperature,
            grad_log_probs=grad_log_probs,
            grad_entropy=grad_entropy,
            out=logits.detach() if ctx.overwrite else None,
        )
        return grad, None, None, None, None, None


def vocab_log_probs(
    logits: Tensor,
    labels: Tensor,
    *,
    vocab_size: int,
    temperature: float,
    group: dist.ProcessGroup | None,
    entropy: EntropyMode,
    overwrite_logits: bool = False,
) -> TokenLogProbs:
    """Log-probs of `labels` (any integers) [T] under softmax(logits / temperature) over the real vocabulary, and its entropy.

    `logits` [T, v] are this rank's columns, as many on every rank, in rank order; `labels` are ids of the whole vocabulary
    (SEMANTICS 1, 2). Every rank of `group` calls with the same labels and gets the same result; one collective forward, none
    backward (each rank's gradient is that of its own columns, given that all ranks backpropagate the same loss). None = not
    split. That the ranks hold equally many columns is not checked: the check would be a second collective.
    `entropy`: "none"; "metric" (no gradient); "grad". A label outside [0, vocab_size) gets log-prob -inf.

    `overwrite_logits`: the backward pass writes the gradient over the memory of the logits, which saves a [T, v] buffer.
    From then on the logits, and whatever shares their memory, hold the gradient. Autograd is told: an operation that needs
    the logits' values in its own, later backward pass (the tanh of a soft cap that made them, a second loss on them)
    raises its error about an in-place change; a matmul that made them does not need them. A second backward through the
    result raises RuntimeError, and logits that are a leaf requiring grad, a view of one, or expanded raise ValueError.
    Logits without gradient are never written.

    Second derivatives raise NotImplementedError. Raises DataError unless there is one label per row, ParallelError when the
    ranks hold too few columns.
    """
    require_label_per_row(logits, labels)
    if overwrite_logits:
        _refuse_to_overwrite(logits)
    shard = VocabShard.of(logits.shape[1], vocab_size=vocab_size, group=group)
    log_probs, entropies = _VocabLogProbs.apply(  # type: ignore[no-untyped-call]
        logits, labels, shard, temperature, entropy, overwrite_logits
    )
    return TokenLogProbs(log_probs=log_probs, entropy=entropies)
