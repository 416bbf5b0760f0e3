"""Defaults of section correction, and that the mathematics takes what comes out."""

from typing import Any

import pytest

from slime_ppo.config.correction import CorrectionConfig
from slime_ppo.ppo_utils.off_policy_stats import CorrectionSettings


def bounds(config: CorrectionConfig) -> tuple[float | None, ...]:
    return config.cap, config.low, config.high, config.rejection_low, config.rejection_high


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (None, None, None, None, None)),
        ({"mode": "tis"}, (2.0, None, None, None, None)),
        ({"mode": "tis", "cap": 5.0}, (5.0, None, None, None, None)),
        ({"mode": "icepop"}, (None, 0.5, 5.0, None, None)),
        ({"mode": "icepop", "low": 0.0, "high": 3.0}, (None, 0.0, 3.0, None, None)),
        ({"rejection": "sequence"}, (None, None, None, 0.5, 2.0)),
        ({"rejection": "geometric"}, (None, None, None, 0.999, 1.001)),
        ({"rejection": "geometric", "rejection_high": 1.01}, (None, None, None, 0.999, 1.01)),
        ({"mode": "tis", "rejection": "sequence"}, (2.0, None, None, 0.5, 2.0)),
        # what the mode does not use does not reach the ranks
        ({"mode": "tis", "low": 0.1, "high": 9.0, "rejection_low": 0.2}, (2.0, None, None, None, None)),
        ({"cap": 3.0}, (None, None, None, None, None)),
    ],
)
def test_resolved_has_a_number_for_every_bound_in_use_and_none_for_the_others(
    given: dict[str, Any], expected: tuple[float | None, ...]
) -> None:
    config = CorrectionConfig(**given)
    assert bounds(config.resolved) == expected
    assert config.resolved.resolved == config.resolved
    CorrectionSettings(config.mode, config.level, *expected[:3], config.rejection, *expected[3:])  # accepts them


def test_active_is_true_for_weights_and_for_rejection() -> None:
    assert [CorrectionConfig(**given).active for given in ({}, {"mode": "icepop"}, {"rejection": "geometric"})] == [
        False,
        True,
        True,
    ]
