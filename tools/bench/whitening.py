"""Section 6: whitening of a rank's advantages."""

from collections.abc import Iterator

import torch
from torch import Tensor

from slime_ppo.ppo_utils.whiten import whiten_advantages
from tools.bench.measure import Candidate, Case, Limit, Scale, error_within

NUM_TOKENS: dict[Scale, int] = {"small": 1000, "full": 264_000}
# mean and standard deviation
SPREADS = ((0.0, 1.0), (1000.0, 0.01))


def one_pass(advantages: Tensor, mask: Tensor) -> Tensor:
    """Variance as E[x^2] - E[x]^2, in float32, mask multiplied."""
    m = mask.float()
    count = m.sum()
    mean = (advantages * m).sum() / count
    variance = (advantages.square() * m).sum() / count - mean.square()
    return (advantages - mean) * torch.rsqrt(variance * count / (count - 1) + 1e-8) * m


def exact(advantages: Tensor, mask: Tensor) -> Tensor:
    kept = advantages[mask].double()
    whole = torch.zeros(len(mask), dtype=torch.float64)
    whole[mask] = (kept - kept.mean()) / (kept.var() + 1e-8).sqrt()
    return whole


def cases(scale: Scale) -> Iterator[Case]:
    for mean, std in SPREADS:
        yield _case(NUM_TOKENS[scale], mean, std)


def _case(num_tokens: int, mean: float, std: float) -> Case:
    generator = torch.Generator().manual_seed(0)
    advantages = torch.randn(num_tokens, generator=generator).double().mul(std).add(mean).float()
    mask = torch.rand(num_tokens, generator=generator) >= 0.1
    expected, out = exact(advantages, mask), torch.empty_like(advantages)
    return Case(
        title=f"6 whitening of {num_tokens} tokens, mean {mean:g}, std {std:g}; peak in multiples of the advantages",
        candidates=(
            Candidate("one pass", lambda: one_pass(advantages, mask)),
            Candidate("whiten_advantages", lambda: whiten_advantages(advantages, mask), reach=(error_within(6e-7),)),
        ),
        bases=("one pass",),
        error_is="result to float64",
        error=lambda found: float((found.double() - expected).abs().max()),
        limit=Limit("copy of the advantages", lambda: out.copy_(advantages)),
        input_bytes=advantages.untyped_storage().nbytes(),
    )
