"""Group figures against hand-computed numbers and the plain loops of reference_estimators.py."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slime_ppo.errors import DataError
from slime_ppo.ppo_utils import reference_estimators as reference
from slime_ppo.ppo_utils.group_baselines import SequenceRewards, grpo_scores, mean_scores, rloo_scores
from tests.helpers.estimator_cases import random_outcomes, sequence_rewards

NAN = float("nan")
FEW = settings(max_examples=15, deadline=None, derandomize=True)
CASES = (st.integers(0, 9999), st.integers(0, 20))
Scores = Callable[[SequenceRewards], Tensor]


def _grpo(rollout: SequenceRewards) -> Tensor:
    return grpo_scores(rollout, std_normalization=True)


def _grpo_without_std(rollout: SequenceRewards) -> Tensor:
    return grpo_scores(rollout, std_normalization=False)


ALL: dict[str, tuple[Scores, Callable[..., float]]] = {
    "mean": (mean_scores, reference.mean_score),
    "grpo": (_grpo, reference.grpo_score),
    "grpo without std": (_grpo_without_std, lambda one, all_: reference.grpo_score(one, all_, std_normalization=False)),
    "rloo": (rloo_scores, reference.rloo_score),
}
EACH = pytest.mark.parametrize("name", ALL)


def _rollout(
    rewards: list[float], groups: list[int] | None = None, trajectories: list[int] | None = None, counted: list[int] | None = None
) -> SequenceRewards:
    """By default one group, a trajectory per sample, all counted."""
    size = len(rewards)
    return SequenceRewards(
        torch.tensor(rewards, dtype=torch.float32),
        torch.tensor(groups or [4] * size),
        torch.tensor(trajectories or list(range(size))),
        torch.tensor(counted or [1] * size, dtype=torch.bool),
    )


def _picked(rollout: SequenceRewards, places: Tensor) -> SequenceRewards:
    return SequenceRewards(*(x[places] for x in (rollout.rewards, rollout.group_ids, rollout.trajectory_ids, rollout.counted)))


# Two groups, mixed: group 8 has rewards 1, 2, 3 (mean 2, unbiased variance 1), group 9 has 0 and 4 (mean 2, variance 8).
# The answer with reward 3 comes in three parts, which have one vote.
REWARDS, GROUPS, TRAJECTORIES = [1.0, 3, 0, 3, 2, 4, 3], [8, 8, 9, 8, 8, 9, 8], [10, 12, 20, 12, 11, 21, 12]
HAND = {
    "mean": [-1.0, 1, -2, 1, 0, 2, 1],
    "grpo": [-1 / 1.000001, 1 / 1.000001, -2 / (8**0.5 + 1e-6), 1 / 1.000001, 0, 2 / (8**0.5 + 1e-6), 1 / 1.000001],
    "grpo without std": [-1.0, 1, -2, 1, 0, 2, 1],
    "rloo": [1 - 2.5, 3 - 1.5, 0 - 4, 3 - 1.5, 2 - 2, 4 - 0, 3 - 1.5],
}


@EACH
def test_scores_two_groups_with_a_trajectory_in_parts_match_hand_values(name: str) -> None:
    found = ALL[name][0](_rollout(REWARDS, GROUPS, TRAJECTORIES))
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx(HAND[name], rel=1e-12, abs=1e-12)


@EACH
def test_scores_equal_rewards_are_exactly_zero(name: str) -> None:
    # in float64 (0.1 + 0.1 + 0.1) / 3 is not 0.1
    numbers = torch.tensor([0.1, 0.1, 0.1, 7.3], dtype=torch.float64)
    rollout = _rollout([0.0] * 4, groups=[1, 1, 1, 2])
    assert ALL[name][0](replace(rollout, rewards=numbers)).tolist() == [0, 0, 0, 0]
    assert ALL[name][0](replace(rollout, rewards=-1e30 * numbers)).tolist() == [0, 0, 0, 0]


@EACH
def test_scores_group_shrunk_to_one_is_zero(name: str) -> None:
    found = ALL[name][0](_rollout([5.0, NAN, 3.0], counted=[1, 0, 0]))
    assert found.tolist() == [0, 0, 0]


@EACH
def test_scores_one_trajectory_of_several_samples_is_a_singleton(name: str) -> None:
    assert ALL[name][0](_rollout([5.0, 5.0], trajectories=[3, 3])).tolist() == [0, 0]


@EACH
def test_scores_trajectory_counts_while_one_of_its_samples_does(name: str) -> None:
    # the second part of trajectory 0 is not counted: its own score is 0, its trajectory still votes once
    found = ALL[name][0](_rollout([4.0, NAN, 0.0], trajectories=[0, 0, 1], counted=[1, 0, 1]))
    alone = ALL[name][0](_rollout([4.0, 0.0]))
    assert alone[0] > 0 and found.tolist() == [alone[0], 0, alone[1]]


@EACH
def test_scores_of_nothing_are_nothing(name: str) -> None:
    assert ALL[name][0](_rollout([])).tolist() == []
    assert ALL[name][0](_rollout([NAN, NAN], counted=[0, 0])).tolist() == [0, 0]


@EACH
def test_scores_large_offset_keeps_its_digits(name: str) -> None:
    rollout = _rollout(REWARDS, GROUPS, TRAJECTORIES)
    far = SequenceRewards(rollout.rewards.double() + 2.0**40, rollout.group_ids, rollout.trajectory_ids, rollout.counted)
    assert ALL[name][0](far).tolist() == pytest.approx(HAND[name], rel=1e-12, abs=1e-12)


@EACH
@FEW
@given(*CASES)
def test_scores_random_rollouts_equal_the_reference(name: str, seed: int, num_trajectories: int) -> None:
    outcomes = random_outcomes(seed, num_trajectories=num_trajectories)
    found = ALL[name][0](sequence_rewards(outcomes)).tolist()
    assert found == pytest.approx([ALL[name][1](one, outcomes) for one in outcomes], rel=1e-9, abs=1e-12)


@EACH
@FEW
@given(*CASES)
def test_scores_permuting_samples_permutes_them(name: str, seed: int, num_trajectories: int) -> None:
    rollout = sequence_rewards(random_outcomes(seed, num_trajectories=num_trajectories))
    order = torch.randperm(len(rollout.rewards), generator=torch.Generator().manual_seed(seed))
    found, expected = ALL[name][0](_picked(rollout, order)), ALL[name][0](rollout)[order]
    assert torch.allclose(found, expected, rtol=1e-9, atol=1e-12)


@EACH
@FEW
@given(*CASES)
def test_scores_leaving_out_samples_that_do_not_count_changes_nothing(name: str, seed: int, num_trajectories: int) -> None:
    rollout = sequence_rewards(random_outcomes(seed, num_trajectories=num_trajectories))
    found = ALL[name][0](rollout)
    assert torch.equal(found[rollout.counted], ALL[name][0](_picked(rollout, rollout.counted.nonzero()[:, 0])))
    assert found[~rollout.counted].eq(0).all()


@EACH
@FEW
@given(*CASES, st.floats(-100, 100))
def test_scores_shifting_the_rewards_of_a_group_changes_nothing(name: str, seed: int, num_trajectories: int, shift: float) -> None:
    rollout = sequence_rewards(random_outcomes(seed, num_trajectories=num_trajectories))
    # another shift for each group: group ids are multiples of 7
    moved = rollout.rewards + shift * (1 + rollout.group_ids)
    shifted = SequenceRewards(moved, rollout.group_ids, rollout.trajectory_ids, rollout.counted)
    # rounding moves a reward by up to 1e-12; a std is at least that of 0, 0, ..., 0.1, or of two random numbers
    assert torch.allclose(ALL[name][0](shifted), ALL[name][0](rollout), rtol=1e-6, atol=1e-6)


@FEW
@given(*CASES)
def test_rloo_scores_of_the_trajectories_of_a_group_add_up_to_zero(seed: int, num_trajectories: int) -> None:
    outcomes = random_outcomes(seed, num_trajectories=num_trajectories)
    scores = {
        (one.group_id, one.trajectory_id): score
        for one, score in zip(outcomes, rloo_scores(sequence_rewards(outcomes)).tolist(), strict=True)
        if one.counted
    }
    for group in {one.group_id for one in outcomes}:
        assert sum(score for (member_of, _), score in scores.items() if member_of == group) == pytest.approx(0.0, abs=1e-12)


@EACH
def test_scores_different_rewards_in_a_trajectory_are_refused(name: str) -> None:
    with pytest.raises(DataError, match=r"samples of trajectory 12 have different rewards: .*3\.0"):
        ALL[name][0](_rollout([1.0, 3, 0, 3, 2, 4, 5], GROUPS, TRAJECTORIES))


def test_scores_trajectory_in_two_groups_is_refused() -> None:
    with pytest.raises(DataError, match="trajectory 5 have different group ids: [12] and [12]"):
        mean_scores(_rollout([1.0, 1.0], groups=[1, 2], trajectories=[5, 5]))


@pytest.mark.parametrize("reward", [NAN, float("inf")])
def test_scores_reward_that_is_not_finite_is_refused(reward: float) -> None:
    with pytest.raises(DataError, match="trajectory 1 has the reward (nan|inf)"):
        mean_scores(_rollout([1.0, reward, reward], trajectories=[0, 1, 1]))
