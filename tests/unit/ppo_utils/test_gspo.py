"""GSPO against hand-computed values: one ratio per sample, gradient through the mean."""

import math

import pytest
import torch
from torch import Tensor

from slime_ppo.errors import ConfigError
from slime_ppo.ppo_utils import reference
from slime_ppo.ppo_utils.gspo import gspo_policy_loss
from slime_ppo.ppo_utils.policy_loss import ClipRange, PolicyInputs
from slime_ppo.ppo_utils.reference_types import ReferenceSettings

NAN = float("nan")
CLIP = ClipRange(0.1, 0.2)


def _inputs(log_ratios: Tensor, advantages: Tensor, mask: Tensor, lens: list[int]) -> PolicyInputs:
    return PolicyInputs(log_ratios, torch.zeros_like(log_ratios), advantages, mask, torch.tensor(lens))


def test_gspo_matches_hand_value() -> None:
    """Sample 0: mean of 0.1 and 0.0 (one token masked), inside the clip. Sample 1: none trainable. Sample 2: mean 0.5, A > 0:
    clipped high. Sample 3: mean -0.3, A < 0: clipped low. Sample 4: mean 0.5, A < 0: not clipped."""
    x = torch.tensor([0.1, NAN, 0.0, 9.0, 0.4, 0.6, -0.3, 0.2, 0.8], dtype=torch.float64, requires_grad=True)
    a = torch.tensor([2.0, NAN, -1.0, NAN, 1.0, 3.0, -2.0, -1.0, -3.0], dtype=torch.float64)
    mask = torch.tensor([True, False, True, False, True, True, True, True, True])
    out = gspo_policy_loss(_inputs(x, a, mask, [3, 1, 2, 1, 2]), CLIP)
    s0, s4 = math.exp(0.05), math.exp(0.5)
    expected = [-2 * s0, 0, s0, 0, -1.2, -3.6, 1.8, s4, 3 * s4]
    assert out.loss.tolist() == pytest.approx(expected, rel=1e-12)
    assert out.ratio.tolist() == pytest.approx([s0, 0, s0, 0, s4, s4, math.exp(-0.3), s4, s4], rel=1e-12)
    assert out.clipped_high.tolist() == [False] * 4 + [True] * 2 + [False] * 3
    assert out.clipped_low.tolist() == [False] * 6 + [True] + [False] * 2
    assert not out.clipped_dual.any() and not out.clamped.any()
    out.loss.sum().backward()
    # d loss / d x_t = (sum of -A over the sample) s / 2 at both tokens of samples 0 and 4
    assert x.grad.tolist() == pytest.approx([-s0 / 2, 0, -s0 / 2, 0, 0, 0, 0, 2 * s4, 2 * s4], rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
@pytest.mark.parametrize("log_ratio", [-math.inf, -500.0, -20.5, 20.5, 500.0])
def test_gspo_mean_beyond_the_clamp_is_finite_with_zero_gradient(log_ratio: float, advantage: float, dtype: torch.dtype) -> None:
    x = torch.tensor([log_ratio, log_ratio], dtype=dtype, requires_grad=True)
    out = gspo_policy_loss(_inputs(x, torch.full((2,), advantage, dtype=dtype), torch.tensor([True, True]), [2]), CLIP)
    out.loss.sum().backward()
    assert torch.isfinite(out.loss).all() and out.clamped.all() and out.loss.dtype == dtype
    assert x.grad is not None and x.grad.tolist() == [0.0, 0.0]


def test_gspo_one_far_token_does_not_clamp_a_mean_within() -> None:
    """The mean is clamped, not its terms: 39 and -1 make 19, e^19."""
    x = torch.tensor([39.0, -1.0], dtype=torch.float64)
    out = gspo_policy_loss(_inputs(x, -torch.ones(2, dtype=torch.float64), torch.tensor([True, True]), [2]), CLIP)
    assert out.ratio.tolist() == pytest.approx([math.exp(19)] * 2, rel=1e-12) and not out.clamped.any()


def test_gspo_gradient_matches_finite_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    x, a = (0.3 * torch.randn(20, generator=generator, dtype=torch.float64) for _ in range(2))
    mask = torch.rand(20, generator=generator) > 0.2
    loss = lambda y: gspo_policy_loss(_inputs(y, a, mask, [7, 0, 1, 12]), CLIP).loss  # noqa: E731
    assert torch.autograd.gradcheck(loss, x.requires_grad_())


def test_gspo_equals_the_reference_twin() -> None:
    generator = torch.Generator().manual_seed(1)
    x, a = (0.3 * torch.randn(30, generator=generator, dtype=torch.float64) for _ in range(2))
    settings = ReferenceSettings(vocab_size=1, policy_loss="gspo", eps_clip=0.1, eps_clip_high=0.2)
    lens = [1, 20, 4, 5]
    found = gspo_policy_loss(_inputs(x, a, torch.ones(30, dtype=torch.bool), lens), CLIP)
    for loss, ratios, advantages in zip(*(column.split(lens) for column in (found.loss, x, a)), strict=True):
        twin = reference.policy_losses(ratios, [0.0] * len(ratios), advantages.tolist(), settings)
        assert torch.allclose(loss, torch.stack(twin), rtol=0, atol=1e-12)


def test_gspo_permuted_samples_permute_the_loss() -> None:
    generator = torch.Generator().manual_seed(2)
    lens, order = [3, 0, 5, 2], [2, 3, 0, 1]
    x, a = (0.3 * torch.randn(10, generator=generator, dtype=torch.float64) for _ in range(2))
    mask = torch.rand(10, generator=generator) > 0.3
    straight = gspo_policy_loss(_inputs(x, a, mask, lens), CLIP).loss.split(lens)
    moved = [torch.cat([column.split(lens)[i] for i in order]) for column in (x, a, mask)]
    found = gspo_policy_loss(_inputs(*moved, [lens[i] for i in order]), CLIP).loss
    assert torch.equal(found, torch.cat([straight[i] for i in order]))


@pytest.mark.parametrize(("clip", "message"), [(ClipRange(0.1, 0.1, 2.0), "no dual clip"), (ClipRange(None, 0.1), "no lower clip")])
def test_gspo_clip_it_does_not_have_is_refused(clip: ClipRange, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        gspo_policy_loss(_inputs(torch.zeros(1), torch.ones(1), torch.tensor([True]), [1]), clip)
