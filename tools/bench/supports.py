"""Section 4: log-probs over the ids the sampler could have drawn, logits [T, V]."""

from collections.abc import Iterator

import torch
from torch import Tensor

from slime_ppo.ppo_utils.top_p import TokenSupports, support_log_probs
from tools.bench.measure import Candidate, Case, Limit, Scale, error_within, peak_within, time_within

SIZES: dict[Scale, tuple[int, int]] = {"small": (32, 1000), "full": (1024, 151_936)}
MEAN_SUPPORTS = (8, 64)


def supports_of(logits: Tensor, mean: int) -> tuple[TokenSupports, Tensor, list[list[int]]]:
    """Supports of geometric sizes; from each a label, drawn as the sampler would draw it; and the same ids as lists."""
    generator = torch.Generator().manual_seed(mean)
    counts = torch.empty(len(logits)).geometric_(1 / mean, generator=generator).long().clamp_(1, 16 * mean)
    rows = [torch.unique(torch.randint(0, logits.shape[1], (count,), generator=generator)) for count in counts.tolist()]
    labels = []
    for x, ids in zip(logits.detach(), rows, strict=True):
        labels.append(ids[torch.multinomial(x[ids].softmax(-1), 1, generator=generator)[0]])
    supports = TokenSupports(torch.cat(rows), torch.tensor([len(row) for row in rows]))
    return supports, torch.stack(labels), [row.tolist() for row in rows]


def dense(logits: Tensor, labels: Tensor, rows: list[list[int]]) -> Tensor:
    """A [T, V] keep-mask filled row by row, a masked copy of the logits, log_softmax, gather."""
    keep = torch.zeros(logits.shape, dtype=torch.bool)
    for row, ids in enumerate(rows):
        keep[row, ids] = True
    masked = logits.float().masked_fill(~keep, float("-inf"))
    return masked.log_softmax(-1).gather(1, labels[:, None])[:, 0]


def ours(logits: Tensor, labels: Tensor, supports: TokenSupports) -> Tensor:
    options = {"vocab_size": logits.shape[1], "temperature": 1.0, "group": None}
    return support_log_probs(logits, labels, supports, **options, entropy="none").log_probs  # type: ignore[arg-type]


def exact(logits: Tensor, labels: Tensor, rows: list[list[int]]) -> Tensor:
    """In float64, one token at a time."""
    found = []
    for x, label, ids in zip(logits.detach(), labels, rows, strict=True):
        found.append(x[label].double() - x[ids].double().logsumexp(-1))
    return torch.stack(found)


def cases(scale: Scale) -> Iterator[Case]:
    num_tokens, vocab = SIZES[scale]
    logits = torch.randn((num_tokens, vocab), generator=torch.Generator().manual_seed(0)).mul_(3).requires_grad_()
    for mean in MEAN_SUPPORTS:
        yield _forward(logits, mean)
        yield _forward_backward(logits, mean)


def _title(logits: Tensor, mean: int, what: str) -> str:
    return f"4 mean support {mean}, logits [{len(logits)}, {logits.shape[1]}] fp32, {what}; peak in multiples of the logits"


def _forward(logits: Tensor, mean: int) -> Case:
    supports, labels, rows = supports_of(logits, mean)
    expected, x = exact(logits, labels, rows), logits.detach()
    places = torch.repeat_interleave(torch.arange(len(labels)), supports.counts) * logits.shape[1] + supports.ids
    return Case(
        title=_title(logits, mean, "forward"),
        candidates=(
            Candidate("dense mask", lambda: dense(x, labels, rows)),
            Candidate(
                "support_log_probs",
                lambda: ours(x, labels, supports),
                reach=(time_within(0.01, "dense mask"), error_within(1e-6), peak_within(0.1)),
            ),
        ),
        bases=("dense mask",),
        error_is="log-probs to float64",
        error=lambda found: float((found.double() - expected).abs().max()),
        limit=Limit("reading the recorded ids' logits", lambda: x.view(-1).index_select(0, places)),
        input_bytes=logits.untyped_storage().nbytes(),
    )


def _forward_backward(logits: Tensor, mean: int) -> Case:
    supports, labels, rows = supports_of(logits, mean)
    upstream = torch.randn(len(logits), generator=torch.Generator().manual_seed(1))
    expected = exact(logits, labels, rows)

    def with_gradient(log_probs: Tensor) -> tuple[Tensor, Tensor]:
        return log_probs.detach(), torch.autograd.grad(log_probs, logits, upstream)[0]

    return Case(
        title=_title(logits, mean, "forward and backward"),
        candidates=(
            Candidate("dense mask", lambda: with_gradient(dense(logits, labels, rows))),
            Candidate(
                "support_log_probs",
                lambda: with_gradient(ours(logits, labels, supports)),
                reach=(time_within(0.05, "dense mask"), error_within(1e-6), peak_within(1.1)),
            ),
        ),
        bases=("dense mask",),
        error_is="log-probs to float64",
        error=lambda found: float((found[0].double() - expected).abs().max()),
        limit=Limit("zero fill of the gradient", lambda: torch.zeros_like(logits)),
        input_bytes=logits.untyped_storage().nbytes(),
    )
