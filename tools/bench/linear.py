"""Section 2: log-probs from hidden states [T, H] and the lm-head's weight [V, H], with and without the logits."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from slime_ppo.ppo_utils.linear_blocks import BlockPlan
from slime_ppo.ppo_utils.linear_logprob import linear_log_probs, linear_token_loss
from slime_ppo.ppo_utils.vocab_parallel import vocab_log_probs
from tools.bench.measure import Candidate, Case, Limit, Scale, error_no_worse, peak_within_share, time_within

SIZES: dict[Scale, tuple[int, int, int]] = {"small": (16, 32, 1000), "full": (256, 512, 151_936)}
BLOCK = 4096  # rows of the weight that are multiplied at a time
Result = tuple[Tensor, ...]  # log-probs [T], gradients of hidden and weight


def inputs(scale: Scale, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states [T, H], weight [V, H] whose logits have a spread of 3, labels [T], upstream gradient [T]."""
    num_tokens, width, vocab = SIZES[scale]
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn((num_tokens, width), generator=generator).to(dtype).requires_grad_()
    weight = torch.randn((vocab, width), generator=generator).mul_(3.0 / width**0.5).to(dtype).requires_grad_()
    labels = torch.randint(0, vocab, (num_tokens,), generator=generator)
    return hidden, weight, labels, torch.randn(num_tokens, generator=generator)


class _BlockedMatmul(torch.autograd.Function):
    """h W^T as a device with bf16 instructions multiplies: sums in float32, rounded once; here from float32 blocks.

    A CPU without them takes 7 to 100 times as long for `@`, and then all that the case says is that.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        states, out = hidden.float(), hidden.new_empty((len(hidden), len(weight)))
        for block, columns in zip(torch.split(weight, BLOCK), torch.split(out, BLOCK, 1), strict=True):
            columns.copy_(states @ block.float().t())
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        hidden, weight = ctx.saved_tensors
        states, d_hidden, d_weight = hidden.float(), torch.zeros_like(hidden, dtype=torch.float32), torch.empty_like(weight)
        for block, d_block, columns in zip(
            *(torch.split(x, BLOCK) for x in (weight, d_weight)), torch.split(grad, BLOCK, 1), strict=True
        ):
            wide = columns.float()
            d_hidden.addmm_(wide, block.float())
            d_block.copy_(wide.t() @ states)
        return d_hidden.to(hidden.dtype), d_weight


def _whole_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    if multiplies_natively(hidden):
        return hidden @ weight.t()
    logits: Tensor = _BlockedMatmul.apply(hidden, weight)  # type: ignore[no-untyped-call]
    return logits


def multiplies_natively(hidden: Tensor) -> bool:
    """Whether the machine multiplies the states' dtype about as fast as float32, by the product's own judgement."""
    return BlockPlan.of(hidden).dtype == hidden.dtype


def unfused(hidden: Tensor, weight: Tensor, labels: Tensor, upstream: Tensor) -> Result:
    """Whole logits, log_softmax in float32, gather."""
    log_probs = _whole_logits(hidden, weight).float().log_softmax(-1).gather(1, labels[:, None])[:, 0]
    return log_probs.detach(), *torch.autograd.grad(log_probs @ upstream, (hidden, weight))


def half_fused(hidden: Tensor, weight: Tensor, labels: Tensor, upstream: Tensor) -> Result:
    """Whole logits, then our own function of them."""
    log_probs = vocab_log_probs(_whole_logits(hidden, weight), labels, **_options(weight)).log_probs
    return log_probs.detach(), *torch.autograd.grad(log_probs @ upstream, (hidden, weight))


def recomputed(hidden: Tensor, weight: Tensor, labels: Tensor, upstream: Tensor) -> Result:
    log_probs = linear_log_probs(hidden, weight, labels, **_options(weight)).log_probs
    return log_probs.detach(), *torch.autograd.grad(log_probs @ upstream, (hidden, weight))


def in_forward(hidden: Tensor, weight: Tensor, labels: Tensor, upstream: Tensor) -> Result:
    found = linear_token_loss(hidden, weight, labels, lambda rows, scored: scored.log_probs * upstream[rows], **_options(weight))
    return found.log_probs, *torch.autograd.grad(found.loss, (hidden, weight))


def _options(weight: Tensor) -> dict[str, Any]:
    return {"vocab_size": len(weight), "temperature": 1.0, "group": None, "entropy": "none"}


def exact_hidden_gradient(hidden: Tensor, weight: Tensor, labels: Tensor, upstream: Tensor) -> Tensor:
    """In float64, some tokens at a time: g (W_y - sum p W)."""
    wide, grads = weight.detach().double(), []
    for h, y, g in zip(*(torch.split(x, 32) for x in (hidden.detach().double(), labels, upstream.double())), strict=True):
        grads.append(g[:, None] * (wide[y] - (h @ wide.t()).softmax(-1) @ wide))
    return torch.cat(grads)


def bare_matmuls(hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> Callable[[], Any]:
    """h W^T, g W and g^T h, block by block: what every way has to multiply."""
    grad = torch.zeros((len(hidden), BLOCK), dtype=dtype)
    states = hidden.detach().to(dtype)
    blocks = [block.to(dtype) for block in torch.split(weight.detach(), BLOCK)]

    def run() -> None:
        for block in blocks:
            columns = grad[:, : len(block)]
            _ = states @ block.t()
            _ = columns @ block
            _ = columns.t() @ states

    return run


def cases(scale: Scale) -> Iterator[Case]:
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        data = inputs(scale, dtype)
        yield _case(name, data, exact_hidden_gradient(*data))


def _case(name: str, data: tuple[Tensor, Tensor, Tensor, Tensor], exact: Tensor) -> Case:
    hidden, weight = data[:2]
    num_tokens, vocab, dtype = len(hidden), len(weight), BlockPlan.of(hidden).dtype
    # in float32 the three matmuls are the whole time of every way
    quick = () if hidden.dtype == torch.float32 else (time_within(0.95, "unfused"),)
    lean = (peak_within_share(0.2, "unfused"), error_no_worse("unfused"))
    how = "" if multiplies_natively(hidden) else " (no such instructions: multiplied as float32 blocks everywhere)"
    return Case(
        title=f"2 hidden [{num_tokens}, {hidden.shape[1]}] x weight [{vocab}, {hidden.shape[1]}] {name}{how}; peak without the "
        "gradients of both, in multiples of the logits",
        candidates=(
            Candidate("unfused", lambda: unfused(*data)),
            Candidate("  with vocab_log_probs", lambda: half_fused(*data)),
            Candidate("linear_log_probs", lambda: recomputed(*data), reach=lean),
            Candidate("linear_token_loss", lambda: in_forward(*data), reach=(*quick, *lean)),
        ),
        bases=("unfused",),
        error_is="hidden gradient to float64, relative",
        error=lambda found: float((found[1].double() - exact).norm() / exact.norm()),
        limit=Limit(f"three bare matmuls in {dtype}", bare_matmuls(hidden, weight, dtype)),
        input_bytes=num_tokens * vocab * hidden.element_size(),
        given=lambda found: found[1:],
    )
