"""Checks of the correction settings, and merged mismatch figures by hand."""

import math

import pytest

from slime_ppo.errors import ConfigError
from slime_ppo.ppo_utils.off_policy_stats import CorrectionSettings, Mismatch


@pytest.mark.parametrize(
    ("wrong", "flag"),
    [
        ({"mode": "vtrace"}, "--rollout-correction is 'vtrace'; expected one of none, tis, icepop"),
        ({"level": "geometric"}, "--rollout-correction-level is 'geometric'; expected one of token, sequence"),
        ({"rejection": "token"}, "--rollout-rejection is 'token'; expected one of none, sequence, geometric"),
        ({"mode": "tis"}, "cap None.*--rollout-correction-cap"),
        ({"mode": "tis", "cap": 0.0}, r"cap 0\.0.*--rollout-correction-cap"),
        ({"mode": "tis", "cap": math.nan}, "cap nan.*--rollout-correction-cap"),
        ({"mode": "icepop"}, "neither --rollout-correction-low nor --rollout-correction-high"),
        ({"mode": "icepop", "low": 2.0, "high": 0.5}, r"\[2\.0, 0\.5\]; expected low < high \(--rollout-correction-low"),
        ({"mode": "icepop", "low": 1.0, "high": 1.0}, "expected low < high"),
        ({"mode": "icepop", "low": -0.1, "high": 2.0}, r"\[-0\.1, 2\.0\].*--rollout-correction-low, --rollout-correction-high"),
        ({"mode": "icepop", "low": 0.5, "high": math.inf}, "expected finite numbers"),
        ({"mode": "icepop", "high": math.nan}, "expected finite numbers"),
        ({"rejection": "sequence"}, "neither --rollout-rejection-low nor --rollout-rejection-high"),
        ({"rejection": "geometric", "rejection_low": 1.0, "rejection_high": 0.9}, r"low < high \(--rollout-rejection-low"),
        ({"rejection": "geometric", "rejection_high": 0.0}, "the upper > 0"),
    ],
)
def test_correction_settings_wrong_value_is_refused_with_its_flag(wrong: dict[str, object], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        CorrectionSettings(**wrong)


def test_correction_settings_bounds_of_other_modes_are_not_looked_at() -> None:
    assert CorrectionSettings(cap=-1.0, low=3.0, high=2.0, rejection_low=-1.0).mode == "none"
    assert CorrectionSettings("icepop", low=0.0).high is None


def test_mismatch_merge_adds_sums_and_keeps_the_larger_maximum() -> None:
    one, other = Mismatch(2, 3.0, 2.0, 0.5, 4.0, 10.0), Mismatch(1, 6.0, 6.0, 1.0, 1.0, 1.0)
    both = one.merge(other)
    assert both == Mismatch(3, 9.0, 6.0, 1.5, 5.0, 11.0) == other.merge(one)
    assert (both.mean_abs, both.k3, both.ratio_mean, both.ess) == (3.0, 0.5, 5 / 3, 25 / 33)


def test_mismatch_without_tokens_has_no_nan() -> None:
    none = Mismatch()
    assert (none.mean_abs, none.max_abs, none.k3, none.ratio_mean, none.ess) == (0, 0, 0, 1, 1)
    assert none.merge(none) == none
