"""Weights into the engine, and an engine that died back into service; on shared devices each step alone on them."""

from collections.abc import Callable

import pytest

from slime_ppo.errors import WeightSyncError
from slime_ppo.orchestration.engine_keeper import EngineKeeper
from slime_ppo.orchestration.turns import DeviceTurns
from slime_ppo.rollout.engine import NO_VERSION
from slime_ppo.tracking.clock import RunClock
from tests.helpers.trainer_parts import RecordingRole, RolloutTenant, ScriptedEngine


class FailingSync:
    """Fails the first `failures` pushes, after the engine has lost its version."""

    def __init__(self, journal: list[str], engine: ScriptedEngine, failures: int) -> None:
        self._journal, self._engine, self._failures = journal, engine, failures

    def connect(self) -> None: ...

    def push(self, version: int) -> int:
        self._engine.version = NO_VERSION
        if self._failures:
            self._failures -= 1
            self._journal.append("push fails")
            raise WeightSyncError("server gone")
        self._journal.append(f"push {version}")
        self._engine.version = version
        return version

    def close(self) -> None: ...


def _keeper(*, failures: int = 0, attempts: int = 3, offload: bool = True) -> tuple[EngineKeeper, list[str], ScriptedEngine]:
    journal: list[str] = []
    engine = ScriptedEngine(journal)
    tenants = {"actor": RecordingRole("actor", journal), "rollout": RolloutTenant(journal)}
    clock = RunClock()
    clock.start_rollout(0)
    turns = DeviceTurns(tenants, offload=offload, on_time=clock.add)
    return EngineKeeper(turns, FailingSync(journal, engine, failures), engine, clock, attempts), journal, engine


def test_push_leaves_the_engine_alone_awake_and_is_not_repeated() -> None:
    keeper, journal, _ = _keeper()
    keeper.push(4)
    keeper.push(4)
    assert journal == ["wake actor", "wake rollout", "push 4", "offload actor"]


def test_push_that_fails_starts_the_engine_alone_on_the_devices_and_pushes_again() -> None:
    keeper, journal, _ = _keeper(failures=1)
    keeper.push(4)
    assert journal == [
        *("wake actor", "wake rollout", "push fails"),
        *("offload actor", "offload rollout", "wake rollout"),
        *("wake actor", "push 4", "offload actor"),
    ]
    assert keeper.pushed_version == 4


def test_push_that_fails_every_time_raises_and_leaves_no_version() -> None:
    keeper, journal, engine = _keeper(attempts=2)
    keeper.push(3)
    keeper.sync = FailingSync(journal, engine, failures=3)
    with pytest.raises(WeightSyncError, match="server gone"):
        keeper.push(4)
    assert journal.count("push fails") == 2
    assert keeper.pushed_version == NO_VERSION


@pytest.mark.parametrize("offload", [True, False])
def test_restore_of_a_lost_engine_starts_it_and_pushes_the_version_it_had(offload: bool) -> None:
    keeper, journal, engine = _keeper(offload=offload)
    keeper.push(4)
    engine.version = NO_VERSION
    del journal[:]
    assert keeper.restore()
    shared = ["offload rollout", "wake rollout", "wake actor", "push 4", "offload actor"]
    assert journal == (shared if offload else ["offload rollout", "wake rollout", "push 4"])
    assert engine.version == 4


def test_restore_of_an_engine_that_was_not_lost_does_nothing() -> None:
    keeper, journal, _ = _keeper()
    keeper.push(4)
    del journal[:]
    assert not keeper.restore()
    assert journal == []


def test_restore_inside_generation_is_not_counted_as_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour of restart within two hours of the phase: the phases add up to the rollout's time."""
    now = [0.0]
    monkeypatch.setattr("slime_ppo.tracking.clock.time.perf_counter", lambda: now[0])
    monkeypatch.setattr("slime_ppo.orchestration.turns.time.perf_counter", lambda: now[0])
    keeper, _, engine = _keeper()
    keeper.push(4)
    tenant = keeper.turns.tenants["rollout"]
    slow: Callable[[], None] = lambda: now.__setitem__(0, now[0] + 3600)  # noqa: E731
    monkeypatch.setattr(tenant, "wake", slow)
    keeper.clock.end_rollout()
    keeper.clock.start_rollout(1)
    with keeper.clock.phase("generate"):
        now[0] += 1800
        engine.version = NO_VERSION
        keeper.restore()
        assert keeper.clock.where == "rollout 1, generate"
        now[0] += 1800
    phases = keeper.clock.end_rollout()
    assert (phases["generate"], phases["wake"], phases["other"]) == (3600, 3600, 0)


@pytest.mark.parametrize("num_lost", [1, 2])
def test_push_to_an_engine_that_lost_servers_asleep_starts_them_before_the_actor_takes_memory(num_lost: int) -> None:
    keeper, journal, engine = _keeper()
    keeper.turns.take("actor")
    engine.num_lost = num_lost
    del journal[:]
    keeper.push(4)
    assert journal == ["offload actor", "offload rollout", "wake rollout", "wake actor", "push 4", "offload actor"]


def test_push_without_an_actor_wakes_the_engine_alone() -> None:
    keeper, journal, _ = _keeper()
    del keeper.turns.tenants["actor"]  # type: ignore[attr-defined]
    keeper.push(0)
    keeper.push(0)
    assert journal == ["wake rollout", "push 0"]
