"""Seconds per phase and the name of the place, with a clock that the test moves."""

from types import SimpleNamespace

import pytest

from slime_ppo.tracking.clock import CRITIC_FREE_PHASES, PHASES, SIDE_BY_SIDE_PHASES, RunClock, phase_metrics, run_phases


class Time:
    now = 1000.0


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    found = Time()
    monkeypatch.setattr("slime_ppo.tracking.clock.time", SimpleNamespace(perf_counter=lambda: found.now))
    return found


def test_phases_times_add_up_and_the_rest_is_other(time: Time) -> None:
    clock = RunClock()
    time.now += 50.0  # start-up counts for no rollout
    clock.start_rollout(0)
    for seconds in (2.0, 3.0):  # the same phase twice
        with clock.phase("generate"):
            time.now += seconds
        time.now += 0.25
    with clock.phase("values"):
        time.now += 4.0
    clock.add("wake", 0.125)
    found = clock.end_rollout()
    assert list(found) == [*PHASES, "other"]
    expected = dict.fromkeys(PHASES, 0.0) | {"generate": 5.0, "values": 4.0, "wake": 0.125, "other": 0.375}
    assert found == expected
    assert sum(found.values()) == 9.5


def test_rollout_counts_anew_with_the_save_and_the_report_that_delayed_it(time: Time) -> None:
    clock = RunClock()
    clock.start_rollout(0)
    with clock.phase("reward"):
        time.now += 2.0
    assert clock.end_rollout() == dict.fromkeys(PHASES, 0.0) | {"reward": 2.0, "other": 0.0}
    time.now += 0.5
    with clock.phase("save"):
        assert clock.where == "rollout 0, save"
        time.now += 4.0
    clock.start_rollout(1)
    with clock.phase("save"):
        time.now += 2.0
    assert clock.end_rollout() == dict.fromkeys(PHASES, 0.0) | {"save": 6.0, "other": 0.5}


def test_phases_changes_inside_a_phase_never_make_other_negative(time: Time) -> None:
    clock = RunClock()
    clock.start_rollout(0)
    with clock.phase("generate"):
        time.now += 1.0
        clock.add("wake", 1.0)
    assert clock.end_rollout()["other"] == 0.0


def test_where_names_rollout_and_phase_also_after_a_failure(time: Time) -> None:
    clock = RunClock()
    assert clock.where == "start-up"
    clock.add("wake", 1.0)  # a change of turns before the first rollout
    clock.start_rollout(3)
    assert clock.where == "rollout 3"
    with clock.phase("reward"):
        assert clock.where == "rollout 3, reward"
    assert clock.where == "rollout 3"
    with pytest.raises(ValueError, match="in a phase"), clock.phase("values"):
        raise ValueError("in a phase")
    assert clock.where == "rollout 3, values"


def test_both_train_is_the_time_until_the_first_has_ended_and_the_rest_is_the_others(time: Time) -> None:
    clock = RunClock(run_phases(has_critic=True, side_by_side=True))
    clock.start_rollout(2)
    for ends in ({"critic": 4.0, "actor": 1.0}, {"actor": 2.0, "critic": 0.5}):
        with clock.both_train() as ended:
            assert clock.where == "rollout 2, critic train beside actor train"
            for role, seconds in ends.items():
                time.now += seconds
                ended(role)
        assert clock.where == "rollout 2"
    found = clock.end_rollout()
    expected = dict.fromkeys(SIDE_BY_SIDE_PHASES, 0.0) | {"both train": 6.0, "actor train": 1.0, "critic train": 0.5, "other": 0.0}
    assert found == expected and list(found) == [*SIDE_BY_SIDE_PHASES, "other"]
    metrics = phase_metrics(found, 15.0)
    assert (metrics["perf/critic_train_time"], metrics["perf/actor_train_time"], metrics["perf/both_train_time"]) == (6.5, 7.0, 6.0)
    assert (metrics["perf/step_time"], metrics["perf/tokens_per_s"]) == (7.5, 2.0)


def test_both_train_names_the_place_after_a_failure(time: Time) -> None:
    clock = RunClock()
    clock.start_rollout(0)
    with pytest.raises(ValueError, match="of the critic"), clock.both_train():
        raise ValueError("of the critic")
    assert clock.where == "rollout 0, critic train beside actor train"


def test_run_phases_are_those_that_the_run_has() -> None:
    assert run_phases(has_critic=True, side_by_side=False) == PHASES
    assert run_phases(has_critic=True, side_by_side=True) == SIDE_BY_SIDE_PHASES
    assert sorted(SIDE_BY_SIDE_PHASES) == sorted([*PHASES, "both train"])
    for side_by_side in (False, True):
        assert run_phases(has_critic=False, side_by_side=side_by_side) == CRITIC_FREE_PHASES


def test_phase_metrics_name_every_phase_and_rate_the_whole() -> None:
    phases = {name: float(2**index) for index, name in enumerate([*PHASES, "other"])}
    assert phase_metrics(phases, 8190.0) == {
        "perf/rollout_time": 1.0,
        "perf/reward_time": 2.0,
        "perf/log_probs_time": 4.0,
        "perf/values_time": 8.0,
        "perf/critic_train_time": 16.0,
        "perf/actor_train_time": 32.0,
        "perf/update_weights_time": 64.0,
        "perf/wake_time": 128.0,
        "perf/offload_time": 256.0,
        "perf/eval_time": 512.0,
        "perf/save_time": 1024.0,
        "perf/other_time": 2048.0,
        "perf/step_time": 4095.0,
        "perf/tokens_per_s": 2.0,
    }


def test_phases_of_a_run_without_a_critic_are_its_own(time: Time) -> None:
    clock = RunClock(CRITIC_FREE_PHASES)
    clock.start_rollout(0)
    with clock.phase("advantages"):
        time.now += 2.0
    found = clock.end_rollout()
    assert found == dict.fromkeys(CRITIC_FREE_PHASES, 0.0) | {"advantages": 2.0, "other": 0.0}
    metrics = phase_metrics(found, 4.0)
    assert (metrics["perf/advantages_time"], metrics["perf/step_time"], metrics["perf/tokens_per_s"]) == (2.0, 2.0, 2.0)
    assert not [name for name in metrics if "critic" in name or "values" in name]
