"""CISPO against hand-computed values: the weight is clipped, the gradient is kept."""

import math

import pytest
import torch
from torch import Tensor

from slime_ppo.errors import ConfigError
from slime_ppo.ppo_utils import reference
from slime_ppo.ppo_utils.cispo import cispo_policy_loss
from slime_ppo.ppo_utils.policy_loss import ClipRange, PolicyInputs
from slime_ppo.ppo_utils.reference_types import ReferenceSettings

NAN = float("nan")


def _inputs(log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> PolicyInputs:
    return PolicyInputs(log_probs, old, advantages, mask, torch.tensor([len(mask)]))


@pytest.mark.parametrize(
    ("ratio", "advantage", "low", "weight", "branch"),
    [
        (1.0, 2.0, None, 1.0, ""),
        (1.5, 2.0, None, 1.3, "high"),
        (1.5, -2.0, None, 1.3, "high"),
        (0.1, 2.0, None, 0.1, ""),
        (0.1, -2.0, None, 0.1, ""),
        (0.1, 2.0, 0.2, 0.8, "low"),
        (0.1, -2.0, 0.2, 0.8, "low"),
        (0.9, -2.0, 0.2, 0.9, ""),
    ],
)
def test_cispo_matches_hand_value(ratio: float, advantage: float, low: float | None, weight: float, branch: str) -> None:
    log_prob = -1.5
    log_probs = torch.tensor([log_prob], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([log_prob - math.log(ratio)], dtype=torch.float64)
    a = torch.tensor([advantage], dtype=torch.float64)
    out = cispo_policy_loss(_inputs(log_probs, old, a, torch.tensor([True])), ClipRange(low, 0.3))
    out.loss.sum().backward()
    assert out.loss.item() == pytest.approx(-weight * advantage * log_prob, rel=1e-12)
    assert log_probs.grad is not None and log_probs.grad.item() == pytest.approx(-weight * advantage, rel=1e-12)
    assert out.ratio.item() == pytest.approx(ratio, rel=1e-12)
    assert (out.clipped_low.item(), out.clipped_high.item(), out.clipped_dual.item()) == (
        branch == "low",
        branch == "high",
        False,
    )


@pytest.mark.parametrize(("log_ratio", "weight"), [(-500.0, math.exp(-20)), (500.0, 1.3), (-20.5, math.exp(-20)), (20.5, 1.3)])
def test_cispo_log_ratio_beyond_the_clamp_has_a_bounded_weight(log_ratio: float, weight: float) -> None:
    log_probs = torch.tensor([log_ratio], requires_grad=True)
    out = cispo_policy_loss(_inputs(log_probs, torch.zeros(1), torch.ones(1), torch.tensor([True])), ClipRange(None, 0.3))
    out.loss.sum().backward()
    assert out.clamped.item() and torch.isfinite(out.loss).all()
    assert log_probs.grad is not None and log_probs.grad.item() == pytest.approx(-weight, rel=1e-5)


@pytest.mark.parametrize("column", [0, 1, 2])
def test_cispo_nan_at_masked_token_reaches_neither_loss_nor_gradient(column: int) -> None:
    inputs = [torch.tensor([-1.0, -1.0]), torch.tensor([-1.1, -9.0]), torch.tensor([1.0, 1.0])]
    inputs[column][1] = NAN
    inputs[0].requires_grad_()
    out = cispo_policy_loss(_inputs(*inputs, torch.tensor([True, False])), ClipRange(0.2, 0.2))
    out.loss.sum().backward()
    assert out.loss[1] == 0 and out.ratio[1] == 0 and not (out.clamped[1] or out.clipped_low[1] or out.clipped_high[1])
    assert inputs[0].grad is not None and inputs[0].grad[0] != 0 and inputs[0].grad[1] == 0


def test_cispo_gradient_matches_finite_differences_with_the_weight_held() -> None:
    """The weight is a constant: the loss is linear in log_probs around the point where the weight was taken."""
    generator = torch.Generator().manual_seed(0)
    log_probs, old, a = (torch.randn(20, generator=generator, dtype=torch.float64) for _ in range(3))
    mask = torch.rand(20, generator=generator) > 0.2
    log_probs.requires_grad_()
    clip = ClipRange(0.2, 0.3)
    gradient = torch.autograd.grad(cispo_policy_loss(_inputs(log_probs, old, a, mask), clip).loss.sum(), log_probs)[0]
    weights = torch.exp(log_probs.detach() - old).clamp(0.8, 1.3)
    assert torch.allclose(gradient, torch.where(mask, -weights * a, 0.0), rtol=1e-12, atol=0)


@pytest.mark.parametrize("low", [None, 0.2])
def test_cispo_equals_the_reference_twin(low: float | None) -> None:
    generator = torch.Generator().manual_seed(1)
    log_probs, old, a = (torch.randn(40, generator=generator, dtype=torch.float64) for _ in range(3))
    settings = ReferenceSettings(vocab_size=1, policy_loss="cispo", eps_clip=low, eps_clip_high=0.3)
    twin = reference.policy_losses(log_probs, old.tolist(), a.tolist(), settings)
    found = cispo_policy_loss(_inputs(log_probs, old, a, torch.ones(40, dtype=torch.bool)), ClipRange(low, 0.3))
    assert torch.allclose(found.loss, torch.stack(twin), rtol=0, atol=1e-12)


def test_cispo_dual_clip_is_refused() -> None:
    one = torch.zeros(1)
    with pytest.raises(ConfigError, match="no dual clip, found 3.0"):
        cispo_policy_loss(_inputs(one, one, one, torch.tensor([True])), ClipRange(None, 0.2, 3.0))
