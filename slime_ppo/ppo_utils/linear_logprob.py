"""Log-probs and entropy from hidden states and the lm-head's weight, without the logits.

Shapes: T states of the pack, N scored ones, H hidden size, V the real vocabulary, v rows of the weight on this rank, W ranks.

    x = h W^T,   log p(y) = z_y - log sum e^z,   H = - sum p log p,   z = x / temperature

The logits of a long pack are the largest tensor of a training step; here only a block of them exists at a time
(linear_blocks.py), forward and backward. The result is that of vocab_log_probs on h W^T. What it costs, in matmuls as large
as h W^T (the unfused way: 3, with the logits and their gradient kept):

    linear_log_probs           1 forward, 3 backward, where the logits are made again: any loss of the result
    linear_support_log_probs   the same; and the log-prob over the ids the sampler could have drawn (top_p.py)
    linear_token_loss          3, all forward: the loss of each token is known from that token's own log-prob and entropy,
                               so its gradient is taken while a block of rows is there; backward only scales it

The gradient of the states is a sum over the ranks' vocabulary shards: linear_gather.py. That of the weight needs no collective.
Context: Wijmans et al., "Cut your losses in large-vocabulary language models" (2024), for cross-entropy on one device.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime_ppo.errors import DataError
from slime_ppo.ppo_utils.linear_blocks import (
    BlockPlan,
    BlockSoftmax,
    block_gradients,
    block_statistics,
    merge_statistics,
    without_unused,
)
from slime_ppo.ppo_utils.linear_gather import scored_states
from slime_ppo.ppo_utils.linear_loss import GradientInForward, TokenLoss, TokenLossFunction, token_losses
from slime_ppo.ppo_utils.linear_supports import LinearSupportLogProbs, SupportRequest
from slime_ppo.ppo_utils.top_p import EntropySupport, SupportLogProbs, TokenSupports, require_fitting
from slime_ppo.ppo_utils.vocab_parallel import (
    EntropyMode,
    TokenLogProbs,
    VocabShard,
    dense_gradient,
    merge_rows,
    refuse_second_derivative,
)


class _LinearLogProbs(torch.autograd.Function):
    """Keeps the caller's states and weight, and three numbers a row."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, softmax: BlockSoftmax) -> Any:
        temperature, shard = softmax.temperature, softmax.shard
        parts = block_statistics(hidden, weight, shard, softmax.plan, softmax.statistics)
        totals = merge_rows(shard.gather(merge_statistics(parts, temperature=temperature)), temperature=temperature)
        ctx.save_for_backward(hidden, weight, softmax.labels, totals.lse(temperature), totals.entropy)
        ctx.softmax = softmax
        ctx.set_materialize_grads(False)
        if softmax.entropy == "none":
            return totals.log_probs(temperature), None
        if softmax.entropy == "metric":
            ctx.mark_non_differentiable(totals.entropy)
        return totals.log_probs(temperature), totals.entropy

    @staticmethod
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> Any:
        refuse_second_derivative()
        hidden, weight, labels, lse, entropy = ctx.saved_tensors
        softmax: BlockSoftmax = ctx.softmax

        def gradient(x: Tensor, rows: slice, shard: VocabShard) -> Tensor:
            return dense_gradient(
                x,
                labels[rows],
                shard,
                lse[rows],
                entropy[rows],
                temperature=softmax.temperature,
                grad_log_probs=None if grad_log_probs is None else grad_log_probs[rows],
                grad_entropy=None if grad_entropy is None else grad_entropy[rows],
                out=x,
            )

        states = without_unused(hidden, grad_log_probs, grad_entropy)
        needed = ctx.needs_input_grad[:2]
        return *block_gradients(states, weight, softmax.shard, softmax.plan, gradient, needed=needed), None


def _scored(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    positions: Tensor | None,
    *,
    group: dist.ProcessGroup | None,
    sequence_parallel: bool,
) -> Tensor:
    """States [N, H], one for each label. Raises DataError when shapes or dtypes do not fit."""
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1] or hidden.dtype != weight.dtype:
        raise DataError(
            f"hidden states {tuple(hidden.shape)} of {hidden.dtype} do not fit a weight {tuple(weight.shape)} of {weight.dtype}; "
            "expected [T, H] and [v, H] of one dtype"
        )
    states = scored_states(hidden, positions, group=group, sequence_parallel=sequence_parallel)
    if labels.shape != states.shape[:1]:
        raise DataError(
            f"labels {tuple(labels.shape)} do not fit {len(states)} scored states; expected one label per state"
            + ("" if positions is None else ", in the order of `positions`")
        )
    return states


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    vocab_size: int,
    temperature: float,
    group: dist.ProcessGroup | None,
    entropy: EntropyMode,
    positions: Tensor | None = None,
    sequence_parallel: bool = False,
    plan: BlockPlan | None = None,
) -> TokenLogProbs:
    """Log-probs of `labels` int64 [N] under softmax(hidden weight^T / temperature) over the real vocabulary, and its entropy.

    `hidden` [T, H] on every rank, or with `sequence_parallel` this rank's slice [T / W, H]; `weight` [v, H], this rank's rows
    of the vocabulary, in rank order; `positions` int64 [N]: which of the T states are scored, distinct; None = all. `plan`:
    sizes of the blocks; None = what suits the device. Entropy modes, labels outside the vocabulary and the result as
    vocab_log_probs. A state whose upstream gradient is 0 contributes exactly 0, NaN or not.

    Every rank of `group` calls with the same labels and positions; None = not split. Collectives: forward one of four
    numbers a token, and the gather of the states with sequence parallelism; backward one, the sum of the states' gradient
    (all-reduce, or reduce-scatter with sequence parallelism). 4 matmul units with the backward pass, which makes the logits again.
    Second derivatives raise NotImplementedError. Raises DataError when shapes do not fit, ParallelError when the ranks hold
    too few rows of the vocabulary.
    """
    states = _scored(hidden, weight, labels, positions, group=group, sequence_parallel=sequence_parallel)
    shard = VocabShard.of(len(weight), vocab_size=vocab_size, group=group)
    softmax = BlockSoftmax(labels, shard, plan or BlockPlan.of(hidden), temperature, entropy)
    log_probs, entropies = _LinearLogProbs.apply(states, weight, softmax)  # type: ignore[no-untyped-call]
    return TokenLogProbs(log_probs=log_probs, entropy=entropies)


