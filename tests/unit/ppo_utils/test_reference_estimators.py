"""The plain references themselves, against numbers worked out by hand: what the fast twins are compared with must not drift."""

import math

import pytest

from slime_ppo.ppo_utils import reference_estimators as reference
from slime_ppo.ppo_utils.off_policy_stats import CorrectionSettings
from slime_ppo.ppo_utils.reference_estimators import ReferenceOutcome

# rewards 1, 2 and 3 in group 0, the 3 in two parts; a 9 that does not count; a group of one
OUTCOMES = [
    ReferenceOutcome(1.0, 0, 10),
    ReferenceOutcome(3.0, 0, 12),
    ReferenceOutcome(2.0, 0, 11),
    ReferenceOutcome(3.0, 0, 12),
    ReferenceOutcome(9.0, 0, 13, counted=False),
    ReferenceOutcome(5.0, 1, 14),
]


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("grpo", [-1 / 1.000001, 1 / 1.000001, 0, 1 / 1.000001, 0, 0]),
        ("rloo", [-1.5, 1.5, 0, 1.5, 0, 0]),
        ("reinforce_plus_plus_baseline", [-1, 1, 0, 1, 0, 0]),
    ],
)
def test_critic_free_advantages_match_hand_values_at_every_token(estimator: str, expected: list[float]) -> None:
    found = reference.critic_free_advantages(estimator, OUTCOMES, [[0.0, 0.0]] * 6, gamma=1.0)
    assert found == [pytest.approx([score, score], rel=1e-12, abs=1e-12) for score in expected]


def test_critic_free_advantages_without_std_are_distances_to_the_mean() -> None:
    found = reference.critic_free_advantages("grpo", OUTCOMES[:2], [[0.0], [0.0]], gamma=1.0, std_normalization=False)
    assert found == [[-1.0], [1.0]]


def test_critic_free_advantages_reinforce_plus_plus_sums_what_is_to_come() -> None:
    rewards = [[1.0, 2.0, 4.0], [], [8.0], [1.0], [5.0], [1.0]]
    found = reference.critic_free_advantages("reinforce_plus_plus", OUTCOMES, rewards, gamma=0.5)
    assert found == [[3.0, 4.0, 4.0], [], [8.0], [1.0], [0.0], [1.0]]


def test_critic_free_advantages_unknown_name_is_an_error() -> None:
    with pytest.raises(AssertionError, match="gae"):
        reference.critic_free_advantages("gae", OUTCOMES[:1], [[0.0]], gamma=1.0)


def test_correction_weights_match_hand_values() -> None:
    old, rollout = [math.log(2.0), math.log(0.25)], [0.0, 0.0]
    tis, icepop = CorrectionSettings("tis", cap=1.5), CorrectionSettings("icepop", "sequence", low=0.4, high=2.0)
    assert reference.correction_weights(old, rollout, tis) == pytest.approx([1.5, 0.25])
    assert reference.correction_weights(old, rollout, icepop) == pytest.approx([0.5, 0.5])
    assert reference.correction_weights(old, rollout, CorrectionSettings("icepop", low=0.4, high=2.1)) == pytest.approx([2.0, 0.0])
    assert reference.correction_weights(old, rollout, CorrectionSettings()) == [1.0, 1.0]


def test_is_rejected_matches_hand_values() -> None:
    old, rollout = [math.log(2.0), math.log(2.0)], [0.0, 0.0]
    product = CorrectionSettings(rejection="sequence", rejection_high=3.0)
    mean = CorrectionSettings("tis", cap=9.0, rejection="geometric", rejection_high=3.0)
    assert reference.is_rejected(old, rollout, product) and not reference.is_rejected(old, rollout, mean)
    assert reference.correction_weights(old, rollout, product) == [0.0, 0.0]
    assert reference.correction_weights(old, rollout, mean) == pytest.approx([2.0, 2.0])
    assert not reference.is_rejected([], [], CorrectionSettings(rejection="geometric", rejection_low=2.0))


def test_mismatch_figures_match_hand_values() -> None:
    found = reference.mismatch_figures([math.log(2.0), 0.0], [0.0, 0.0])
    half = math.log(2.0) / 2
    assert found == pytest.approx((half, 2 * half, 0.5 - half, 9 / 10))
    assert reference.mismatch_figures([], []) == (0, 0, 0, 1)


def test_overlong_penalty_and_informative_groups_match_hand_values() -> None:
    numbers = {"max_len": 10, "buffer_len": 4, "factor": 2.0}
    assert [reference.overlong_penalty(n, **numbers) for n in (6, 7, 10, 11)] == [0.0, -0.5, -2.0, -2.0]
    assert [reference.is_informative(one, OUTCOMES) for one in OUTCOMES] == [True] * 5 + [False]
