"""A loss of single tokens on top of the lm-head, its gradient taken while the logits are there: 3 matmul units, not 4.

Shapes: N scored states, H hidden size, v rows of the weight on this rank, n states of one block of rows.

For each block of rows: logits [n, v] (in blocks of columns); log-probs and entropies of its states, over all ranks; the
caller's losses of these; their gradient with respect to both; and from that, over the same logits, the gradients of the
states and of the weight. The sum of the losses carries these gradients, scaled by whatever comes from above.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slime_ppo.errors import DataError
from slime_ppo.ppo_utils.linear_blocks import BlockSoftmax, add_product, merge_statistics, without_autocast, without_unused
from slime_ppo.ppo_utils.vocab_parallel import (
    RowTotals,
    TokenLogProbs,
    arithmetic_dtype,
    dense_gradient,
    merge_rows,
    refuse_second_derivative,
)

# The loss of each scored state in the slice, [n], its weight included, from their log-probs and entropies [n].
TokenLossFunction = Callable[[slice, TokenLogProbs], Tensor]

# Up to so many blocks of rows are summed in the weight's own dtype, which saves a float32 copy of it: each rounds the sum
# once more, by less than bfloat16 logits already cost.
_BLOCKS_SUMMED_IN_PLACE = 2


@dataclass(frozen=True)
class TokenLoss:
    """`loss`, the sum of the token losses, carries the gradient; `log_probs` [N] and `entropy` [N] (None if not asked for) do
    not: they are for metrics."""

    loss: Tensor
    log_probs: Tensor
    entropy: Tensor | None


class HeadGradients:
    """Gradients of the states and of this rank's weight, summed up block by block and handed out once."""

    def __init__(self, hidden: Tensor, weight: Tensor, *, needed: tuple[bool, bool], num_blocks: int) -> None:
        exact = arithmetic_dtype(hidden)
        self._dtypes = (hidden.dtype, weight.dtype)
        summed_in = weight.dtype if num_blocks <= _BLOCKS_SUMMED_IN_PLACE else exact
        self.hidden = torch.zeros_like(hidden, dtype=exact) if needed[0] else None
        self.weight = torch.empty_like(weight, dtype=summed_in) if needed[1] else None
        self._taken = False

    def add(
        self,
        logits: list[Tensor],
        weight: Tensor,
        softmax: BlockSoftmax,
        *,
        rows: slice,
        states: Tensor,
        totals: RowTotals,
        upstream: "_Upstream",
    ) -> None:
        """Add what one block of rows is worth; uses up its `logits`, a tensor for each block of columns."""
        states = without_unused(states, upstream.grad_log_probs, upstream.grad_entropy)
        lse = totals.lse(softmax.temperature)
        for block in reversed(softmax.plan.vocab_blocks(softmax.shard)):
            x = logits.pop()
            grad = dense_gradient(
                x,
                softmax.labels[rows],
                block.shard,
                lse,
                totals.entropy,
                temperature=softmax.temperature,
                grad_log_probs=upstream.grad_log_probs,
                grad_entropy=upstream.grad_entropy,
                out=x,
            )
            if self.hidden is not None:
                add_product(self.hidden[rows], grad, softmax.plan.weight_block(weight, block))
            if self.weight is not None:
                add_product(self.weight[block.columns], grad.t(), states, first=rows.start == 0)
        if self.weight is not None:
            self.weight[softmax.shard.num_real :] = 0

    def take(self, scale: float) -> tuple[Tensor | None, Tensor | None]:
        """Both times `scale`, in the dtypes of states and weight; they are not kept, so that autograd need not copy them."""
        if self._taken:
            raise RuntimeError(
                "second backward through linear_token_loss: the first one gave its gradients away; sum the losses and call "
                "backward once, or use linear_log_probs"
            )
        self._taken = True
        taken = []
        for grad, dtype in zip((self.hidden, self.weight), self._dtypes, strict=True):
            if grad is not None and scale != 1.0:
                grad.mul_(scale)
            taken.append(None if grad is None else grad.to(dtype))
        self.hidden = self.weight = None
        return taken[0], taken[1]


@dataclass(frozen=True)
class _Upstream:
    """The loss of one block of rows and its gradient with respect to their log-probs and entropies, None where there is none."""

    loss: Tensor
    grad_log_probs: Tensor | None
    grad_entropy: Tensor | None


def _differentiated(token_loss: TokenLossFunction, rows: slice, scored: TokenLogProbs, *, entropy_grad: bool) -> _Upstream:
    """Raises DataError when the loss is not one number per state."""
    log_probs, entropy = scored.log_probs.detach().requires_grad_(), scored.entropy
    if entropy is not None and entropy_grad:
        entropy = entropy.detach().requires_grad_()
    with torch.enable_grad():
        losses = token_loss(rows, TokenLogProbs(log_probs, entropy))
    if losses.shape != log_probs.shape:
        raise DataError(
            f"token_loss gave a loss of shape {tuple(losses.shape)} for {len(log_probs)} states, rows {rows.start} to "
            f"{rows.stop}; expected one number per state, not their sum or mean"
        )
    grads: list[Tensor | None] = [None, None]
    if losses.requires_grad:
        leaves = [log_probs] if entropy is None or not entropy_grad else [log_probs, entropy]
        found = torch.autograd.grad(losses, leaves, torch.ones_like(losses), allow_unused=True)
        grads[: len(found)] = found
    return _Upstream(losses.detach().sum(), *grads)


@torch.no_grad()
def token_losses(
    hidden: Tensor, weight: Tensor, softmax: BlockSoftmax, token_loss: TokenLossFunction, *, needed: tuple[bool, bool]
) -> tuple[TokenLoss, HeadGradients]:
    """The loss, without autograd, and the gradients of states and weight that were `needed`. One collective per block of rows."""
    plan, temperature = softmax.plan, softmax.temperature
    vocab_blocks, row_blocks = plan.vocab_blocks(softmax.shard), plan.held_row_blocks(len(hidden))
    gradients = HeadGradients(hidden, weight, needed=needed, num_blocks=len(row_blocks))
    loss = torch.zeros((), dtype=arithmetic_dtype(hidden), device=hidden.device)
    found = []
    for rows in row_blocks:
        states = hidden[rows].to(plan.dtype)
        with without_autocast(hidden):
            logits = [states @ plan.weight_block(weight, block).t() for block in vocab_blocks]
        parts = [softmax.statistics(x, rows, block.shard) for block, x in zip(vocab_blocks, logits, strict=True)]
        own = merge_statistics(torch.stack(parts), temperature=temperature)
        totals = merge_rows(softmax.shard.gather(own), temperature=temperature)
        scored = TokenLogProbs(totals.log_probs(temperature), None if softmax.entropy == "none" else totals.entropy)
        upstream = _differentiated(token_loss, rows, scored, entropy_grad=softmax.entropy == "grad")
        if any(needed):
            gradients.add(logits, weight, softmax, rows=rows, states=states, totals=totals, upstream=upstream)
        loss += upstream.loss
        found.append(scored)
    entropies = [scored.entropy for scored in found if scored.entropy is not None]
    log_probs = torch.cat([scored.log_probs for scored in found])
    return TokenLoss(loss, log_probs, torch.cat(entropies) if entropies else None), gradients


class GradientInForward(torch.autograd.Function):
    """The loss as it is; backward, the gradients that were stored with it, times that of the loss."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, loss: Tensor, gradients: HeadGradients) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        refuse_second_derivative()
        return *ctx.gradients.take(float(grad)), None, None
