"""What one rank computes of its entries of the supports: statistics of each row, and the gradient. The equations' only home.

Shapes: T tokens, K recorded ids of all tokens, v columns on this rank. S = the recorded ids of a token and its label y.

vocab_rows.py has the same over all columns, and what the four numbers of a row mean; here they are taken over S:

    m = max x,   s = sum e^((x - m)/temperature),   t = sum e^(..) (x - m)/temperature,   x_y = logit of the label or -inf
    d loss / d x_a = (g_lp (1[a = y] - p_S(a)) - g_H p_S(a) (log p_S(a) + H_S)) / temperature   for a in S

Nothing here talks to other ranks. Each reads its own entries of S; one without any gives (-inf, 0, 0, -inf), which weighs
nothing. O(K) work and memory. Triton kernels do the same for CUDA tensors.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from slime_ppo.ppo_utils.triton_kernels import has_kernels
from slime_ppo.ppo_utils.vocab_rows import LOG_ZERO, RowTotals, VocabShard, arithmetic_dtype


@dataclass(frozen=True)
class TokenSupports:
    """What the sampler could have drawn at each of T tokens, the same on every rank of a vocabulary split.

    `ids` [K], integers: the recorded ids of all tokens, token after token, distinct within a token; `counts` [T]: how
    many belong to each (sum = K). The sampled token need not be among them, and none at all means {sampled token}.
    `unrestricted` bool [T]: tokens drawn from the whole real vocabulary, whose count is 0; None = there are none.
    Ids are trusted here; support_checks.validate_support is run where they arrive.
    """

    ids: Tensor
    counts: Tensor
    unrestricted: Tensor | None = None


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
    """What the gradient of each row is made of, each [T] but `lse` [T, 2] (RowTotals.lse): log-sum-exp, entropy, and the
    gradients that come from upstream."""

    lse: Tensor
    entropy: Tensor
    grad_log_probs: Tensor
    grad_entropy: Tensor

    @staticmethod
    def of(lse: Tensor, entropy: Tensor, grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> "RowGradients":
        """None from autograd is no gradient."""
        grads = (torch.zeros_like(entropy) if grad is None else grad.to(lse.dtype) for grad in (grad_log_probs, grad_entropy))
        return RowGradients(lse, entropy, *grads)

    def without(self, marked: Tensor) -> "RowGradients":
        """No gradient from upstream on the rows `marked` bool [T]."""
        grads = (grad.masked_fill(marked, 0.0) for grad in (self.grad_log_probs, self.grad_entropy))
        return RowGradients(self.lse, self.entropy, *grads)


def support_statistics(logits: Tensor, labels: Tensor, supports: TokenSupports, shard: VocabShard, *, temperature: float) -> Tensor:
    """This rank's (m, s, t, x_y) over the support of each row, [T, 4], as vocab_rows.row_statistics has them over all
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
    weighted = (label_p * label_log_p.clamp(min=LOG_ZERO)).index_add(0, entries.rows, p * log_p.clamp(min=LOG_ZERO))
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

    def add(row: Tensor, at: Tensor, own: Tensor, extra: Tensor | float) -> None:
        """Add to grad[row, at] where it is this rank's `own`, each [n]; `extra` [n] is what only the label gets."""
        top, log_sum = rows.lse.index_select(0, row).unbind(-1)
        log_p = (_read(logits, row, at) - top - log_sum) / temperature
        pull = constant.index_select(0, row) + slope.index_select(0, row) * log_p.clamp(min=LOG_ZERO)
        part = torch.where(own & used.index_select(0, row), (log_p.exp() * pull + extra) / temperature, 0.0)
        flat.index_add_(0, row * grad.shape[1] + at, part.to(grad.dtype))

    add(entries.rows, entries.columns, entries.own, 0.0)
    add(tokens, column, owned, at_label)


def log_probs_of(totals: RowTotals, temperature: float) -> Tensor:
    """-inf for a sampled token without probability, also where the whole support has none (-inf - -inf would be NaN)."""
    return torch.where(totals.label == float("-inf"), float("-inf"), totals.log_probs(temperature))


def outside_mass(inside: RowTotals, full: RowTotals, temperature: float) -> Tensor:
    """Probability [T] outside the support, 1 - (sum over the support) / (sum over the vocabulary), exact where it is small."""
    log_mass = (inside.top - full.top) / temperature + inside.log_sum - full.log_sum
    return -torch.expm1(log_mass.clamp(max=0.0))
