import numpy as np
import pytest

from slime_ppo.data.balance import capped_bins, equal_count_groups
from slime_ppo.errors import ConfigError


def loads(lens: np.ndarray, groups: list[np.ndarray]) -> list[int]:
    return [int(lens[members].sum()) for members in groups]


def imbalance(lens: np.ndarray, groups: list[np.ndarray]) -> float:
    return max(loads(lens, groups)) / (lens.sum() / len(groups)) - 1


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


def test_bins_equal_samples_above_half_the_cap_take_one_each_in_no_time() -> None:
    """The least number, 0.6 of the samples, is far from enough; what is enough is not searched one by one."""
    lens = np.full(20_000, 600)
    bins = capped_bins(lens, lens, max_tokens=1000, multiple=8)
    assert [len(members) for members in bins] == [1] * 20_000


def test_bins_of_very_many_short_samples_compare_no_pairs() -> None:
    """A table of 30,000 x 30,000 swaps would take gigabytes."""
    lens = np.ones(60_000, np.int64)
    assert loads(lens, capped_bins(lens, lens, max_tokens=40_000, multiple=1)) == [30_000, 30_000]


def test_bins_best_fit_when_even_bins_do_not_fit() -> None:
    """6 and 5 + 5 are the only bins of 10 and two are enough; spread evenly by length, 6 + 5 and 5 pass the cap."""
    lens = np.array([6, 5, 5])
    bins = capped_bins(lens, lens, max_tokens=10, multiple=1)
    assert sorted(loads(lens, bins)) == [6, 10]


def test_bins_of_lognormal_lengths_are_as_few_as_can_be_and_even() -> None:
    """8,192 lengths of median 500 within 32,768 tokens."""
    lens = np.minimum(np.random.default_rng(0).lognormal(6.2, 1.0, 8192).astype(np.int64) + 1, 32_768)
    bins = capped_bins(lens, lens, max_tokens=32_768, multiple=1)
    assert len(bins) == -(-int(lens.sum()) // 32_768)
    assert max(loads(lens, bins)) <= 1.001 * min(loads(lens, bins))


def test_bins_more_than_samples_leaves_empty_ones() -> None:
    lens = np.array([3, 9, 2])
    assert sorted(loads(lens, capped_bins(lens, lens, max_tokens=5, multiple=4))) == [0, 2, 3, 9]


@pytest.mark.parametrize(("max_tokens", "multiple"), [(0, 1), (5, 0)])
def test_bins_impossible_numbers_are_refused(max_tokens: int, multiple: int) -> None:
    with pytest.raises(ConfigError, match=f"max_tokens {max_tokens} and multiple {multiple} must both be at least 1"):
        capped_bins(np.array([1]), np.array([1]), max_tokens=max_tokens, multiple=multiple)


def test_bins_swap_that_the_cap_forbids_gives_way_to_a_smaller_one() -> None:
    """11 + 5 + 2 and 6 + 6 + 4 + 2 are of 18 tokens and of costs 150 and 92: half the gap is 29. To move 5, of 25, takes more than
    the 3 tokens of room; 5 for 2, of 21, is what fits."""
    lens = np.array([11, 6, 6, 5, 4, 2, 2])
    bins = capped_bins(lens, lens**2, max_tokens=21, multiple=2)
    assert sorted(int((lens[members] ** 2).sum()) for members in bins) == [113, 129]
