"""The four loss reductions against hand-computed weights."""

import numpy as np
import pytest

from slime_ppo.errors import ConfigError, DataError
from slime_ppo.ppo_utils.denominator import make_denominator

# trajectory 5 = samples 0 and 2 (2 + 6 tokens), 6 = sample 1 (2 tokens), 7 = sample 3 (none)
TOKENS, TRAJECTORIES = [2, 2, 6, 0], [5, 6, 5, 7]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", [1 / 10, 1 / 10, 1 / 10, 0]),
        ("seq-mean-token-mean", [1 / 16, 1 / 4, 1 / 16, 0]),
        ("seq-mean-token-sum", [1 / 2, 1 / 2, 1 / 2, 0]),
        ("seq-mean-token-sum-norm", [1 / 8, 1 / 8, 1 / 8, 0]),
    ],
)
def test_make_denominator_matches_hand_weights(mode: str, expected: list[float]) -> None:
    found = make_denominator(TOKENS, np.array(TRAJECTORIES), mode=mode, length_norm=4.0)
    assert found.sample_weights.tolist() == pytest.approx(expected, rel=1e-15)
    assert (found.num_tokens, found.num_trajectories, found.mode) == (10, 2, mode)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_make_denominator_step_without_trainable_tokens_is_empty(mode: str) -> None:
    assert make_denominator([0, 0], [1, 2], mode=mode).is_empty
    assert make_denominator([0, 0], [1, 2], mode=mode).sample_weights.tolist() == [0, 0]
    assert make_denominator([], [], mode=mode).is_empty


def test_select_keeps_the_figures_of_the_step_and_the_weights_of_its_rows() -> None:
    whole = make_denominator(TOKENS, TRAJECTORIES, mode="seq-mean-token-mean")
    part = whole.select([2, 1])
    assert part.sample_weights.tolist() == [1 / 16, 1 / 4]
    assert (part.num_tokens, part.num_trajectories, part.mode) == (10, 2, "seq-mean-token-mean")
    assert whole.select(np.array([], np.int64)).sample_weights.shape == (0,) and whole.select([]).sample_weights.shape == (0,)
    assert not part.is_empty


def test_metrics_say_what_the_losses_were_divided_by() -> None:
    found = make_denominator(TOKENS, TRAJECTORIES, mode="token-mean").select([0]).metrics()
    assert found == {"denominator_tokens": 10.0, "denominator_trajectories": 2.0, "denominator_token-mean": 1.0}


@pytest.mark.parametrize("length_norm", [None, 0.0])
def test_make_denominator_norm_missing_is_refused(length_norm: float | None) -> None:
    with pytest.raises(ConfigError, match="--loss-length-norm"):
        make_denominator([1], [1], mode="seq-mean-token-sum-norm", length_norm=length_norm)


def test_make_denominator_bad_counts_or_mode_are_refused() -> None:
    with pytest.raises(DataError, match="one trajectory id per sample"):
        make_denominator([1, 2], [1], mode="token-mean")
    with pytest.raises(DataError, match="-3 trainable tokens"):
        make_denominator([1, -3], [1, 2], mode="token-mean")
    with pytest.raises(ConfigError, match="token-mean, seq-mean-token-mean"):
        make_denominator([1], [1], mode="mean")
