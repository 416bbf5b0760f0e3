"""Support and vocabulary log-probs from hidden states and the lm-head's weight: the autograd function and its supports in blocks.

Shapes: N scored states, H hidden size, v rows of the weight on this rank, K recorded ids, n x c one block of logits.

Forward, a block of logits gives its share of both softmaxes, over the vocabulary and over each row's support (top_p.py).
Backward, a loss of the log-probs over the support alone has a gradient on no column but those of some support: the same
passes then run over these rows of the weight only, a small part of the three matmuls.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from slime_ppo.ppo_utils.linear_blocks import (
    BlockPlan,
    BlockSoftmax,
    block_gradients,
    block_statistics,
    merge_statistics,
    without_unused,
)
from slime_ppo.ppo_utils.support_rows import (
    RowGradients,
    TokenSupports,
    add_support_gradient,
    log_probs_of,
    outside_mass,
    support_statistics,
)
from slime_ppo.ppo_utils.top_p import EntropySupport
from slime_ppo.ppo_utils.vocab_parallel import (
    VocabShard,
    dense_gradient,
    merge_rows,
    refuse_second_derivative,
)

# Where a row's (m, s, t, x_y) lie among its seven numbers: the label's logit is the same over vocabulary and support.
_FULL, _INSIDE = [0, 1, 2, 3], [4, 5, 6, 3]


@dataclass(frozen=True)
class SupportRequest:
    """What is asked about the states: the softmax over the vocabulary, that over the supports, and which entropy."""

    softmax: BlockSoftmax
    supports: TokenSupports
    entropy_support: EntropySupport


def _cut(supports: TokenSupports, plan: BlockPlan, shard: VocabShard) -> dict[tuple[int, int], TokenSupports]:
    """The supports of each block of logits: the ids in it, by its first row and first id. Reads the numbers of ids in the blocks
    back from the device, once."""
    ids, num_rows = supports.ids, len(supports.counts)
    row_blocks, vocab_blocks = plan.row_blocks(num_rows), plan.vocab_blocks(shard)
    rows = torch.arange(num_rows, device=ids.device)
    rows = torch.repeat_interleave(rows, supports.counts, output_size=len(ids))
    columns, owned = shard.local(ids)
    across, last = columns // plan.columns, len(row_blocks) * len(vocab_blocks)
    counts = torch.zeros((len(vocab_blocks), num_rows), dtype=torch.int64, device=ids.device)
    counts.view(-1).index_add_(0, across * num_rows + rows, owned.long())
    # ids of other ranks come last; a stable order keeps those of a row together
    block = torch.where(owned, rows // plan.rows * len(vocab_blocks) + across, last)
    sizes = torch.zeros(last + 1, dtype=torch.int64, device=ids.device).index_add_(0, block, torch.ones_like(block))
    parts = iter(torch.split(ids[torch.argsort(block, stable=True)], sizes.tolist()))
    return {
        (at.start, of.shard.start): TokenSupports(next(parts), counts[index, at])
        for at in row_blocks
        for index, of in enumerate(vocab_blocks)
    }


def _support_columns(asked: SupportRequest) -> tuple[Tensor, SupportRequest]:
    """This rank's columns that lie in any support, int64 [U] ascending, and the question put to these U columns alone: ids
    renumbered, those of other ranks -1, which nobody holds."""
    softmax, supports = asked.softmax, asked.supports
    named = [softmax.shard.local(ids) for ids in (softmax.labels, supports.ids)]
    columns = torch.unique(torch.cat([column[owned] for column, owned in named]))
    labels, ids = (torch.where(owned, torch.searchsorted(columns, column), -1) for column, owned in named)
    shard = VocabShard(start=0, num_real=len(columns), group=None)
    return columns, replace(asked, softmax=replace(softmax, labels=labels, shard=shard), supports=replace(supports, ids=ids))


def _of_rows(gradients: RowGradients, rows: slice) -> RowGradients:
    """Those of some rows."""
    grads = (gradients.grad_log_probs[rows], gradients.grad_entropy[rows])
    return RowGradients(gradients.lse[rows], gradients.entropy[rows], *grads)


def _gradients(
    hidden: Tensor,
    weight: Tensor,
    asked: SupportRequest,
    *,
    inside: RowGradients,
    full: RowGradients | None,
    needed: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of states and weight from those of both log-probs and entropies; `full` None: nothing over the vocabulary."""
    softmax = asked.softmax
    # the gradient of the entropy costs another pass over the block
    has_entropy = full is not None and bool(full.grad_entropy.any())
    cut, temperature = _cut(asked.supports, softmax.plan, softmax.shard), softmax.temperature

    def gradient(x: Tensor, rows: slice, shard: VocabShard) -> Tensor:
        labels = softmax.labels[rows]
        if full is None:
            grad = torch.zeros_like(x)
        else:
            whole = _of_rows(full, rows)
            grad = dense_gradient(
                x,
                labels,
                shard,
                whole.lse,
                whole.entropy,
                temperature=temperature,
                grad_log_probs=whole.grad_log_probs,
                grad_entropy=whole.grad_entropy if has_entropy else None,
            )
        own = _of_rows(inside, rows)
        supports = cut[rows.start, shard.start]
        add_support_gradient(grad, x, labels, supports, shard, rows=own, temperature=temperature)
        return grad

    grads = [grad for part in (inside, full) if part is not None for grad in (part.grad_log_probs, part.grad_entropy)]
    states = without_unused(hidden, *grads)
    return block_gradients(states, weight, softmax.shard, softmax.plan, gradient, needed=needed)


