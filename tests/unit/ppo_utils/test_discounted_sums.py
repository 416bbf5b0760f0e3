"""The blocked scan against hand values and the plain recursion in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slime_ppo.ppo_utils.discounted_sums import BLOCK, discounted_sums, product_dtype, varied_sums, whole_blocks


def _blocks(x: Tensor) -> Tensor:
    return torch.nn.functional.pad(x, (0, whole_blocks(len(x)) - len(x)))


def _last(lens: list[int]) -> Tensor:
    return torch.tensor(lens, dtype=torch.int64).cumsum(0) - 1


def _loop(x: Tensor, lens: list[int], factors: list[float]) -> Tensor:
    y = x.clone()
    for one, factor in zip(y.split(lens), factors, strict=True):
        for i in reversed(range(len(one) - 1)):
            one[i] += factor * one[i + 1]
    return y


def test_discounted_sums_of_two_samples_match_hand_values() -> None:
    x = _blocks(torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0], dtype=torch.float64))
    y = discounted_sums(x, torch.tensor([2, 4]), 0.5, dtype=torch.float64)
    # 4; 2 + 4/2; 1 + 4/2  |  16; 8 + 16/2
    assert y[:5].tolist() == [3.0, 4.0, 4.0, 16.0, 16.0] and len(y) == BLOCK


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.lists(st.one_of(st.integers(1, 5), st.integers(BLOCK - 1, BLOCK + 1), st.integers(1, 600)), min_size=1, max_size=6),
    st.sampled_from([0.0, 0.5, 0.97, 1.0]),
    st.integers(0, 99),
)
def test_discounted_sums_of_any_lengths_equal_the_loop(lens: list[int], factor: float, seed: int) -> None:
    x = torch.randn(sum(lens), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    given_x = _blocks(x)
    y = discounted_sums(given_x, _last(lens), factor, dtype=torch.float64)[: len(x)]
    assert torch.allclose(y, _loop(x, lens, [factor] * len(lens)), rtol=1e-12, atol=1e-12)
    assert torch.equal(given_x[: len(x)], x)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=6), st.integers(0, 99))
def test_varied_sums_with_a_factor_per_sample_equal_the_loop_and_leave_x(lens: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(lens), generator=generator, dtype=torch.float64)
    factors = torch.rand(len(lens), generator=generator, dtype=torch.float64)
    per_token = torch.repeat_interleave(factors, torch.tensor(lens)).index_fill(0, _last(lens), 0.0)
    given_x = _blocks(x)
    y = varied_sums(given_x, _blocks(per_token))
    assert torch.allclose(y[: len(x)], _loop(x, lens, factors.tolist()), rtol=1e-12, atol=1e-12)
    assert torch.equal(given_x[: len(x)], x)


@pytest.mark.parametrize("factor", [0.95, 1.0])
def test_discounted_sums_in_float32_stay_within_4e_6_of_the_loop_on_normal_numbers(factor: float) -> None:
    lens = [40000, 3, 9000]
    x = torch.randn(sum(lens), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = x if factor < 1 else x * 0.01
    y = discounted_sums(_blocks(x), _last(lens), factor, dtype=torch.float32)[: len(x)]
    assert y.dtype == torch.float32
    assert (y - _loop(x, lens, [factor] * 3)).abs().max() <= 4e-6


def test_discounted_sums_without_tokens_are_empty() -> None:
    empty = torch.zeros(0, dtype=torch.float64)
    assert discounted_sums(empty, torch.zeros(0, dtype=torch.int64), 0.9, dtype=torch.float32).shape == (0,)


def test_product_dtype_is_one_that_tf32_leaves_alone_wherever_tf32_exists() -> None:
    assert product_dtype(torch.device("cpu"), torch.float32) == torch.float32
    assert product_dtype(torch.device("cuda"), torch.float32) == torch.float64
