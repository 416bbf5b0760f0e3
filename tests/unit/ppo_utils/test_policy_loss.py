"""The clipped policy loss against hand-computed values, branch by branch."""

import math

import pytest
import torch

from slime_ppo.errors import ConfigError
from slime_ppo.ppo_utils.policy_loss import PolicyLoss, clipped_policy_loss

NAN = float("nan")
CLIPS = {"eps_clip_low": 0.2, "eps_clip_high": 0.3}


def _one(ratio: float, advantage: float, eps_clip_c: float | None = None) -> tuple[PolicyLoss, float]:
    log_probs = torch.tensor([math.log(ratio) - 1.0], dtype=torch.float64, requires_grad=True)
    old, a = torch.tensor([-1.0], dtype=torch.float64), torch.tensor([advantage], dtype=torch.float64)
    out = clipped_policy_loss(log_probs, old, a, torch.tensor([True]), eps_clip_c=eps_clip_c, **CLIPS)
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
    out, found_gradient = _one(ratio, advantage, dual)
    assert out.loss.item() == pytest.approx(loss, rel=1e-12, abs=1e-12)
    assert found_gradient == pytest.approx(gradient, rel=1e-12, abs=1e-12)
    assert out.ratio.item() == pytest.approx(ratio, rel=1e-12)
    assert {"low": out.clipped_low.item(), "high": out.clipped_high.item(), "dual": out.clipped_dual.item()} == {
        name: name == branch for name in ("low", "high", "dual")
    }


@pytest.mark.parametrize("log_ratio", [-500.0, 500.0])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_policy_loss_extreme_log_ratio_is_finite_with_zero_gradient(log_ratio: float, advantage: float) -> None:
    log_probs = torch.tensor([log_ratio], requires_grad=True)
    out = clipped_policy_loss(log_probs, torch.zeros(1), torch.tensor([advantage]), torch.tensor([True]), **CLIPS)
    out.loss.sum().backward()
    assert torch.isfinite(out.loss).all() and out.clamped.item()
    assert log_probs.grad is not None and log_probs.grad.item() == 0


@pytest.mark.parametrize("column", [0, 1, 2])
def test_policy_loss_nan_at_masked_token_reaches_neither_loss_nor_gradient(column: int) -> None:
    inputs = [torch.tensor([-1.0, -1.0]), torch.tensor([-1.1, -1.0]), torch.tensor([1.0, 1.0])]
    inputs[column][1] = NAN
    inputs[0].requires_grad_()
    out = clipped_policy_loss(*inputs, torch.tensor([True, False]), eps_clip_c=3.0, **CLIPS)
    out.loss.sum().backward()
    assert out.loss[1] == 0 and out.ratio[1] == 0 and not out.clamped[1]
    assert inputs[0].grad is not None and inputs[0].grad[0] != 0 and inputs[0].grad[1] == 0


def test_policy_loss_gradient_matches_finite_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    log_probs, old, a = (torch.randn(20, generator=generator, dtype=torch.float64) for _ in range(3))
    mask = torch.rand(20, generator=generator) > 0.2
    log_probs.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: clipped_policy_loss(x, old, a, mask, eps_clip_c=2.0, **CLIPS).loss, log_probs)


def test_policy_loss_gradient_flows_through_log_probs_only() -> None:
    inputs = [torch.zeros(1, requires_grad=True) for _ in range(2)] + [torch.ones(1, requires_grad=True)]
    clipped_policy_loss(*inputs, torch.tensor([True]), **CLIPS).loss.sum().backward()
    assert inputs[0].grad is not None and inputs[1].grad is None and inputs[2].grad is None


def test_policy_loss_dual_clip_of_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="dual clip is 1"):
        _one(1.0, 1.0, 1.0)
