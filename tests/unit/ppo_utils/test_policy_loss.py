"""The clipped policy loss against hand-computed values, branch by branch."""

import math

import pytest
import torch
from torch import Tensor

from slime_ppo.errors import ConfigError
from slime_ppo.ppo_utils import reference
from slime_ppo.ppo_utils.policy_loss import ClipRange, PolicyInputs, PolicyLoss, clipped_policy_loss
from slime_ppo.ppo_utils.reference_types import ReferenceSettings

NAN = float("nan")
CLIP = ClipRange(0.2, 0.3)
DUAL = ClipRange(0.2, 0.3, 3.0)


def _inputs(log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> PolicyInputs:
    return PolicyInputs(log_probs, old, advantages, mask, torch.tensor([len(mask)]))


def _one(ratio: float, advantage: float, clip: ClipRange) -> tuple[PolicyLoss, float]:
    log_probs = torch.tensor([math.log(ratio) - 1.0], dtype=torch.float64, requires_grad=True)
    old, a = torch.tensor([-1.0], dtype=torch.float64), torch.tensor([advantage], dtype=torch.float64)
    out = clipped_policy_loss(_inputs(log_probs, old, a, torch.tensor([True])), clip)
    out.loss.sum().backward()
    assert log_probs.grad is not None
    return out, log_probs.grad.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual", "loss", "gradient", "branch"),
    [
        (1.0, 2.0, None, -2.0, -2.0, ""),
        (1.1, 2.0, None, -2.2, -2.2, ""),
        (1.5, 2.0, None, -2.6, 0.0, "high"),
        (0.5, 2.0, None, -1.0, -1.0, ""),
        (0.5, -2.0, None, 1.6, 0.0, "low"),
        (1.5, -2.0, None, 3.0, 3.0, ""),
        (4.0, -2.0, None, 8.0, 8.0, ""),
        (4.0, -2.0, 3.0, 6.0, 0.0, "dual"),
        (2.0, -2.0, 3.0, 4.0, 4.0, ""),
        (0.5, -2.0, 3.0, 1.6, 0.0, "low"),
        (4.0, 2.0, 3.0, -2.6, 0.0, "high"),
        (4.0, 0.0, 3.0, 0.0, 0.0, ""),
    ],
)
def test_policy_loss_matches_hand_value(
    ratio: float, advantage: float, dual: float | None, loss: float, gradient: float, branch: str
) -> None:
    out, found_gradient = _one(ratio, advantage, ClipRange(0.2, 0.3, dual))
    assert out.loss.item() == pytest.approx(loss, rel=1e-12, abs=1e-12)
    assert found_gradient == pytest.approx(gradient, rel=1e-12, abs=1e-12)
    assert out.ratio.item() == pytest.approx(ratio, rel=1e-12)
    assert {"low": out.clipped_low.item(), "high": out.clipped_high.item(), "dual": out.clipped_dual.item()} == {
        name: name == branch for name in ("low", "high", "dual")
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("log_ratio", [-math.inf, -500.0, -20.5, 20.5, 500.0, math.inf])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_policy_loss_log_ratio_beyond_the_clamp_is_finite_with_zero_gradient(
    log_ratio: float, advantage: float, dtype: torch.dtype
) -> None:
    log_probs = torch.tensor([log_ratio], dtype=dtype, requires_grad=True)
    a = torch.tensor([advantage], dtype=dtype)
    out = clipped_policy_loss(_inputs(log_probs, torch.zeros(1, dtype=dtype), a, torch.tensor([True])), CLIP)
    out.loss.sum().backward()
    clipped_to = {True: 1.3, False: math.exp(-20)} if advantage > 0 else {True: math.exp(20), False: 0.8}
    assert out.loss.item() == pytest.approx(-advantage * clipped_to[log_ratio > 0], rel=1e-6)
    assert out.clamped.item() and log_probs.grad is not None and log_probs.grad.item() == 0


@pytest.mark.parametrize("column", [0, 1, 2])
def test_policy_loss_nan_at_masked_token_reaches_neither_loss_nor_gradient(column: int) -> None:
    inputs = [torch.tensor([-1.0, -1.0]), torch.tensor([-1.1, -1.0]), torch.tensor([1.0, 1.0])]
    inputs[column][1] = NAN
    inputs[0].requires_grad_()
    out = clipped_policy_loss(_inputs(*inputs, torch.tensor([True, False])), DUAL)
    out.loss.sum().backward()
    assert out.loss[1] == 0 and out.ratio[1] == 0
    assert not any(flag[1] for flag in (out.clamped, out.clipped_low, out.clipped_high, out.clipped_dual))
    assert inputs[0].grad is not None and inputs[0].grad[0] != 0 and inputs[0].grad[1] == 0


def test_policy_loss_gradient_matches_finite_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    log_probs, old, a = (torch.randn(20, generator=generator, dtype=torch.float64) for _ in range(3))
    mask = torch.rand(20, generator=generator) > 0.2
    log_probs.requires_grad_()
    clip = ClipRange(0.2, 0.3, 2.0)
    assert torch.autograd.gradcheck(lambda x: clipped_policy_loss(_inputs(x, old, a, mask), clip).loss, log_probs)


def test_policy_loss_equals_the_reference_twin() -> None:
    generator = torch.Generator().manual_seed(1)
    log_probs, old, a = (torch.randn(40, generator=generator, dtype=torch.float64) for _ in range(3))
    settings = ReferenceSettings(vocab_size=1, eps_clip=0.2, eps_clip_high=0.3, eps_clip_c=3.0)
    twin = reference.policy_losses(log_probs, old.tolist(), a.tolist(), settings)
    found = clipped_policy_loss(_inputs(log_probs, old, a, torch.ones(40, dtype=torch.bool)), DUAL)
    assert torch.allclose(found.loss, torch.stack(twin), rtol=0, atol=1e-12)
    assert found.clipped_low.any() and found.clipped_high.any() and found.clipped_dual.any()


def test_policy_loss_gradient_flows_through_log_probs_only() -> None:
    inputs = [torch.zeros(1, requires_grad=True) for _ in range(2)] + [torch.ones(1, requires_grad=True)]
    clipped_policy_loss(_inputs(*inputs, torch.tensor([True])), CLIP).loss.sum().backward()
    assert inputs[0].grad is not None and inputs[1].grad is None and inputs[2].grad is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.2, 0.2, 1.0), "dual clip is 1.0.*--eps-clip-c"),
        ((-0.1, 0.2), "lower clip of the ratio is -0.1"),
        ((0.2, NAN), "upper clip of the ratio is nan.*--eps-clip-high"),
    ],
)
def test_clip_range_impossible_numbers_are_refused(arguments: tuple[float, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ClipRange(*arguments)


def test_policy_loss_without_lower_clip_is_refused() -> None:
    with pytest.raises(ConfigError, match="no lower clip"):
        _one(1.0, 1.0, ClipRange(None, 0.2))
