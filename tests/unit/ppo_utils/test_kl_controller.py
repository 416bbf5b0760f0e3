"""The KL controller and its measurement, against hand-computed values."""

import pytest

from slime_ppo.errors import ConfigError, DataError, NumericsError
from slime_ppo.ppo_utils import reference
from slime_ppo.ppo_utils.kl_controller import AdaptiveKL, FixedKL, measure_kl
from slime_ppo.ppo_utils.reference_types import ReferenceSettings


def test_measure_kl_sums_parts_of_a_trajectory_and_leaves_out_empty_ones() -> None:
    # trajectory 5 = samples 0 and 2 (sum 1 + 3 = 4), trajectory 6 = 2, trajectory 7 has no trainable token
    measured = measure_kl([1.0, 2.0, 3.0, 99.0], [2, 4, 2, 0], [5, 6, 5, 7])
    assert (measured.per_trajectory, measured.per_token, measured.num_trajectories) == (3.0, 0.75, 2)


def test_measure_kl_without_any_trainable_token_is_zero() -> None:
    measured = measure_kl([5.0], [0], [1])
    assert (measured.per_trajectory, measured.per_token, measured.num_trajectories) == (0.0, 0.0, 0)


def test_measure_kl_nan_of_a_sample_that_leaves_is_not_looked_at() -> None:
    assert measure_kl([float("nan"), 2.0], [0, 4], [1, 2]).per_trajectory == 2.0


def test_measure_kl_negative_count_is_refused() -> None:
    with pytest.raises(DataError, match="trajectory 3 has -1 trainable tokens"):
        measure_kl([1.0], [-1], [3])


@pytest.mark.parametrize(
    ("kl", "n", "expected"),
    [
        (1.1, 50, 0.1 * (1 + 0.1 * 0.5)),
        (9.0, 50, 0.1 * (1 + 0.2 * 0.5)),
        (0.0, 50, 0.1 * (1 - 0.2 * 0.5)),
        (9.0, 1000, 0.1 * 1.2),
        (9.0, 0, 0.1),
    ],
)
def test_adaptive_update_matches_hand_value(kl: float, n: int, expected: float) -> None:
    assert AdaptiveKL(beta=0.1, target=1.0, horizon=100).update(kl, n).beta == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("kl", [0.0, 0.5, 0.9, 1.15, 7.0])
@pytest.mark.parametrize("n", [0, 30, 100, 400])
def test_adaptive_update_equals_the_reference_twin(kl: float, n: int) -> None:
    twin = reference.next_kl_coef(kl, n, ReferenceSettings(vocab_size=1, kl_coef=0.1, kl_target=1.0, kl_horizon=100))
    assert AdaptiveKL(beta=0.1, target=1.0, horizon=100).update(kl, n).beta == pytest.approx(twin, rel=1e-12)


def test_fixed_update_never_changes_beta() -> None:
    assert FixedKL(0.3).update(100.0, 10).beta == 0.3


def test_adaptive_bad_settings_or_measurement_are_refused() -> None:
    with pytest.raises(ConfigError, match="target is 0"):
        AdaptiveKL(0.1, 0.0, 10)
    with pytest.raises(ConfigError, match="horizon is -1"):
        AdaptiveKL(0.1, 1.0, -1)
    with pytest.raises(ConfigError, match="horizon is 0"):
        AdaptiveKL(0.1, 1.0, 0)
    with pytest.raises(NumericsError, match="nan"):
        AdaptiveKL(0.1, 1.0, 10).update(float("nan"), 5)