def _gradients_of_supports(
    hidden: Tensor, weight: Tensor, asked: SupportRequest, *, inside: RowGradients, needed: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """The same when no gradient reaches a column outside the supports: on these rows of the weight alone."""
    columns, asked = _support_columns(asked)
    d_hidden, d_columns = None, None
    if len(columns):
        part = weight.index_select(0, columns)
        d_hidden, d_columns = _gradients(hidden, part, asked, inside=inside, full=None, needed=needed)
    elif needed[0]:
        d_hidden = torch.zeros_like(hidden)
    d_weight = torch.zeros_like(weight) if needed[1] else None
    if d_weight is not None and d_columns is not None:
        d_weight[columns] = d_columns
    return d_hidden, d_weight


def _with_unrestricted(inside: RowGradients, full: RowGradients, marked: Tensor) -> tuple[RowGradients, RowGradients]:
    """The support of a `marked` row [N] is the vocabulary: its gradient over the one belongs to the other."""
    moved = [torch.where(marked, grad, 0.0) for grad in (inside.grad_log_probs, inside.grad_entropy)]
    grads = (grad + more for grad, more in zip((full.grad_log_probs, full.grad_entropy), moved, strict=True))
    return inside.without(marked), RowGradients(full.lse, full.entropy, *grads)


class LinearSupportLogProbs(torch.autograd.Function):
    """(log-probs over the support, over the vocabulary, outside mass, entropy), each [N], of states [N, H] and weight [v, H].

    Keeps both, the question and six numbers a row. One collective forward, none backward.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, asked: SupportRequest) -> Any:
        softmax, unrestricted = asked.softmax, asked.supports.unrestricted
        cut, temperature = _cut(asked.supports, softmax.plan, softmax.shard), softmax.temperature

        def statistics(x: Tensor, rows: slice, shard: VocabShard) -> Tensor:
            supports = cut[rows.start, shard.start]
            own = support_statistics(x, softmax.labels[rows], supports, shard, temperature=temperature)
            return torch.cat([softmax.statistics(x, rows, shard), own[:, :3]], -1)

        parts = block_statistics(hidden, weight, softmax.shard, softmax.plan, statistics)
        whole, own = (merge_statistics(parts[..., part], temperature=temperature) for part in (_FULL, _INSIDE))
        if unrestricted is not None:
            own = torch.where(unrestricted[:, None], whole, own)
        gathered = softmax.shard.gather(torch.cat([whole, own[:, :3]], -1))
        full, inside = (merge_rows(gathered[..., part], temperature=temperature) for part in (_FULL, _INSIDE))
        outside = outside_mass(inside, full, temperature)
        rows = (inside.lse(temperature), inside.entropy, full.lse(temperature), full.entropy)
        ctx.save_for_backward(hidden, weight, softmax.labels, asked.supports.ids, asked.supports.counts, unrestricted, *rows)
        ctx.asked = asked
        ctx.set_materialize_grads(False)
        entropy = full.entropy if asked.entropy_support == "full" else inside.entropy
        ctx.mark_non_differentiable(*([outside] if softmax.entropy == "grad" else [outside, entropy]))
        return log_probs_of(inside, temperature), log_probs_of(full, temperature), outside, entropy

    @staticmethod
    def backward(ctx: Any, grad_support: Tensor | None, grad_full: Tensor | None, _: Any, grad_entropy: Tensor | None) -> Any:
        refuse_second_derivative()
        hidden, weight, labels, ids, counts, unrestricted, lse, entropy, full_lse, full_entropy = ctx.saved_tensors
        asked: SupportRequest = ctx.asked
        # as autograd saved them, which refuses what was changed since
        asked = replace(asked, softmax=replace(asked.softmax, labels=labels), supports=TokenSupports(ids, counts, unrestricted))
        h_inside, h_full = (grad_entropy, None) if asked.entropy_support == "sampled" else (None, grad_entropy)
        inside, full = (
            RowGradients.of(lse, entropy, grad_support, h_inside),
            RowGradients.of(full_lse, full_entropy, grad_full, h_full),
        )
        needed = ctx.needs_input_grad[:2]
        if unrestricted is not None:
            inside, full = _with_unrestricted(inside, full, unrestricted)
        elif grad_full is None and h_full is None:
            return *_gradients_of_supports(hidden, weight, asked, inside=inside, needed=needed), None
        return *_gradients(hidden, weight, asked, inside=inside, full=full, needed=needed), None
