"""Who is awake when: one tenant at a time, two during weight sync, and who sleeps first."""

from types import SimpleNamespace

import pytest

from slime_ppo.orchestration.turns import DeviceTurns


class Memory:
    """Tenants that share one device of 100 bytes; `most` is the largest use seen."""

    def __init__(self) -> None:
        self.used: dict[str, int] = {}
        self.most = 0
        self.clock = 0.0


class FakeTenant:
    """Takes 60 bytes and 2 s to wake, 0.5 s to offload."""

    def __init__(self, name: str, memory: Memory) -> None:
        self._name, self._memory = name, memory

    def wake(self) -> None:
        assert self._name not in self._memory.used, "woken twice"
        self._memory.used[self._name] = 60
        self._memory.most = max(self._memory.most, sum(self._memory.used.values()))
        self._memory.clock += 2.0

    def offload(self) -> None:
        del self._memory.used[self._name]
        self._memory.clock += 0.5

    def resident_bytes(self) -> int:
        self._memory.clock += 100.0  # asking is not part of the change
        return 60 if self._name in self._memory.used else 0


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    found = Memory()
    monkeypatch.setattr("slime_ppo.orchestration.turns.time", SimpleNamespace(perf_counter=lambda: found.clock))
    return found


def make_turns(memory: Memory, *, offload: bool = True) -> tuple[DeviceTurns, list[tuple[str, float]]]:
    times: list[tuple[str, float]] = []
    tenants = {name: FakeTenant(name, memory) for name in ("actor", "critic", "rollout")}
    return DeviceTurns(tenants, offload=offload, on_time=lambda verb, seconds: times.append((verb, seconds))), times


def test_take_offloads_the_last_one_before_it_wakes_the_next(memory: Memory) -> None:
    turns, _ = make_turns(memory)
    assert not turns.is_awake("actor")
    for name in ("actor", "critic", "rollout", "actor"):
        turns.take(name)
        assert memory.used == {name: 60}
        assert [tenant for tenant in ("actor", "critic", "rollout") if turns.is_awake(tenant)] == [name]
    assert memory.most == 60
    assert turns.events[:3] == [("wake", "actor"), ("offload", "actor"), ("wake", "critic")]


def test_take_of_who_is_awake_changes_nothing(memory: Memory) -> None:
    turns, _ = make_turns(memory)
    turns.take("actor")
    turns.take("actor")
    assert turns.events == [("wake", "actor")]


def test_together_wakes_two_after_the_third_sleeps_and_leaves_the_second(memory: Memory) -> None:
    turns, _ = make_turns(memory)
    turns.take("critic")
    with turns.together("actor", "rollout"):
        assert memory.used.keys() == {"actor", "rollout"}
        assert turns.is_awake("actor") and turns.is_awake("rollout")
    assert memory.used.keys() == {"rollout"}
    assert memory.most == 120
    assert turns.events[1:] == [("offload", "critic"), ("wake", "actor"), ("wake", "rollout"), ("offload", "actor")]


def test_together_one_of_the_two_awake_already_stays_awake(memory: Memory) -> None:
    turns, _ = make_turns(memory)
    turns.take("actor")
    with turns.together("actor", "rollout"):
        pass
    assert turns.events == [("wake", "actor"), ("wake", "rollout"), ("offload", "actor")]


def test_turns_without_offload_are_all_awake_from_the_start(memory: Memory) -> None:
    turns, times = make_turns(memory, offload=False)
    turns.take("actor")
    with turns.together("actor", "rollout"):
        pass
    assert all(turns.is_awake(name) for name in ("actor", "critic", "rollout"))
    assert turns.events == [] and times == []


def test_on_time_gets_the_seconds_of_each_change(memory: Memory) -> None:
    turns, times = make_turns(memory)
    turns.take("actor")
    turns.take("critic")
    assert times == [("wake", 2.0), ("offload", 0.5), ("wake", 2.0)]
