"""Overlong shaping and dynamic sampling against hand-computed values and the plain loops of reference_estimators.py."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_ppo.errors import ConfigError, DataError
from slime_ppo.ppo_utils import reference_estimators as reference
from slime_ppo.ppo_utils.reward_shaping import informative_groups, overlong_penalty
from tests.helpers.estimator_cases import random_outcomes

FEW = settings(max_examples=30, deadline=None, derandomize=True)


def test_overlong_penalty_ramps_to_minus_factor_and_stays() -> None:
    found = overlong_penalty(np.array([0, 80, 85, 90, 100, 101, 5000]), max_len=100, buffer_len=20, factor=0.5)
    assert found.tolist() == pytest.approx([0, 0, -0.125, -0.25, -0.5, -0.5, -0.5], rel=1e-15)


@FEW
@given(st.lists(st.integers(0, 60)), st.integers(1, 20), st.integers(0, 20), st.floats(0, 3))
def test_overlong_penalty_random_lengths_equal_the_reference(lens: list[int], buffer_len: int, more: int, factor: float) -> None:
    numbers = {"max_len": buffer_len + more, "buffer_len": buffer_len, "factor": factor}
    found = overlong_penalty(np.array(lens, np.int64), **numbers)
    assert found.tolist() == pytest.approx([reference.overlong_penalty(one, **numbers) for one in lens], rel=1e-12, abs=1e-15)


@pytest.mark.parametrize(
    ("max_len", "buffer_len", "factor", "found"), [(10, 0, 1.0, "over 0"), (10, 11, 1.0, "over 11"), (10, 5, -1.0, "is -1"),
                                                   (10, 5, float("nan"), "is nan")]
)  # fmt: skip
def test_overlong_penalty_bad_numbers_are_refused(max_len: int, buffer_len: int, factor: float, found: str) -> None:
    with pytest.raises(ConfigError, match=f"{found}.*expected"):
        overlong_penalty(np.array([1]), max_len=max_len, buffer_len=buffer_len, factor=factor)


def test_informative_groups_are_those_with_different_rewards() -> None:
    # group 3: 1, 1 and 0; group 1: 0.1 twice; group 2: one trajectory in two samples
    rewards = np.array([1.0, 0.1, 1.0, 5.0, 0.1, 0.0, 5.0], np.float32)
    found = informative_groups(rewards, np.array([3, 1, 3, 2, 1, 3, 2]), np.array([0, 1, 2, 3, 4, 5, 3]))
    assert found.tolist() == [True, False, True, False, False, True, False]


def test_informative_groups_of_nothing_are_nothing() -> None:
    assert informative_groups(np.zeros(0), np.zeros(0, np.int64), np.zeros(0, np.int64)).tolist() == []


def test_informative_groups_different_rewards_in_a_trajectory_are_refused() -> None:
    with pytest.raises(DataError, match=r"trajectory 6 have different rewards \(1\.0, 2\.0"):
        informative_groups(np.array([1.0, 9.0, 2.0]), np.array([0, 0, 0]), np.array([6, 5, 6]))


def test_informative_groups_reward_that_is_not_finite_is_refused() -> None:
    with pytest.raises(DataError, match=r"sample 1 of 2 \(trajectory 8\) has the reward nan"):
        informative_groups(np.array([1.0, np.nan]), np.array([0, 0]), np.array([7, 8]))


@FEW
@given(st.integers(0, 9999), st.integers(0, 12))
def test_informative_groups_random_rollouts_equal_the_reference(seed: int, num_trajectories: int) -> None:
    outcomes = random_outcomes(seed, num_trajectories=num_trajectories)
    columns = (np.array([getattr(one, name) for one in outcomes]) for name in ("reward", "group_id", "trajectory_id"))
    assert informative_groups(*columns).tolist() == [reference.is_informative(one, outcomes) for one in outcomes]
