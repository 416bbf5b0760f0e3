"""The learning rate against hand-computed values."""

import pytest

from slime_ppo.errors import ConfigError
from slime_ppo.ppo_utils.lr_schedule import learning_rate


@pytest.mark.parametrize(
    ("style", "step", "expected"),
    [
        ("constant", 0, 0.25),
        ("constant", 3, 1.0),
        ("constant", 500, 1.0),
        ("linear", 1, 0.5),
        ("linear", 4, 1.0),
        ("linear", 9, 0.55),
        ("linear", 14, 0.1),
        ("linear", 99, 0.1),
        ("cosine", 4, 1.0),
        ("cosine", 9, 0.55),
        ("cosine", 14, 0.1),
    ],
)
def test_learning_rate_matches_hand_value(style: str, step: int, expected: float) -> None:
    found = learning_rate(step, lr=1.0, min_lr=0.1, warmup_iters=4, decay_iters=14, decay_style=style)
    assert found == pytest.approx(expected, rel=1e-12)


def test_learning_rate_without_warmup_starts_at_lr() -> None:
    assert learning_rate(0, lr=2.0, min_lr=0.0, warmup_iters=0, decay_iters=10, decay_style="linear") == 2.0


def test_learning_rate_negative_step_is_refused() -> None:
    with pytest.raises(ConfigError, match="-1"):
        learning_rate(-1, lr=1.0, min_lr=0.0, warmup_iters=0, decay_iters=1, decay_style="constant")
