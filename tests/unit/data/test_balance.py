import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_ppo.data.balance import equal_count_groups
from slime_ppo.errors import ConfigError


def loads(lens: np.ndarray, groups: list[np.ndarray]) -> list[int]:
    return [int(lens[members].sum()) for members in groups]


def imbalance(lens: np.ndarray, groups: list[np.ndarray]) -> float:
    return max(loads(lens, groups)) / (lens.sum() / len(groups)) - 1


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 1000), max_size=60), st.integers(1, 9))
def test_groups_hold_every_sample_once_and_differ_by_at_most_one(lens: list[int], num_groups: int) -> None:
    groups = equal_count_groups(np.array(lens, np.int64), num_groups)
    assert sorted(int(position) for members in groups for position in members) == list(range(len(lens)))
    counts = [len(members) for members in groups]
    assert len(groups) == num_groups and max(counts) - min(counts) <= 1
    assert all(members.dtype == np.int64 and list(members) == sorted(members) for members in groups)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 1000), min_size=2, max_size=40), st.integers(2, 6))
def test_groups_no_swap_with_the_heaviest_brings_two_closer(lens_list: list[int], num_groups: int) -> None:
    """By trying each: swaps of one sample of the heaviest group with one of another."""
    lens = np.array(lens_list, np.int64)
    groups = equal_count_groups(lens, num_groups)
    sums = loads(lens, groups)
    heavy = int(np.argmax(sums))
    for light in range(num_groups):
        gap = sums[heavy] - sums[light]
        changes = [int(lens[give] - lens[take]) for give in groups[heavy] for take in groups[light]]
        assert not [change for change in changes if 0 < change < gap] or gap <= 1


def test_groups_of_lognormal_lengths_are_within_a_thousandth_of_even() -> None:
    for seed in range(3):
        lens = np.random.default_rng(seed).lognormal(6.2, 1.0, 4096).astype(np.int64) + 1
        assert imbalance(lens, equal_count_groups(lens, 64)) <= 1e-3


def test_groups_with_one_huge_sample_reach_the_bound_of_that_sample_and_the_shortest() -> None:
    """64 samples to 8 groups: whatever is done, the group of the huge one is no lighter than it and the 7 shortest."""
    lens = np.random.default_rng(0).integers(1, 100, 64)
    lens[17] = 10_000
    groups = equal_count_groups(lens, 8)
    assert max(loads(lens, groups)) <= 1.05 * (10_000 + np.sort(lens)[:7].sum())


def test_groups_of_four_lengths_in_pairs_by_hand() -> None:
    """8 + 1 and 5 + 4 are the only even pairs."""
    groups = equal_count_groups(np.array([4, 8, 1, 5]), 2)
    assert sorted(tuple(int(x) for x in members) for members in groups) == [(0, 3), (1, 2)]


def test_groups_are_the_same_when_asked_again() -> None:
    lens = np.random.default_rng(1).integers(1, 50, 200)
    first, second = (equal_count_groups(lens, 7) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def test_groups_more_than_samples_leaves_empty_ones() -> None:
    assert [len(members) for members in equal_count_groups(np.array([3, 2]), 4)] == [1, 1, 0, 0]


def test_groups_none_asked_for_is_an_error() -> None:
    with pytest.raises(ConfigError, match="num_groups is 0"):
        equal_count_groups(np.array([1, 2]), 0)
