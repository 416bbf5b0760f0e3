"""Reduction over tokens: hand-computed values, and the same loss and gradient however a step is cut."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slime_ppo.errors import DataError
from slime_ppo.ppo_utils import reference
from slime_ppo.ppo_utils.aggregate import loss_sum, masked_sum
from slime_ppo.ppo_utils.denominator import Denominator, make_denominator
from slime_ppo.ppo_utils.reference_types import ReferenceSample

NAN = float("nan")
LENS = torch.tensor([2, 3])
MASK = torch.tensor([True, True, True, False, True])
X = torch.tensor([1.0, 2.0, 3.0, NAN, 5.0])
MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


@pytest.mark.parametrize(
    ("mode", "expected", "weights"),
    [
        ("token-mean", 11 / 4, [1 / 4, 1 / 4]),
        ("seq-mean-token-mean", (1.5 + 4) / 2, [1 / 4, 1 / 4]),
        ("seq-mean-token-sum", (3 + 8) / 2, [1 / 2, 1 / 2]),
        ("seq-mean-token-sum-norm", (3 + 8) / 16, [1 / 16, 1 / 16]),
    ],
)
def test_loss_sum_matches_hand_value_with_masked_nan(mode: str, expected: float, weights: list[float]) -> None:
    x = X.double().requires_grad_()
    found = loss_sum(x, MASK, LENS, make_denominator([2, 2], [0, 1], mode=mode, length_norm=8.0))
    found.backward()
    assert found.item() == pytest.approx(expected, rel=1e-12)
    assert x.grad.tolist() == [weights[0], weights[0], weights[1], 0.0, weights[1]]


def test_loss_sum_keeps_the_dtype_and_takes_samples_without_local_tokens() -> None:
    denominator = make_denominator([2, 5, 2], [0, 1, 2], mode="seq-mean-token-sum")
    found = loss_sum(X, MASK, torch.tensor([2, 0, 3]), denominator)
    assert found.dtype == torch.float32 and found.item() == pytest.approx(11 / 3, rel=1e-6)


def test_loss_sum_denominator_of_other_samples_is_refused() -> None:
    with pytest.raises(DataError, match=r"loss of 2 samples.*denominator of 3 samples.*Denominator\.select"):
        loss_sum(X, MASK, LENS, make_denominator([2, 2, 1], [0, 1, 2], mode="token-mean"))


def test_masked_sum_counts_trainable_tokens_only() -> None:
    assert masked_sum(X, MASK) == (11.0, 4)
    assert masked_sum(MASK & (X > 2), MASK) == (2.0, 4)


@dataclass(frozen=True)
class _Step:
    """The token losses and masks of each sample of a step; masked losses are NaN."""

    x: list[Tensor]
    masks: list[Tensor]
    trajectories: list[int]

    def denominator(self, mode: str) -> Denominator:
        return make_denominator([int(m.sum()) for m in self.masks], self.trajectories, mode=mode, length_norm=3.0)

    def share(self, rows: list[int], denominator: Denominator) -> tuple[float, list[Tensor]]:
        """Loss of these samples as one micro-batch, and the gradient of each sample's tokens."""
        leaves = [self.x[row].clone().requires_grad_() for row in rows]
        mask, lens = torch.cat([self.masks[row] for row in rows]), torch.tensor([len(self.x[row]) for row in rows])
        loss = loss_sum(torch.cat(leaves), mask, lens, denominator.select(rows))
        loss.backward()
        return loss.item(), [leaf.grad for leaf in leaves]


@st.composite
def _steps(draw: st.DrawFn) -> _Step:
    masks = [torch.tensor(m) for m in draw(st.lists(st.lists(st.booleans(), min_size=1, max_size=5), min_size=1, max_size=6))]
    numbers = st.floats(-4, 4, allow_nan=False)
    x = [torch.tensor([draw(numbers) if kept else NAN for kept in m.tolist()], dtype=torch.float64) for m in masks]
    return _Step(x, masks, [draw(st.integers(0, 3)) for _ in masks])


@settings(max_examples=40, deadline=None, database=None)
@given(step=_steps(), mode=st.sampled_from(MODES), data=st.data())
def test_loss_sum_any_partition_and_order_gives_the_same_loss_and_gradient(step: _Step, mode: str, data: st.DataObject) -> None:
    denominator, rows = step.denominator(mode), list(range(len(step.x)))
    whole, gradients = step.share(rows, denominator)
    order = data.draw(st.permutations(rows))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(rows)), max_size=3)) | {0, len(rows)})
    total = 0.0
    for begin, end in zip(cuts[:-1], cuts[1:], strict=True):
        loss, found = step.share(order[begin:end], denominator)
        total += loss
        for row, gradient in zip(order[begin:end], found, strict=True):
            assert torch.equal(gradient, gradients[row])
    assert total == pytest.approx(whole, rel=1e-12, abs=1e-12)


@settings(max_examples=30, deadline=None, database=None)
@given(step=_steps(), mode=st.sampled_from(MODES), place=st.integers(0, 6), trajectory=st.integers(0, 9))
def test_loss_sum_sample_without_trainable_tokens_is_as_if_absent(step: _Step, mode: str, place: int, trajectory: int) -> None:
    place = min(place, len(step.x))
    empty = (torch.full((2,), NAN, dtype=torch.float64), torch.zeros(2, dtype=torch.bool))
    more = _Step(
        [*step.x[:place], empty[0], *step.x[place:]],
        [*step.masks[:place], empty[1], *step.masks[place:]],
        [*step.trajectories[:place], trajectory, *step.trajectories[place:]],
    )
    loss, gradients = step.share(list(range(len(step.x))), step.denominator(mode))
    with_it, found = more.share(list(range(len(more.x))), more.denominator(mode))
    assert with_it == pytest.approx(loss, rel=1e-12, abs=1e-12)
    assert found.pop(place).tolist() == [0.0, 0.0]
    assert all(torch.equal(a, b) for a, b in zip(found, gradients, strict=True))


@settings(max_examples=30, deadline=None, database=None)
@given(step=_steps(), mode=st.sampled_from(MODES))
def test_denominator_equals_the_reference_twin(step: _Step, mode: str) -> None:
    none = torch.zeros(1, dtype=torch.int64)
    samples = [
        ReferenceSample(none, torch.zeros(len(m), dtype=torch.int64), m, 0.0, trajectory)
        for m, trajectory in zip(step.masks, step.trajectories, strict=True)
    ]
    twin = reference.sample_weights(samples, mode, 3.0)
    assert np.allclose(step.denominator(mode).sample_weights, twin, rtol=1e-14, atol=0)
