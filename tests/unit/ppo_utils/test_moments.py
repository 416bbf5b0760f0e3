"""Merging of statistics, against numpy in float64 over all numbers at once."""

from functools import reduce

import numpy as np
import pytest

from slime_ppo.ppo_utils.moments import ExplainedVariance, Moments


def _moments(x: np.ndarray) -> Moments:
    return Moments(float(len(x)), float(x.mean()), float(((x - x.mean()) ** 2).sum())) if len(x) else Moments()


@pytest.mark.parametrize("cuts", [[0], [5], [3, 3, 20], [1, 2, 3, 39]])
def test_merge_any_split_equals_numpy_variance_of_all(cuts: list[int]) -> None:
    x = 1000 + 0.01 * np.random.default_rng(0).standard_normal(40)
    merged = reduce(Moments.merge, (_moments(part) for part in np.split(x, cuts)), Moments())
    assert merged.count == 40
    assert merged.mean == pytest.approx(x.mean(), rel=1e-14)
    assert merged.variance == pytest.approx(x.var(ddof=1), rel=1e-9)


def test_variance_of_one_number_or_none_is_zero() -> None:
    assert Moments().variance == 0 and Moments(1.0, 3.0, 0.0).variance == 0


def test_explained_variance_merged_over_two_parts_equals_that_of_all() -> None:
    rng = np.random.default_rng(1)
    returns, values = rng.standard_normal((2, 30))
    parts = []
    for rows in (slice(0, 11), slice(11, 30)):
        g, v = returns[rows], values[rows]
        parts.append(ExplainedVariance(_moments(g), _moments(g - v), float(g.min()), float(g.max())))
    expected = 1 - (returns - values).var(ddof=1) / returns.var(ddof=1)
    assert ExplainedVariance().merge(parts[0]).merge(parts[1]).value == pytest.approx(expected, rel=1e-12)


def test_explained_variance_equal_returns_in_all_parts_is_not_reported() -> None:
    part = ExplainedVariance(Moments(3, 0.1, 1e-17), Moments(3, 0.0, 1.0), 0.1, 0.1)
    assert part.merge(part).value is None
    assert ExplainedVariance().value is None
