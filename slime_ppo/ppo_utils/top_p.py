"""Log-probs renormalised over the ids the sampler could have drawn: top-p, top-k, min-p or any mix (SEMANTICS 2).

Shapes: T tokens, K recorded ids of all tokens, V the real vocabulary, v columns on this rank, W ranks of the group.

With z = logits / temperature and S = the recorded ids of a token and the sampled token y itself:

    log p_S(y) = z_y - log sum over S of e^z,        H_S = - sum over S of p_S log p_S
    d loss / d z_a = g_lp (1[a = y] - p_S(a)) - g_H p_S(a) (log p_S(a) + H_S)   for a in S, exactly 0 elsewhere

p_S is the sampler's own distribution (nucleus sampling: Holtzman et al., "The curious case of neural text degeneration"
(2020), eq. 2 and 3), so that the ratio of two policies on the same S is the exact ratio of what was sampled from.

Each rank reads only its own entries of S and keeps the four numbers a row of vocab_parallel.py (max, sum, weighted sum, logit
of y); one all-gather merges them. A rank without an entry sends (-inf, 0, 0, -inf), which weighs nothing. Arithmetic and
memory are O(K); of size [T, v] there is only the gradient, filled with zeros. Triton kernels do the same for CUDA tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from slime_ppo.errors import DataError
from slime_ppo.ppo_utils.triton_kernels import has_kernels
from slime_ppo.ppo_utils.vocab_parallel import (
    EntropyMode,
    RowTotals,
    TokenLogProbs,
    VocabShard,
    arithmetic_dtype,
    dense_gradient,
    merge_rows,
    refuse_second_derivative,
    row_statistics,
)

EntropySupport = Literal["full", "sampled"]

# Unrestricted rows are copied out of the logits this many at a time.
_ROWS_AT_ONCE = 64
# Stands for log 0 where it is multiplied by a probability of 0: -inf * 0 is NaN.
_LOG_ZERO = -1e30


@dataclass(frozen=True)
class TokenSupports:
    """What the sampler could have drawn at each of T tokens, the same on every rank of a vocabulary split.

    `ids` int64 [K]: the recorded ids of all tokens, token after token, distinct within a token; `counts` int64 [T]: how
    many belong to each (sum = K). The sampled token need not be among them, and none at all means {sampled token}.
    `unrestricted` bool [T]: tokens drawn from the whole real vocabulary, whose count is 0; None = there are none.
    Ids are trusted here; support_checks.validate_support is run where they arrive.
    """

    ids: Tensor
    counts: Tensor
    unrestricted: Tensor | None = None


@dataclass(frozen=True)
class SupportLogProbs:
    """Each [T]: `log_probs` over the support; `full_log_probs` over the vocabulary; `outside_mass` = the probability that
    softmax(logits / temperature) gives to ids outside the support; `entropy` over the one of both that was asked for."""

    log_probs: Tensor
    full_log_probs: Tensor
    outside_mass: Tensor
    entropy: Tensor | None


@dataclass(frozen=True)
class _Entries:
    """Row and column of each recorded id, each [K], and whether it counts here: other ranks' ids do not (their column is 0),
    nor does the sampled token, which every row has by itself, so that the union holds by construction."""

    rows: Tensor
    columns: Tensor
    own: Tensor

    @staticmethod
    def of(labels: Tensor, supports: TokenSupports, shard: VocabShard) -> "_Entries":
        tokens = torch.arange(len(labels), device=labels.device)
        rows = torch.repeat_interleave(tokens, supports.counts, output_size=len(supports.ids))
        columns, owned = shard.local(supports.ids)
        return _Entries(rows, columns, owned & (supports.ids != labels.index_select(0, rows)))


def _read(logits: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """logits[rows, columns], a tenth of the time: one flat index into the memory of whatever view the logits are."""
    row_stride, column_stride = logits.stride()
    span = 1 + (logits.shape[0] - 1) * row_stride + (logits.shape[1] - 1) * column_stride
    flat = logits.as_strided((span if logits.numel() else 0,), (1,))
    return flat.index_select(0, rows * row_stride + columns * column_stride).to(arithmetic_dtype(logits))


@dataclass(frozen=True)
class RowGradients:
    """What the gradient of each row is made of, each [T]: log-sum-exp in units of the raw logits, entropy, and the gradients
    that come from upstream."""

    lse: Tensor
    entropy: Tensor
    grad_log_probs: Tensor
    grad_entropy: Tensor

    @staticmethod
    def of(lse: Tensor, entropy: Tensor, grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> "RowGradients":
        """None from autograd is no gradient."""
        grads = (torch.zeros_like(lse) if grad is None else grad.to(lse.dtype) for grad in (grad_log_probs, grad_entropy))
        return RowGradients(lse, entropy, *grads)

    def without(self, marked: Tensor) -> "RowGradients":
        """No gradient from upstream on the rows `marked` bool [T]."""
        grads = (grad.masked_fill(marked, 0.0) for grad in (self.grad_log_probs, self.grad_entropy))
        return RowGradients(self.lse, self.entropy, *grads)


def support_statistics(logits: Tensor, labels: Tensor, supports: TokenSupports, shard: VocabShard, *, temperature: float) -> Tensor:
    """This rank's (m, s, t, x_y) over the support of each row, [T, 4], as vocab_parallel.row_statistics has them over all
    columns: max, sum of e^((x - m)/temperature), the same weighted by the exponent, logit of the label; (-inf, 0, 0, -inf)
    where the rank holds no entry. `unrestricted` is not looked at: such rows come out as those of {label}."""
    if has_kernels(logits):
        from slime_ppo.ppo_utils.triton_kernels.support import support_statistics_kernel

        return support_statistics_kernel(logits, labels, supports, shard, temperature=temperature)
    entries = _Entries.of(labels, supports, shard)
    column, owned = shard.local(labels)
    label = torch.where(owned, _read(logits, torch.arange(len(labels), device=labels.device), column), float("-inf"))
    x = torch.where(entries.own, _read(logits, entries.rows, entries.columns), float("-inf"))
    top = label.scatter_reduce(0, entries.rows, x, "amax")
    # a row of -inf only has no weight; subtracting its -inf from itself would make it NaN
    base = torch.where(top == float("-inf"), 0.0, top)
    log_p, label_log_p = (x - base.index_select(0, entries.rows)) / temperature, (label - base) / temperature
    p, label_p = log_p.exp(), label_log_p.exp()
    total = label_p.index_add(0, entries.rows, p)
    weighted = (label_p * label_log_p.clamp(min=_LOG_ZERO)).index_add(0, entries.rows, p * log_p.clamp(min=_LOG_ZERO))
    return torch.stack([top, total, weighted, label], -1)


def add_support_gradient(
    grad: Tensor,
    logits: Tensor,
    labels: Tensor,
    supports: TokenSupports,
    shard: VocabShard,
    *,
    rows: RowGradients,
    temperature: float,
) -> None:
    """Add d loss / d logits to the support entries of `grad` [T, v] (contiguous), in place; its other entries are left alone.
    A row whose gradients from upstream are 0 gets 0, NaN or not. `unrestricted` is not looked at."""
    if has_kernels(logits):
        from slime_ppo.ppo_utils.triton_kernels.support import add_support_gradient_kernel

        add_support_gradient_kernel(grad, logits, labels, supports, shard, rows=rows, temperature=temperature)
        return
    entries = _Entries.of(labels, supports, shard)
    column, owned = shard.local(labels)
    tokens = torch.arange(len(labels), device=labels.device)
    # d loss / d z = p (constant + slope log p), and g_lp more at the label
    constant, slope = -(rows.grad_log_probs + rows.grad_entropy * rows.entropy), -rows.grad_entropy
    used = (rows.grad_log_probs != 0) | (rows.grad_entropy != 0)
    at_label = rows.grad_log_probs.masked_fill(~owned, 0.0)
    flat = grad.view(-1)
    for row, at, own, extra in ((entries.rows, entries.columns, entries.own, 0.0), (tokens, column, owned, at_label)):
        of_row = [per_row.index_select(0, row) for per_row in (rows.lse, constant, slope, used)]
        log_p = (_read(logits, row, at) - of_row[0]) / temperature
        part = log_p.exp() * (of_row[1] + of_row[2] * log_p.clamp(min=_LOG_ZERO)) + extra
        part = torch.where(own & of_row[3], part / temperature, 0.0)
        flat.index_add_(0, row * grad.shape[1] + at, part.to(grad.dtype))


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


def _log_probs(totals: RowTotals, temperature: float) -> Tensor:
    """-inf for a sampled token without probability, also where the whole support has none (-inf - -inf would be NaN)."""
    return torch.where(totals.label == float("-inf"), float("-inf"), totals.log_probs(temperature))


class _SupportLogProbs(torch.autograd.Function):
    """Keeps the caller's logits and supports, and two numbers a row."""

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
            return _log_probs(totals, temperature), None
        if entropy == "metric":
            ctx.mark_non_differentiable(totals.entropy)
        return _log_probs(totals, temperature), totals.entropy

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
    """Keeps the caller's logits and supports, and four numbers a row."""

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
        log_mass = (inside.top - full.top) / temperature + inside.log_sum - full.log_sum
        outside_mass = -torch.expm1(log_mass.clamp(max=0.0))
        ids, counts, unrestricted = supports.ids, supports.counts, supports.unrestricted
        rows = (inside.lse(temperature), inside.entropy, full.lse(temperature), full.entropy)
        ctx.save_for_backward(logits, labels, ids, counts, unrestricted, *rows)
        ctx.shard, ctx.temperature, ctx.entropy_support = shard, temperature, entropy_support
        ctx.set_materialize_grads(False)
        chosen = full.entropy if entropy_support == "full" else inside.entropy
        ctx.mark_non_differentiable(*([outside_mass] if entropy == "grad" else [outside_mass, chosen]))
        return _log_probs(inside, temperature), _log_probs(full, temperature), outside_mass, chosen

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
    """Raise DataError when supports do not fit the labels [T] or their own counts. Reads two numbers back from the device."""
    counts, unrestricted = supports.counts, supports.unrestricted
    marked = torch.zeros_like(counts, dtype=torch.bool) if unrestricted is None else unrestricted
    if not labels.shape == counts.shape == marked.shape:
        raise DataError(
            f"support counts {tuple(counts.shape)}, unrestricted marks {tuple(marked.shape)} and labels {tuple(labels.shape)} do "
            "not agree; expected one of each per label"
        )
    total, of_marked = torch.stack([counts.sum(), counts.masked_fill(~marked, 0).sum()]).tolist()
    if total != len(supports.ids):
        raise DataError(f"support counts add up to {total}, but there are {len(supports.ids)} support ids")
    if of_marked != 0:
        raise DataError(f"rows marked unrestricted hold {of_marked} support ids; expected a count of 0 there")


