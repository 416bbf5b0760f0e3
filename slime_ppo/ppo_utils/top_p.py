"""Log-probs renormalised over the ids the sampler could have drawn (top-p, top-k or both; SEMANTICS 2).

Shapes: T tokens, K recorded ids of all tokens, v columns on this rank, W ranks of the group.

log p_S(y) = z_y - logsumexp over v in S of z_v, z = logits / temperature, S = recorded ids of the token and y itself. Work on S is
O(K). The same pass gives the log-prob over the whole vocabulary (for the KL to the reference), its entropy and the mass
outside S, from one softmax and one all-gather of six numbers a token.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime_ppo.errors import DataError
from slime_ppo.ppo_utils.vocab_parallel import (
    EntropyMode,
    VocabShard,
    dense_gradient,
    merge_rows,
    refuse_second_derivative,
    row_statistics,
)


@dataclass(frozen=True)
class SupportLogProbs:
    """Each [T]: `log_probs` over the support; `full_log_probs` and `entropy` over the vocabulary; `outside_mass` = the
    probability that softmax(logits / temperature) gives to ids outside the support."""

    log_probs: Tensor
    full_log_probs: Tensor
    outside_mass: Tensor
    entropy: Tensor | None


@dataclass(frozen=True)
class _Entries:
    """The support entries in this rank's columns: row and column of each, and which is the sampled token."""

    rows: Tensor
    columns: Tensor
    is_label: Tensor


def _local_entries(labels: Tensor, support_ids: Tensor, support_counts: Tensor, shard: VocabShard) -> _Entries:
    """The sampled token enters once, by itself; a recorded id equal to it is dropped, so that the union holds by construction."""
    tokens = torch.arange(len(labels), device=labels.device)
    rows = torch.cat([torch.repeat_interleave(tokens, support_counts), tokens])
    ids = torch.cat([support_ids.to(labels.dtype), labels])
    is_label = torch.arange(len(ids), device=labels.device) >= len(support_ids)
    columns, owned = shard.local(ids)
    kept = (owned & (is_label | (ids != labels[rows]))).nonzero()[:, 0]
    return _Entries(rows[kept], columns[kept], is_label[kept])


def _support_statistics(x: Tensor, rows: Tensor, num_rows: int, temperature: float) -> Tensor:
    """Max of the raw logits `x` of each row's entries and sum of e^((x - max)/temperature), [T, 2]; (-inf, 0) where none."""
    top = x.new_full((num_rows,), float("-inf")).scatter_reduce(0, rows, x, "amax")
    base = torch.where(top == float("-inf"), 0.0, top)
    total = x.new_zeros(num_rows).index_add(0, rows, ((x - base[rows]) / temperature).exp())
    return torch.stack([top, total], -1)


class _SupportLogProbs(torch.autograd.Function):
    """Keeps the caller's logits, the local entries and a few numbers a row."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, entries: _Entries, shard: VocabShard, temperature: float, entropy: EntropyMode
    ) -> Any:
        stats = row_statistics(logits, labels, shard, temperature=temperature, with_entropy=entropy != "none")
        x = logits[entries.rows, entries.columns].to(stats.dtype)
        parts = shard.gather(torch.cat([stats, _support_statistics(x, entries.rows, len(labels), temperature)], -1))
        totals = merge_rows(parts[..., :4], temperature=temperature)
        top = parts[..., 4].amax(0)
        log_sum = (parts[..., 5] * ((parts[..., 4] - top) / temperature).exp()).sum(0).log()
        log_probs = (totals.label - top) / temperature - log_sum
        outside = -torch.expm1((top - totals.top) / temperature + log_sum - totals.log_sum).clamp_(max=0.0)
        support_lse = top + temperature * log_sum
        saved = (entries.rows, entries.columns, entries.is_label, support_lse)
        ctx.save_for_backward(logits, labels, totals.lse(temperature), totals.entropy, *saved)
        ctx.shard, ctx.temperature = shard, temperature
        ctx.set_materialize_grads(False)
        constants = [outside] if entropy == "grad" else [outside, totals.entropy]
        ctx.mark_non_differentiable(*constants)
        return log_probs, totals.log_probs(temperature), outside, totals.entropy

    @staticmethod
    def backward(ctx: Any, grad_support: Tensor | None, grad_full: Tensor | None, _: Any, grad_entropy: Tensor | None) -> Any:
        refuse_second_derivative()
        logits, labels, lse, entropy, rows, columns, is_label, support_lse = ctx.saved_tensors
        if grad_full is None and grad_entropy is None:
            grad = torch.zeros_like(logits, memory_format=torch.contiguous_format)
        else:
            upstream = {"grad_log_probs": grad_full, "grad_entropy": grad_entropy}
            grad = dense_gradient(logits, labels, ctx.shard, lse, entropy, temperature=ctx.temperature, **upstream)
        if grad_support is not None:
            g = grad_support.to(lse.dtype)[rows]
            p = ((logits[rows, columns] - support_lse[rows]) / ctx.temperature).exp()
            part = torch.where(g == 0, 0.0, g * (is_label.to(p.dtype) - p) / ctx.temperature)
            # the entries of a row are distinct, so that plain assignment after the addition is exact
            grad[rows, columns] = (grad[rows, columns] + part).to(grad.dtype)
        return grad, None, None, None, None, None


def support_log_probs(
    logits: Tensor,
    labels: Tensor,
    support_ids: Tensor,
    support_counts: Tensor,
    *,
    vocab_size: int,
    temperature: float,
    group: dist.ProcessGroup | None,
    entropy: EntropyMode,
) -> SupportLogProbs:
    """Log-probs of `labels` [T] over their recorded supports and over the vocabulary.

    `logits` [T, v] are this rank's columns; `support_ids` [K] the flat ids of all tokens, `support_counts` [T] how many
    belong to each; both the same on every rank. An empty row is the support {label}: log-prob 0, for masked tokens.
    Gradients: through `log_probs` on the support only (and exactly 0 where the support is one token), through
    `full_log_probs` and, with entropy="grad", `entropy` on the real vocabulary; `outside_mass` has none.
    Every rank of `group` calls; one collective forward, none backward. Second derivatives raise NotImplementedError.
    Ids are trusted: support_checks.validate_support is run where they arrive. Raises DataError when shapes do not fit.
    """
    if support_counts.shape != labels.shape or labels.shape != logits.shape[:1]:
        raise DataError(
            f"support counts {tuple(support_counts.shape)}, labels {tuple(labels.shape)} and "
            f"logits {tuple(logits.shape)} do not agree; expected one count and one label per row of logits"
        )
    if int(support_counts.sum()) != len(support_ids):
        raise DataError(f"support counts add up to {int(support_counts.sum())}, but there are {len(support_ids)} support ids")
    shard = VocabShard.of(logits.shape[1], vocab_size=vocab_size, group=group)
    entries = _local_entries(labels, support_ids, support_counts, shard)
    log_probs, full, outside, entropies = _SupportLogProbs.apply(logits, labels, entries, shard, temperature, entropy)  # type: ignore[no-untyped-call]
    return SupportLogProbs(log_probs, full, outside, None if entropy == "none" else entropies)
