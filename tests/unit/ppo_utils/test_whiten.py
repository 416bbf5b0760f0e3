"""Whitening against hand-computed values and numpy in float64; over ranks in tests/dist."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_ppo.ppo_utils.whiten import whiten_advantages

NAN = float("nan")


def test_whiten_masked_nan_matches_hand_value_with_unbiased_variance() -> None:
    out = whiten_advantages(torch.tensor([1.0, NAN, 3.0, 5.0]), torch.tensor([True, False, True, True]))
    # mean 3, variance ((-2)^2 + 0 + 2^2) / 2 = 4
    assert torch.allclose(out, torch.tensor([-1.0, 0.0, 0.0, 1.0]), rtol=1e-6) and out[1] == 0


def test_whiten_fewer_than_two_tokens_or_equal_ones_is_centred() -> None:
    one = whiten_advantages(torch.tensor([7.0, NAN]), torch.tensor([True, False]))
    equal = whiten_advantages(torch.full((5,), 0.1), torch.ones(5, dtype=torch.bool))
    none = whiten_advantages(torch.tensor([NAN]), torch.tensor([False]))
    assert one.tolist() == [0, 0] and none.tolist() == [0]
    assert equal.abs().max() < 1e-6


def test_whiten_large_mean_small_spread_matches_float64() -> None:
    x = (1000 + 0.01 * torch.randn(4096, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).float()
    out = whiten_advantages(x, torch.ones(4096, dtype=torch.bool))
    y = x.double()
    assert torch.allclose(out.double(), (y - y.mean()) / (y.var() + 1e-8).sqrt(), atol=1e-6)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(0, 999), st.floats(-100, 100), st.floats(1e-2, 100))
def test_whiten_shift_and_scale_change_nothing(seed: int, shift: float, scale: float) -> None:
    x = torch.randn(64, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    mask = torch.rand(64, generator=torch.Generator().manual_seed(seed)) > 0.3
    # epsilon is 1e-8 in the variance, so that std 1e-2 still moves the result by 5e-5
    assert torch.allclose(whiten_advantages(x * scale + shift, mask), whiten_advantages(x, mask), atol=3e-4)


def test_whiten_result_has_the_dtype_of_the_input_and_no_gradient() -> None:
    x = torch.randn(4, requires_grad=True)
    out = whiten_advantages(x, torch.ones(4, dtype=torch.bool))
    assert out.dtype == torch.float32 and not out.requires_grad


@pytest.mark.parametrize("insert_at", [0, 2, 4])
def test_whiten_inserting_a_masked_token_changes_nothing(insert_at: int) -> None:
    x = torch.tensor([0.3, -1.0, 2.0, 0.7])
    y = torch.cat([x[:insert_at], torch.tensor([55.0]), x[insert_at:]])
    mask = torch.ones(5, dtype=torch.bool)
    mask[insert_at] = False
    assert torch.equal(whiten_advantages(y, mask)[mask], whiten_advantages(x, torch.ones(4, dtype=torch.bool)))
