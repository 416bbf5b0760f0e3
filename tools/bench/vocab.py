"""Section 1: log-prob of the label and entropy from logits [T, V], forward and backward."""

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from slime_ppo.ppo_utils.vocab_parallel import vocab_log_probs
from tools.bench.measure import Candidate, Case, Limit, Scale, error_within, peak_within, time_within

Entropy = Literal["metric", "grad"]
SIZES: dict[Scale, tuple[int, int]] = {"small": (16, 1000), "full": (256, 151_936)}
TIME_WITHIN: dict[Entropy, float] = {"metric": 0.55, "grad": 0.40}


class _Computed(torch.autograd.Function):
    """The memory as the output of an operation whose backward does not read it, as a matmul's is."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, memory: Tensor) -> Tensor:
        return memory.view_as(memory)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        return None, None


def computed(memory: Tensor) -> Tensor:
    """`memory` as logits that a model computed: not a leaf, and with gradient."""
    result: Tensor = _Computed.apply(torch.zeros((), requires_grad=True), memory)  # type: ignore[no-untyped-call]
    return result


def naive(logits: Tensor, labels: Tensor, upstream: Tensor, *, entropy: Entropy) -> tuple[Tensor, Tensor, Tensor]:
    """log_softmax over each row and gather; entropy = logsumexp - sum p x. Logits of half precision are converted first."""
    leaf = computed(logits)
    x = leaf.float()
    log_probs = x.log_softmax(-1).gather(1, labels[:, None])[:, 0]
    with torch.set_grad_enabled(entropy == "grad"):
        entropies = x.logsumexp(-1) - (x.softmax(-1) * x).sum(-1)
    return log_probs.detach(), entropies.detach(), _gradient(leaf, log_probs, entropies, upstream)


def ours(logits: Tensor, labels: Tensor, upstream: Tensor, *, entropy: Entropy, overwrite: bool) -> tuple[Tensor, Tensor, Tensor]:
    leaf = computed(logits)
    found = vocab_log_probs(
        leaf, labels, vocab_size=logits.shape[1], temperature=1.0, group=None, entropy=entropy, overwrite_logits=overwrite
    )
    assert found.entropy is not None
    return found.log_probs.detach(), found.entropy.detach(), _gradient(leaf, found.log_probs, found.entropy, upstream)


def _gradient(leaf: Tensor, log_probs: Tensor, entropies: Tensor, upstream: Tensor) -> Tensor:
    loss = log_probs @ upstream[0]
    if entropies.requires_grad:
        loss = loss + entropies @ upstream[1]
    return torch.autograd.grad(loss, leaf)[0]


def inputs(scale: Scale, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [T, V], labels [T], upstream gradients [2, T]."""
    num_tokens, vocab = SIZES[scale]
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn((num_tokens, vocab), generator=generator).mul_(2).to(dtype)
    labels = torch.randint(0, vocab, (num_tokens,), generator=generator)
    return logits, labels, torch.randn((2, num_tokens), generator=generator)


def cases(scale: Scale) -> Iterator[Case]:
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        logits, labels, upstream = inputs(scale, dtype)
        exact = torch.stack([row.double().log_softmax(-1)[label] for row, label in zip(logits, labels, strict=True)])
        for entropy in TIME_WITHIN:
            yield _case(name, entropy, data=(logits, labels, upstream), exact=exact)


def _case(name: str, entropy: Entropy, *, data: tuple[Tensor, Tensor, Tensor], exact: Tensor) -> Case:
    logits, out = data[0], torch.empty_like(data[0])
    spare = logits.clone()
    reach = (time_within(TIME_WITHIN[entropy], "naive"), error_within(2e-6))

    def restore() -> None:
        spare.copy_(logits)

    return Case(
        title=f"1 logits [{', '.join(map(str, logits.shape))}] {name}, entropy as {entropy}; peak in multiples of the logits",
        candidates=(
            Candidate("naive", lambda: naive(*data, entropy=entropy)),
            Candidate("vocab_log_probs", lambda: ours(*data, entropy=entropy, overwrite=False), reach=(*reach, peak_within(1.1))),
            Candidate(
                "  overwrite_logits",
                lambda: ours(spare, *data[1:], entropy=entropy, overwrite=True),
                reach=(*reach, peak_within(0.1)),
                before=restore,
            ),
        ),
        bases=("naive",),
        error_is="log-probs to float64",
        error=lambda found: float((found[0].double() - exact).abs().max()),
        limit=Limit("three passes over the logits at copy speed", lambda: out.copy_(logits), factor=1.5),
        input_bytes=logits.untyped_storage().nbytes(),
    )
