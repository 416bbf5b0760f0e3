"""A clock that a test moves."""

from collections.abc import Callable
from typing import Any


class PlayedTime:
    """Stands for the module `time` of the run's clock: nothing takes long but what was made `slow`."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 1e-6
        return self.now

    def slow(self, method: Callable[..., None], *, seconds: float) -> Callable[..., None]:
        """The method, after which so much time has passed."""

        def late(*arguments: Any, **named: Any) -> None:
            method(*arguments, **named)
            self.now += seconds

        return late
