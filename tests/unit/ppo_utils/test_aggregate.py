"""Reduction over tokens."""

import pytest
import torch

from slime_ppo.ppo_utils.aggregate import masked_sum, masked_weighted_sum, token_weights
from slime_ppo.ppo_utils.denominator import make_denominator

NAN = float("nan")
LENS = torch.tensor([2, 3])
MASK = torch.tensor([True, True, True, False, True])
X = torch.tensor([1.0, 2.0, 3.0, NAN, 5.0])


@pytest.mark.parametrize(
    ("mode", "expected"), [("token-mean", 11 / 4), ("seq-mean-token-mean", (1.5 + 4) / 2), ("seq-mean-token-sum", (3 + 8) / 2)]
)
def test_masked_weighted_sum_matches_hand_value_with_masked_nan(mode: str, expected: float) -> None:
    weights = token_weights(torch.from_numpy(make_denominator([2, 2], [0, 1], mode=mode).sample_weights), LENS)
    x = X.double().requires_grad_()
    found = masked_weighted_sum(x, MASK, weights)
    found.backward()
    assert found.item() == pytest.approx(expected, rel=1e-12)
    assert torch.equal(x.grad, torch.where(MASK, weights, 0.0))


def test_masked_weighted_sum_parts_of_a_step_add_up_to_the_whole() -> None:
    weights = token_weights(torch.tensor([0.3, 0.7], dtype=torch.float64), LENS)
    parts = sum(masked_weighted_sum(X[r], MASK[r], weights[r]) for r in (slice(0, 2), slice(2, 5)))
    assert parts.item() == pytest.approx(masked_weighted_sum(X, MASK, weights).item(), rel=1e-6)
    assert parts.dtype == torch.float32


def test_masked_sum_counts_trainable_tokens_only() -> None:
    assert masked_sum(X, MASK) == (11.0, 4)
    assert masked_sum(MASK & (X > 2), MASK) == (2.0, 4)
