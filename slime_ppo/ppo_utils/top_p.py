"""Log-probs renormalised over the ids the sampler could have drawn: top-p, top-k, min-p or any mix (SEMANTICS 2).

Shapes: T tokens, K recorded ids of all tokens, V the real vocabulary, v columns on this rank, W ranks of the group.

With z = logits / temperature and S = the recorded ids of a token and the sampled token y itself:

    log p_S(y) = z_y - log sum over S of e^z,        H_S = - sum over S of p_S log p_S
    d loss / d z_a = g_lp (1[a = y] - p_S(a)) - g_H p_S(a) (log p_S(a) + H_S)   for a in S, exactly 0 elsewhere

p_S is the sampler's own distribution (nucleus sampling: Holtzman et al., "The curious case of neural text degeneration"
(2020), eq. 2 and 3), so that the ratio of two policies on the same S is the exact ratio of what was sampled from.

support_rows.py computes a rank's own entries of S, forward and backward; this file puts the ranks together: one all-gather of
four numbers a row (max, sum, weighted sum, logit of y) forward, no collective backward, and autograd. Arithmetic and memory
are O(K); of size [T, v] there is only the gradient, filled with zeros.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from slime_ppo.errors import DataError
from slime_ppo.ppo_utils.support_rows import (
    RowGradients,
    TokenSupports,
    add_support_gradient,
    log_probs_of,
    outside_mass,
    support_statistics,
)
from slime_ppo.ppo_utils.vocab_parallel import (
    EntropyMode,
    TokenLogProbs,
    VocabShard,
    dense_gradient,
    merge_rows,
    refuse_second_derivative,
    require_label_per_row,
    row_statistics,
)

__all__ = [
    "EntropySupport",
    "RowGradients",
    "SupportLogProbs",
    "TokenSupports",
    "add_support_gradient",
    "require_fitting",
    "support_and_vocab_log_probs",
    "support_log_probs",
    "support_statistics",
]

EntropySupport = Literal["full", "sampled"]

# Unrestricted rows are copied out of the logits this many at a time.
_ROWS_AT_ONCE = 64
_FULL_CHECK = "support_checks.validate_support names sample and token"


@dataclass(frozen=True)
class SupportLogProbs:
    """Each [T]: `log_probs` over the support; `full_log_probs` over the vocabulary; `outside_mass` = the probability that
    softmax(logits / temperature) gives to ids outside the support; `entropy` over the one of both that was asked for."""

    log_probs: Tensor
    full_log_probs: Tensor
    outside_mass: Tensor
    entropy: Tensor | None


def _unrestricted_rows(supports: TokenSupports) -> Sequence[Tensor]:
    """Indices of the unrestricted rows, some at a time."""
    if supports.unrestricted is None:
        return ()
    index = supports.unrestricted.nonzero()[:, 0]
    return torch.split(index, _ROWS_AT_ONCE) if len(index) else ()


def _add_gradient(
    grad: Tensor,
    logits: Tensor,
    labels: Tensor,
    supports: TokenSupports,
    shard: VocabShard,
    *,
    rows: RowGradients,
    temperature: float,
) -> None:
    """Add the gradient of all rows, restricted and unrestricted, to `grad`, in place."""
    restricted = rows if supports.unrestricted is None else rows.without(supports.unrestricted)
    add_support_gradient(grad, logits, labels, supports, shard, rows=restricted, temperature=temperature)
    for index in _unrestricted_rows(supports):
        grad[index] += dense_gradient(
            logits[index],
            labels[index],
            shard,
            rows.lse[index],
            rows.entropy[index],
            temperature=temperature,
            grad_log_probs=rows.grad_log_probs[index],
            grad_entropy=rows.grad_entropy[index],
        )


class _SupportLogProbs(torch.autograd.Function):
    """Keeps the caller's logits and supports, and three numbers a row."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        supports: TokenSupports,
        shard: VocabShard,
        temperature: float,
        entropy: EntropyMode,
    ) -> Any:
        stats = support_statistics(logits, labels, supports, shard, temperature=temperature)
        for index in _unrestricted_rows(supports):
            stats[index] = row_statistics(
                logits[index], labels[index], shard, temperature=temperature, with_entropy=entropy != "none"
            )
        totals = merge_rows(shard.gather(stats), temperature=temperature)
        ids, counts, unrestricted = supports.ids, supports.counts, supports.unrestricted
        ctx.save_for_backward(logits, labels, ids, counts, unrestricted, totals.lse(temperature), totals.entropy)
        ctx.shard, ctx.temperature = shard, temperature
        ctx.set_materialize_grads(False)
        if entropy == "none":
            return log_probs_of(totals, temperature), None
        if entropy == "metric":
            ctx.mark_non_differentiable(totals.entropy)
        return log_probs_of(totals, temperature), totals.entropy

    @staticmethod
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> Any:
        refuse_second_derivative()
        logits, labels, ids, counts, unrestricted, lse, entropy = ctx.saved_tensors
        grad = torch.zeros_like(logits, memory_format=torch.contiguous_format)
        rows = RowGradients.of(lse, entropy, grad_log_probs, grad_entropy)
        supports = TokenSupports(ids, counts, unrestricted)
        _add_gradient(grad, logits, labels, supports, ctx.shard, rows=rows, temperature=ctx.temperature)
        return grad, None, None, None, None, None