def linear_support_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    supports: TokenSupports,
    *,
    vocab_size: int,
    temperature: float,
    group: dist.ProcessGroup | None,
    entropy: EntropyMode,
    entropy_support: EntropySupport = "full",
    positions: Tensor | None = None,
    sequence_parallel: bool = False,
    plan: BlockPlan | None = None,
) -> SupportLogProbs:
    """Log-probs of `labels` int64 [N] over their `supports` and over the vocabulary, outside mass and entropy, as
    top_p.support_and_vocab_log_probs gives them for the logits hidden weight^T.

    States, weight, positions, ranks and collectives as linear_log_probs (seven numbers a token). 4 matmul units with the
    backward pass when the loss reaches `full_log_probs`, the entropy over the vocabulary, or marks rows unrestricted; when
    it reaches the support only, 1 and three over the columns that lie in some support.
    Second derivatives raise NotImplementedError. Raises DataError when shapes or counts do not fit, ParallelError when the
    ranks hold too few rows of the vocabulary.
    """
    states = _scored(hidden, weight, labels, positions, group=group, sequence_parallel=sequence_parallel)
    require_fitting(supports, labels)
    shard = VocabShard.of(len(weight), vocab_size=vocab_size, group=group)
    asked = SupportRequest(
        BlockSoftmax(labels, shard, plan or BlockPlan.of(hidden), temperature, entropy), supports, entropy_support
    )
    log_probs, full, outside, entropies = LinearSupportLogProbs.apply(states, weight, asked)  # type: ignore[no-untyped-call]
    return SupportLogProbs(log_probs, full, outside, None if entropy == "none" else entropies)


def linear_token_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    token_loss: TokenLossFunction,
    *,
    vocab_size: int,
    temperature: float,
    group: dist.ProcessGroup | None,
    entropy: EntropyMode,
    positions: Tensor | None = None,
    sequence_parallel: bool = False,
    plan: BlockPlan | None = None,
) -> TokenLoss:
    """The sum over the scored states of token_loss(rows, TokenLogProbs of these rows), with its gradient, in 3 matmul units.

    `token_loss` gets a slice of the N scored states and their log-probs and entropies [n], and returns n losses, each already
    weighted (SEMANTICS 9: nothing is divided afterwards) and made from its own state's figures and constants alone: the
    slices are the blocks of the plan, so that a loss of several tokens' log-probs (gspo's ratio of a sample) needs
    linear_log_probs. It is called once for each block of rows, in order, on every rank alike. Its gradient is taken at
    once and goes to `hidden` and `weight` only, through log-prob and, with entropy="grad", entropy: with "metric" an entropy
    bonus in the loss is a constant without effect, and parameters of its own that `token_loss` uses get no gradient.

    States, weight, positions and ranks as linear_log_probs. [held_rows, v] logits exist at a time. The gradients, as large as
    states and weight, are stored until the backward pass multiplies them by that of the loss and lets go of them: a
    second one raises RuntimeError. Collectives: forward one of four numbers a token for each block of rows, and the gather
    of the states with sequence parallelism; backward one. Where no gradient is wanted, 1 matmul unit.
    Raises as linear_log_probs, and DataError on a loss of another shape and on float16.
    """
    if hidden.dtype == torch.float16:
        raise DataError(
            "linear_token_loss got float16 states: their gradient is taken before the scale of the loss is known, and what is "
            "below 6e-8 would be lost; use bfloat16, or linear_log_probs, whose gradient is taken in the backward pass"
        )
    states = _scored(hidden, weight, labels, positions, group=group, sequence_parallel=sequence_parallel)
    shard = VocabShard.of(len(weight), vocab_size=vocab_size, group=group)
    softmax = BlockSoftmax(labels, shard, plan or BlockPlan.of(hidden), temperature, entropy)
    wanted = torch.is_grad_enabled()
    needed = (wanted and states.requires_grad, wanted and weight.requires_grad)
    found, gradients = token_losses(states.detach(), weight.detach(), softmax, token_loss, needed=needed)
    loss = GradientInForward.apply(states, weight, found.loss, gradients)  # type: ignore[no-untyped-call]
    return TokenLoss(loss, found.log_probs, found.entropy)
