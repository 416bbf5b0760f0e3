"""KL estimators against hand-computed values, at and beyond their clamps."""

import math

import pytest
import torch

from slime_ppo.errors import ConfigError
from slime_ppo.ppo_utils.kl import kl_estimate, kl_loss

ONE = torch.tensor([True])


@pytest.mark.parametrize(
    ("kind", "log_ratio", "expected", "clamped"),
    [
        ("k1", -0.5, -0.5, False),
        ("k1", 500.0, 500.0, False),
        ("k2", -3.0, 4.5, False),
        ("k2", 30.0, 450.0, False),
        ("k3", 0.5, math.exp(-0.5) - 1 + 0.5, False),
        ("k3", -500.0, math.exp(20) - 1 - 20, True),
        ("k3", 500.0, math.exp(-20) - 1 + 20, True),
        ("low_var_kl", -1.0, math.e - 1 - 1, False),
        ("low_var_kl", -3.0, 10.0, True),
        ("low_var_kl", 15.0, 10.0, True),
    ],
)
def test_kl_estimate_matches_hand_value(kind: str, log_ratio: float, expected: float, clamped: bool) -> None:
    log_probs = torch.tensor([-1.0 + log_ratio], dtype=torch.float64, requires_grad=True)
    out = kl_estimate(kind, log_probs, torch.tensor([-1.0], dtype=torch.float64), ONE)
    assert out.kl.item() == pytest.approx(expected, rel=1e-12)
    assert out.clamped.item() is clamped
    out.kl.sum().backward()
    assert log_probs.grad is not None and torch.isfinite(log_probs.grad).all()
    if clamped:
        assert log_probs.grad.item() == 0


@pytest.mark.parametrize(("kind", "expected"), [("k2", 0.7), ("k3", 1 - math.exp(-0.7))])
def test_kl_loss_gradient_matches_hand_derivative(kind: str, expected: float) -> None:
    log_probs = torch.tensor([-0.3], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    kl_loss(kind, log_probs, ref, ONE).kl.sum().backward()
    assert log_probs.grad is not None and log_probs.grad.item() == pytest.approx(expected, rel=1e-12)
    assert ref.grad is None


def test_kl_loss_k1_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="gradient of zero in expectation"):
        kl_loss("k1", torch.zeros(1), torch.zeros(1), ONE)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
def test_kl_estimate_nan_at_masked_token_is_zero_with_zero_gradient(kind: str) -> None:
    log_probs = torch.tensor([-1.0, float("nan"), -2.0], requires_grad=True)
    other = torch.tensor([-1.5, -1.0, float("nan")])
    out = kl_estimate(kind, log_probs, other, torch.tensor([True, False, False]))
    out.kl.sum().backward()
    assert out.kl[1:].tolist() == [0.0, 0.0]
    assert log_probs.grad is not None and log_probs.grad[0] != 0 and log_probs.grad[1:].tolist() == [0.0, 0.0]
