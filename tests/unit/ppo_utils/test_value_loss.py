"""The clipped value loss and explained variance, against hand-computed values."""

import pytest
import torch

from slime_ppo.errors import ConfigError
from slime_ppo.ppo_utils import reference
from slime_ppo.ppo_utils.reference_types import ReferenceSample, ReferenceSettings, ScoredSample
from slime_ppo.ppo_utils.value_loss import clipped_value_loss, explained_variance

NAN = float("nan")


@pytest.mark.parametrize(
    ("value", "old", "target", "clip", "loss", "gradient", "clipped"),
    [
        (1.0, 1.0, 3.0, 0.2, 2.0, -2.0, False),
        (2.0, 1.0, 3.0, 0.2, 0.5 * 1.8**2, 0.0, True),
        (0.0, 1.0, 3.0, 0.2, 4.5, -3.0, False),
        (2.0, 1.0, 3.0, 0.0, 0.5, -1.0, False),
        (1.1, 1.0, 1.0, 0.2, 0.005, 0.1, False),
        (0.0, 1.0, -1.0, 0.2, 0.5 * 1.8**2, 0.0, True),
        (-2.0, 1.0, 0.0, 0.2, 2.0, -2.0, False),
    ],
)
def test_value_loss_matches_hand_value(
    value: float, old: float, target: float, clip: float, loss: float, gradient: float, clipped: bool
) -> None:
    v = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    out = clipped_value_loss(
        v, *(torch.tensor([x], dtype=torch.float64) for x in (old, target)), torch.tensor([True]), value_clip=clip
    )
    out.loss.sum().backward()
    assert out.loss.item() == pytest.approx(loss, rel=1e-12)
    assert v.grad is not None and v.grad.item() == pytest.approx(gradient, rel=1e-12, abs=1e-12)
    assert out.clipped.item() is clipped


@pytest.mark.parametrize("column", [0, 1, 2])
@pytest.mark.parametrize("clip", [0.0, 0.2])
def test_value_loss_nan_at_masked_token_reaches_neither_loss_nor_gradient(column: int, clip: float) -> None:
    inputs = [torch.tensor([1.0, 1.0]), torch.tensor([1.0, 1.0]), torch.tensor([3.0, 3.0])]
    inputs[column][1] = NAN
    inputs[0].requires_grad_()
    out = clipped_value_loss(*inputs, torch.tensor([True, False]), value_clip=clip)
    out.loss.sum().backward()
    assert out.loss.tolist() == [2.0, 0.0] and not out.clipped[1]
    assert inputs[0].grad is not None and inputs[0].grad.tolist() == [-2.0, 0.0]


@pytest.mark.parametrize("clip", [0.0, 0.3])
def test_value_loss_equals_the_reference_twin(clip: float) -> None:
    generator = torch.Generator().manual_seed(1)
    v, old, target = (torch.randn(40, generator=generator, dtype=torch.float64) for _ in range(3))
    settings = ReferenceSettings(vocab_size=1, value_clip=clip)
    twin = [reference.value_loss(*one, settings) for one in zip(v, old.tolist(), target.tolist(), strict=True)]
    found = clipped_value_loss(v, old, target, torch.ones(40, dtype=torch.bool), value_clip=clip)
    assert torch.allclose(found.loss, torch.stack(twin), rtol=1e-12, atol=1e-14)
    assert found.clipped.any() == (clip > 0)


def test_value_loss_gradient_flows_through_values_only() -> None:
    inputs = [torch.tensor([x], requires_grad=True) for x in (1.0, 1.0, 3.0)]
    clipped_value_loss(*inputs, torch.tensor([True]), value_clip=0.2).loss.sum().backward()
    assert inputs[0].grad is not None and inputs[1].grad is None and inputs[2].grad is None


def test_value_loss_gradient_matches_finite_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    v, old, target = (torch.randn(20, generator=generator, dtype=torch.float64) for _ in range(3))
    mask = torch.rand(20, generator=generator) > 0.2
    assert torch.autograd.gradcheck(lambda x: clipped_value_loss(x, old, target, mask, value_clip=0.5).loss, v.requires_grad_())


def test_value_loss_negative_clip_is_refused() -> None:
    with pytest.raises(ConfigError, match="-0.1"):
        clipped_value_loss(*(torch.zeros(1),) * 3, torch.tensor([True]), value_clip=-0.1)


def test_explained_variance_matches_hand_value_and_ignores_masked() -> None:
    returns, values = torch.tensor([1.0, NAN, 2.0, 3.0]), torch.tensor([0.0, 5.0, 1.5, 3.0])
    # residuals 1, 1/2, 0: variance 1/4; returns 1, 2, 3: variance 1
    found = explained_variance(values, returns, torch.tensor([True, False, True, True]))
    assert found.value == pytest.approx(3 / 4, rel=1e-12)


def test_explained_variance_equals_the_reference_twin() -> None:
    generator = torch.Generator().manual_seed(2)
    values, returns = torch.randn((2, 12), generator=generator, dtype=torch.float64)
    none = torch.zeros(1, dtype=torch.int64)
    sample = ReferenceSample(none, torch.zeros(12, dtype=torch.int64), torch.ones(12, dtype=torch.bool), 0.0, 0)
    numbers = {"rewards": [], "advantages": [], "old_log_probs": [], "old_full_log_probs": [], "ref_log_probs": [], "weights": []}
    one = ScoredSample(sample, old_values=values.tolist(), returns=returns.tolist(), value_after=0.0, rejected=False, **numbers)
    found = explained_variance(values, returns, torch.ones(12, dtype=torch.bool)).value
    assert found == pytest.approx(reference.explained_variance([one]), rel=1e-12)


def test_explained_variance_merged_micro_batches_equal_the_whole() -> None:
    generator = torch.Generator().manual_seed(1)
    values, returns = torch.randn((2, 30), generator=generator)
    mask = torch.rand(30, generator=generator) > 0.3
    parts = [explained_variance(values[rows], returns[rows], mask[rows]) for rows in (slice(0, 9), slice(9, 9), slice(9, 30))]
    merged = parts[0].merge(parts[1]).merge(parts[2])
    assert merged.value == pytest.approx(explained_variance(values, returns, mask).value, rel=1e-12)


def test_explained_variance_equal_returns_is_not_reported() -> None:
    assert explained_variance(torch.randn(3), torch.full((3,), 0.1), torch.ones(3, dtype=torch.bool)).value is None