def _require_fitting(logits: Tensor, labels: Tensor, supports: TokenSupports) -> None:
    if labels.shape != logits.shape[:1]:
        raise DataError(f"labels {tuple(labels.shape)} and logits {tuple(logits.shape)} do not agree; expected one label per row")
    require_fitting(supports, labels)


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
    """Log-probs of `labels` int64 [T] over their supports, and the entropy of softmax(logits / temperature) on the support.

    `logits` [T, v] are this rank's columns; labels and supports hold ids of the whole vocabulary. O(K) work and memory: of
    rows marked unrestricted the whole row is read, of all others the support only. The gradient is exactly 0 outside the
    support and where the support is one token. Every rank of `group` calls with the same labels and supports and gets the
    same result; one collective forward (four numbers a token), none backward. None = not split. `entropy`: "none"; "metric"
    (no gradient); "grad". A sampled token without probability has log-prob -inf.
    Second derivatives raise NotImplementedError. Raises DataError when shapes or counts do not fit, ParallelError when the
    ranks hold too few columns.
    """
    _require_fitting(logits, labels, supports)
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
    """Log-probs of `labels` int64 [T] over their supports and over the whole vocabulary, from one softmax pass.

    Ratio and correction use the first, the KL to the reference the second (SEMANTICS 2). `entropy_support`: whether the
    entropy is that of the whole vocabulary or of the support. Gradients flow through `log_probs` on the support only,
    through `full_log_probs` on the real vocabulary, through `entropy` (mode "grad") on the one it is taken over, and not
    through `outside_mass`. One collective forward (seven numbers a token), none backward; everything else as
    support_log_probs, which is for when nothing over the whole vocabulary is asked for.
    """
    _require_fitting(logits, labels, supports)
    shard = VocabShard.of(logits.shape[1], vocab_size=vocab_size, group=group)
    options = (shard, temperature, entropy, entropy_support)
    log_probs, full, outside, entropies = _SupportAndVocabLogProbs.apply(logits, labels, supports, *options)  # type: ignore[no-untyped-call]
    return SupportLogProbs(log_probs, full, outside, None if entropy == "none" else entropies)
