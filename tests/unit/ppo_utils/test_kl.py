"""KL estimators against hand-computed values, at and beyond their clamps."""

import math

import pytest
import torch

from slime_ppo.errors import ConfigError
from slime_ppo.ppo_utils import reference
from slime_ppo.ppo_utils.kl import kl_estimate, kl_loss, unbiased_kl_loss

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
def test_kl_estimate_equals_the_reference_twin(kind: str) -> None:
    log_ratios = torch.tensor([-30.0, -3.0, -0.1, 0.0, 0.2, 4.0, 12.0, 25.0], dtype=torch.float64)
    found = kl_estimate(kind, log_ratios, torch.zeros_like(log_ratios), torch.ones(8, dtype=torch.bool)).kl
    assert torch.allclose(found, torch.stack([reference.kl_estimate(x, kind) for x in log_ratios]), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("kind", "kl", "gradient"),
    [
        ("k1", 0.7, 1 + 0.7),
        ("k2", 0.245, 0.7),
        ("k3", math.exp(-0.7) - 0.3, (1 - math.exp(-0.7)) + (math.exp(-0.7) - 0.3)),
        ("low_var_kl", math.exp(-0.7) - 0.3, (1 - math.exp(-0.7)) + (math.exp(-0.7) - 0.3)),
    ],
)
def test_unbiased_kl_loss_matches_hand_value(kind: str, kl: float, gradient: float) -> None:
    """ratio e^0.4, lr 0.7: r kl, with gradient r (dkl + kl), for k2 r dkl."""
    log_probs = torch.tensor([-0.3], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    out = unbiased_kl_loss(kind, log_probs, ref, log_probs + 0.7, ONE)
    out.kl.sum().backward()
    assert out.kl.item() == pytest.approx(math.exp(0.4) * kl, rel=1e-12) and not out.clamped.item()
    assert log_probs.grad is not None and log_probs.grad.item() == pytest.approx(math.exp(0.4) * gradient, rel=1e-12)
    assert ref.grad is None


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_unbiased_kl_loss_expected_gradient_is_that_of_the_exact_kl(kind: str) -> None:
    """Over all five tokens weighted by the old policy, against autograd of sum p (log p - log p_ref)."""
    generator = torch.Generator().manual_seed(0)
    logits, old, ref = (torch.randn(5, generator=generator, dtype=torch.float64) for _ in range(3))
    old, ref = old.log_softmax(0), ref.log_softmax(0)
    logits.requires_grad_()
    log_probs = logits.log_softmax(0)
    mask = torch.ones(5, dtype=torch.bool)
    expected = torch.autograd.grad((log_probs.exp() * (log_probs - ref)).sum(), logits, retain_graph=True)[0]
    estimate = unbiased_kl_loss(kind, log_probs, ref, log_probs - old, mask).kl
    found = torch.autograd.grad((old.exp() * estimate).sum(), logits, retain_graph=True)[0]
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)
    assert not torch.allclose(torch.autograd.grad((old.exp() * kl_estimate(kind, log_probs, ref, mask).kl).sum(), logits)[0], found)


@pytest.mark.parametrize("log_ratio", [-500.0, 500.0])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
def test_unbiased_kl_loss_ratio_beyond_its_clamp_is_finite_without_gradient(kind: str, log_ratio: float) -> None:
    log_probs = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    ratio = torch.tensor([log_ratio], dtype=torch.float64, requires_grad=True)
    out = unbiased_kl_loss(kind, log_probs, torch.tensor([-1.5], dtype=torch.float64), ratio, ONE)
    out.kl.sum().backward()
    one = kl_estimate(kind, log_probs.detach(), torch.tensor([-1.5], dtype=torch.float64), ONE).kl.item()
    assert out.kl.item() == pytest.approx(math.exp(math.copysign(20, log_ratio)) * one, rel=1e-12) and out.clamped.item()
    assert ratio.grad is None or ratio.grad.item() == 0
    assert log_probs.grad is not None and torch.isfinite(log_probs.grad).all()


@pytest.mark.parametrize("column", [0, 1, 2])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
def test_unbiased_kl_loss_nan_at_masked_token_is_zero_with_zero_gradient(kind: str, column: int) -> None:
    inputs = [torch.tensor([-1.0, -1.0]), torch.tensor([-1.5, -1.5]), torch.tensor([0.1, 0.1])]
    inputs[column][1] = float("nan")
    inputs[0].requires_grad_()
    inputs[2].requires_grad_()
    out = unbiased_kl_loss(kind, *inputs, torch.tensor([True, False]))
    out.kl.sum().backward()
    assert out.kl[1] == 0 and out.kl[0] != 0 and not out.clamped[1]
    for leaf in (inputs[0], inputs[2]):
        assert leaf.grad is None or (leaf.grad[0] != 0 and leaf.grad[1] == 0)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_gradients_match_finite_differences(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    log_probs, other, ratio = (torch.randn(12, generator=generator, dtype=torch.float64) for _ in range(3))
    mask = torch.rand(12, generator=generator) > 0.2
    log_probs.requires_grad_()
    assert torch.autograd.gradcheck(lambda x, y: kl_estimate(kind, x, y, mask).kl, (log_probs, other.clone().requires_grad_()))
    moving = () if kind == "k2" else (ratio.requires_grad_(),)
    fixed = (ratio,) if kind == "k2" else ()
    assert torch.autograd.gradcheck(lambda x, *r: unbiased_kl_loss(kind, x, other, *r, *fixed, mask).kl, (log_probs, *moving))


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
def test_kl_estimate_nan_at_masked_token_is_zero_with_zero_gradient(kind: str) -> None:
    log_probs = torch.tensor([-1.0, float("nan"), -2.0], requires_grad=True)
    other = torch.tensor([-1.5, -1.0, float("nan")])
    out = kl_estimate(kind, log_probs, other, torch.tensor([True, False, False]))
    out.kl.sum().backward()
    assert out.kl[1:].tolist() == [0.0, 0.0]
    assert log_probs.grad is not None and log_probs.grad[0] != 0 and log_probs.grad[1:].tolist() == [0.0, 0.0]