class _SupportAndVocabLogProbs(torch.autograd.Function):
    """Keeps the caller's logits and supports, and six numbers a row."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        supports: TokenSupports,
        shard: VocabShard,
        temperature: float,
        entropy: EntropyMode,
        entropy_support: EntropySupport,
    ) -> Any:
        stats = row_statistics(logits, labels, shard, temperature=temperature, with_entropy=entropy != "none")
        own = support_statistics(logits, labels, supports, shard, temperature=temperature)[:, :3]
        if supports.unrestricted is not None:
            own = torch.where(supports.unrestricted[:, None], stats[:, :3], own)
        parts = shard.gather(torch.cat([stats, own], -1))
        full = merge_rows(parts[..., :4], temperature=temperature)
        inside = merge_rows(parts[..., [4, 5, 6, 3]], temperature=temperature)
        outside = outside_mass(inside, full, temperature)
        ids, counts, unrestricted = supports.ids, supports.counts, supports.unrestricted
        rows = (inside.lse(temperature), inside.entropy, full.lse(temperature), full.entropy)
        ctx.save_for_backward(logits, labels, ids, counts, unrestricted, *rows)
        ctx.shard, ctx.temperature, ctx.entropy_support = shard, temperature, entropy_support
        ctx.set_materialize_grads(False)
        chosen = full.entropy if entropy_support == "full" else inside.entropy
        ctx.mark_non_differentiable(*([outside] if entropy == "grad" else [outside, chosen]))
        return log_probs_of(inside, temperature), log_probs_of(full, temperature), outside, chosen

    @staticmethod
    def backward(ctx: Any, grad_support: Tensor | None, grad_full: Tensor | None, _: Any, grad_entropy: Tensor | None) -> Any:
        refuse_second_derivative()
        logits, labels, ids, counts, unrestricted, lse, entropy, full_lse, full_entropy = ctx.saved_tensors
        h_inside, h_full = (grad_entropy, None) if ctx.entropy_support == "sampled" else (None, grad_entropy)
        if grad_full is None and h_full is None:
            grad = torch.zeros_like(logits, memory_format=torch.contiguous_format)
        else:
            upstream = {"grad_log_probs": grad_full, "grad_entropy": h_full}
            grad = dense_gradient(logits, labels, ctx.shard, full_lse, full_entropy, temperature=ctx.temperature, **upstream)
        if grad_support is not None or h_inside is not None:
            rows = RowGradients.of(lse, entropy, grad_support, h_inside)
            supports = TokenSupports(ids, counts, unrestricted)
            _add_gradient(grad, logits, labels, supports, ctx.shard, rows=rows, temperature=ctx.temperature)
        return grad, None, None, None, None, None, None


def require_fitting(supports: TokenSupports, labels: Tensor) -> None:
    """Raise DataError when supports do not fit the labels [T] or their own counts. Reads three numbers back from the device.

    These are the checks without which memory would be misread. Ids outside the vocabulary, doubled ones and the like are
    for support_checks.validate_support, on the driver, whose messages name sample and token.
    """
    counts, unrestricted = supports.counts, supports.unrestricted
    marked = torch.zeros_like(counts, dtype=torch.bool) if unrestricted is None else unrestricted
    if not labels.shape == counts.shape == marked.shape:
        raise DataError(
            f"support counts {tuple(counts.shape)}, unrestricted marks {tuple(marked.shape)} and labels {tuple(labels.shape)} do "
            "not agree; expected one of each per label"
        )
    negative, total, of_marked = torch.stack([(counts < 0).sum(), counts.sum(), counts.masked_fill(~marked, 0).sum()]).tolist()
    if negative:
        raise DataError(f"{negative} support counts are negative; expected 0 or more ids per row. {_FULL_CHECK}")
    if total != len(supports.ids):
        raise DataError(f"support counts add up to {total}, but there are {len(supports.ids)} support ids. {_FULL_CHECK}")
    if of_marked != 0:
        raise DataError(f"rows marked unrestricted hold {of_marked} support ids; expected a count of 0 there. {_FULL_CHECK}")


def support_log_probs(
    logits: Tensor,
    labels: Tensor,
    supports: TokenSupports,
    *,
    vocab_size: int,
    temperature: float,
    group: dist.ProcessGroup | None,
    entropy: EntropyMode,
) -> TokenLogProbs:
    """Log-probs of `labels` [T] over their supports, and the entropy of softmax(logits / temperature) on the support.

    `logits` [T, v] are this rank's columns, as many on every rank (not checked); labels and supports hold ids of the whole
    vocabulary. O(K) work and memory: of rows marked unrestricted the whole row is read, of all others the support only. The
    gradient is exactly 0 outside the support and where the support is one token. Every rank of `group` calls with the same
    labels and supports and gets the same result; one collective forward (four numbers a token), none backward. None = not
    split. `entropy`: "none"; "metric" (no gradient); "grad". A sampled token without probability has log-prob -inf. Ids are
    any integers, and trusted: support_checks.validate_support checks them where they arrive, and names sample and token.
    Second derivatives raise NotImplementedError. Raises DataError when shapes or counts do not fit, ParallelError when the
    ranks hold too few columns.
    """
    require_label_per_row(logits, labels)
    require_fitting(supports, labels)
    shard = VocabShard.of(logits.shape[1], vocab_size=vocab_size, group=group)
    log_probs, entropies = _SupportLogProbs.apply(logits, labels, supports, shard, temperature, entropy)  # type: ignore[no-untyped-call]
    return TokenLogProbs(log_probs=log_probs, entropy=entropies)


def support_and_vocab_log_probs(
    logits: Tensor,
    labels: Tensor,
    supports: TokenSupports,
    *,
    vocab_size: int,
    temperature: float,
    group: dist.ProcessGroup | None,
    entropy: EntropyMode,
    entropy_support: EntropySupport = "full",
) -> SupportLogProbs:
    """Log-probs of `labels` [T] over their supports and over the whole vocabulary, from one softmax pass.

    Ratio and correction use the first, the KL to the reference the second (SEMANTICS 2). `entropy_support`: whether the
    entropy is that of the whole vocabulary or of the support. Gradients flow through `log_probs` on the support only,
    through `full_log_probs` on the real vocabulary, through `entropy` (mode "grad") on the one it is taken over, and not
    through `outside_mass`. One collective forward (seven numbers a token), none backward; everything else as
    support_log_probs, which is for when nothing over the whole vocabulary is asked for.
    """
    require_label_per_row(logits, labels)
    require_fitting(supports, labels)
    shard = VocabShard.of(logits.shape[1], vocab_size=vocab_size, group=group)
    options = (shard, temperature, entropy, entropy_support)
    log_probs, full, outside, entropies = _SupportAndVocabLogProbs.apply(logits, labels, supports, *options)  # type: ignore[no-untyped-call]
    return SupportLogProbs(log_probs, full, outside, None if entropy == "none" else entropies)
