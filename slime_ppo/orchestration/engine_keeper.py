"""Keeps the rollout engine in service: the trainer's present weights in it, and what has died in it started again."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from slime_ppo.errors import RolloutError, WeightSyncError
from slime_ppo.orchestration.turns import DeviceTurns
from slime_ppo.rollout.engine import NO_VERSION, RolloutEngine
from slime_ppo.tracking.clock import RunClock
from slime_ppo.weight_sync.base import WeightSync

_log = logging.getLogger(__name__)

ROLLOUT = "rollout"
"""The engine's name among the tenants."""


@dataclass
class EngineKeeper:
    """Pushes weights, again after a failure, at most `attempts` times; an engine that was lost gets the last version again.

    An engine without weights, or with half of a push, answers nothing: it refuses to generate until a whole push has succeeded.
    """

    turns: DeviceTurns
    sync: WeightSync
    engine: RolloutEngine
    clock: RunClock
    attempts: int
    pushed_version: int = field(default=NO_VERSION, init=False)

    def connect(self) -> None:
        """Compare what the trainer has with what the engine expects, once."""
        self.sync.connect()

    def push(self, version: int) -> None:
        """The actor's weights into the engine as `version`; afterwards the engine alone is awake. Nothing happens when it has them.

        Raises WeightSyncError when `attempts` pushes have failed.
        """
        if self.turns.is_awake(ROLLOUT) and self.pushed_version == version:
            return
        if self._has_lost():
            self.turns.renew(ROLLOUT)
        for attempt in range(1, self.attempts + 1):
            self.pushed_version = NO_VERSION
            try:
                with self._turn_of_push(), self.clock.phase("weight sync"):
                    self.pushed_version = self.sync.push(version)
                return
            except WeightSyncError as error:
                if attempt == self.attempts:
                    raise
                _log.warning("push of weight version %d, attempt %d of %d, failed: %s", version, attempt, self.attempts, error)
                self.turns.renew(ROLLOUT)

    @contextmanager
    def _turn_of_push(self) -> Iterator[None]:
        """Actor and engine awake; the engine alone where nothing is trained, and its weights come from a folder."""
        if "actor" not in self.turns.tenants:
            self.turns.take(ROLLOUT)
            yield
            return
        with self.turns.together("actor", ROLLOUT):
            yield

    def _has_lost(self) -> bool:
        """Whether something died that must start anew, with the devices to itself: not beside the actor, in the sync's turn."""
        try:
            return self.engine.health().num_lost > 0
        except RolloutError as error:
            _log.warning("%s", error)
            return True

    def restore(self) -> bool:
        """Bring an engine that has lost its weights, because what it ran on died, back to the version it had. False when it has
        lost nothing: what it did not finish was aborted on purpose."""
        version = self.pushed_version
        if self.engine.weight_version() == version:
            return False
        _log.warning("the rollout engine was lost while it generated; starting it again with weight version %d", version)
        self.turns.renew(ROLLOUT)
        self.pushed_version = NO_VERSION
        self.push(version)
        return True
