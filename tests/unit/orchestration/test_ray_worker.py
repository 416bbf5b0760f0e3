"""What a rank's process hands to the role it was started as; no process is started."""

from typing import Any

import pytest

from slime_ppo.orchestration.rank_role import RankRole
from slime_ppo.orchestration.ray_worker import RankProcess


class Role:
    def __init__(self) -> None:
        self.asked: list[tuple[object, float]] = []

    def compute_advantages(self, batch: object, kl_coef: float) -> tuple[str, str]:
        self.asked.append((batch, kl_coef))
        return "part", "stats"


class Batch:
    def with_parts(self, parts: tuple[object, ...]) -> tuple[object, ...]:
        return ("whole", *parts)


def rank_process(started: Role | None) -> Any:
    process: Any = RankProcess.__new__(RankProcess)
    process._rank = RankRole()
    process._rank._started = process._rank._judge = started
    return process


def test_compute_advantages_is_asked_of_the_role_that_the_process_has() -> None:
    asked = Role()
    process = rank_process(asked)
    assert process.compute_advantages(0.25, Batch(), "log-probs") == ("part", "stats")
    assert asked.asked == [(("whole", "log-probs"), 0.25)]


def test_compute_advantages_of_a_process_that_is_no_role_yet_is_an_error() -> None:
    process = rank_process(None)
    with pytest.raises(RuntimeError, match="has not been started"):
        process.compute_advantages(0.25, Batch())
