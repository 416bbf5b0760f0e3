"""Whitening against hand-computed values and numpy in float64; over ranks in tests/dist."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from slime_ppo.ppo_utils.whiten import local_moments, local_statistics, merged_statistics, whiten_advantages

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


@pytest.mark.parametrize(("mean", "std"), [(0, 1), (100, 1), (1000, 0.01), (-1e4, 0.01), (0.01, 100)])
def test_whiten_any_mean_and_spread_is_within_6e_7_of_float64(mean: float, std: float) -> None:
    x = (mean + std * torch.randn(4096, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).float()
    out = whiten_advantages(x, torch.ones(4096, dtype=torch.bool))
    y = x.double()
    assert ((y - y.mean()) / (y.var() + 1e-8).sqrt() - out.double()).abs().max() <= 6e-7


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(0, 999), st.floats(-100, 100), st.floats(1e-2, 100))
def test_whiten_shift_and_scale_change_nothing(seed: int, shift: float, scale: float) -> None:
    x = torch.randn(64, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    mask = torch.rand(64, generator=torch.Generator().manual_seed(seed)) > 0.3
    whitened = whiten_advantages(x, mask)
    assert torch.allclose(whiten_advantages(x + shift, mask), whitened, atol=1e-11)
    # epsilon is 1e-8 in the variance, so that std 1e-2 still moves the result by 5e-5
    assert torch.allclose(whiten_advantages(x * scale + shift, mask), whitened, atol=3e-4)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(0, 999), st.lists(st.integers(0, 12), min_size=1, max_size=6))
def test_whiten_statistics_of_any_split_are_those_of_all_tokens(seed: int, sizes: list[int]) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = 1000 + 0.01 * torch.randn(sum(sizes), generator=generator, dtype=torch.float64)
    mask = torch.rand(sum(sizes), generator=generator) > 0.3
    parts = torch.stack([local_statistics(part, m) for part, m in zip(x.split(sizes), mask.split(sizes), strict=True)])
    kept = x[mask]
    count, mean, m2 = merged_statistics(parts).tolist()
    assert count == len(kept)
    assert mean == pytest.approx(kept.mean().item() if len(kept) else 0.0, rel=1e-14)
    assert m2 == pytest.approx((kept - kept.mean()).square().sum().item() if len(kept) else 0.0, rel=1e-8, abs=1e-20)


def test_local_moments_match_hand_value() -> None:
    moments = local_moments(torch.tensor([1.0, NAN, 3.0, 5.0]), torch.tensor([True, False, True, True]))
    assert (moments.count, moments.mean, moments.m2) == (3.0, 3.0, 8.0)


class _Operators(TorchDispatchMode):
    """Names of all operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func._opname)
        return func(*args, **(kwargs or {}))


def test_whiten_reads_nothing_back_from_the_device() -> None:
    # operators that need a number on the host: a scalar read, and shapes that depend on a mask
    waiting = {"_local_scalar_dense", "item", "nonzero", "masked_select", "index"}
    x, mask = torch.arange(4.0), torch.tensor([True, True, False, True])
    with _Operators() as seen:
        whiten_advantages(x, mask)
    assert seen.names and not seen.names & waiting
    with _Operators() as control:
        float(x[mask].mean())
    assert control.names & waiting == {"_local_scalar_dense", "index"}


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
