from collections.abc import Sequence
from dataclasses import replace

import pytest

from slime_ppo.errors import DataError
from slime_ppo.tracking.base import RolloutRecord, RunInfo, SampleRecord, TrackerSet
from slime_ppo.tracking.rollout_metrics import training_metrics
from slime_ppo.types.stats import Stats


class RecordingTracker:
    def __init__(self, name: str, calls: list[str]) -> None:
        self._name = name
        self._calls = calls

    def start(self, run: RunInfo) -> None:
        self._calls.append(f"{self._name} start {run.title}")

    def log(self, record: RolloutRecord) -> None:
        self._calls.append(f"{self._name} log {record.rollout_id}")

    def log_table(self, rollout_id: int, samples: Sequence[SampleRecord]) -> None:
        self._calls.append(f"{self._name} table {rollout_id} {len(samples)}")

    def close(self) -> None:
        self._calls.append(f"{self._name} close")


class FailingTracker:
    def start(self, run: RunInfo) -> None:
        raise OSError("no start")

    def log(self, record: RolloutRecord) -> None:
        raise OSError("no log")

    def log_table(self, rollout_id: int, samples: Sequence[SampleRecord]) -> None:
        raise OSError("no table")

    def close(self) -> None:
        raise OSError("no close")


def test_tracker_set_hands_every_call_to_every_tracker_in_order(
    run: RunInfo, records: tuple[RolloutRecord, ...], samples: tuple[SampleRecord, ...]
) -> None:
    calls: list[str] = []
    trackers = TrackerSet([RecordingTracker("a", calls), RecordingTracker("b", calls)])
    trackers.start(run)
    trackers.log(records[2])
    trackers.log_table(2, samples[:1])
    trackers.close()
    each = ["start A small run", "log 2", "table 2 1", "close"]
    assert calls == [f"{name} {call}" for call in each for name in ("a", "b")]


def test_tracker_set_when_one_fails_the_others_get_the_call_and_the_failure_is_raised(
    records: tuple[RolloutRecord, ...],
) -> None:
    calls: list[str] = []
    trackers = TrackerSet([FailingTracker(), RecordingTracker("b", calls)])
    with pytest.raises(OSError, match="no log"):
        trackers.log(records[2])
    with pytest.raises(OSError, match="no table"):
        trackers.log_table(2, ())
    with pytest.raises(OSError, match="no close"):
        trackers.close()
    assert calls == ["b log 2", "b table 2 0", "b close"]


def test_tracker_set_when_one_does_not_start_the_ones_after_it_are_not_started(run: RunInfo) -> None:
    calls: list[str] = []
    with pytest.raises(OSError, match="no start"):
        TrackerSet([RecordingTracker("a", calls), FailingTracker(), RecordingTracker("b", calls)]).start(run)
    assert calls == ["a start A small run"]


def test_critic_only_is_told_from_the_roles_that_had_a_turn(records: tuple[RolloutRecord, ...]) -> None:
    assert [record.critic_only for record in records] == [True, False, False, False]
    all_skipped = RolloutRecord(5, {"train/critic-skipped_steps": 0.0, "train/skipped_steps": 2.0}, (), {})
    assert not all_skipped.critic_only
    assert not RolloutRecord(5, {"rollout/raw_reward": 0.1, "train/num_dropped": 0.0}, (), {}).critic_only


def test_critic_only_agrees_with_the_metrics_that_training_reports() -> None:
    step = Stats(sums={"skipped": 1.0})
    of_plan = {"train/num_dropped": 0.0}
    assert RolloutRecord(5, training_metrics([], [step]) | of_plan, (), {}).critic_only
    assert not RolloutRecord(5, training_metrics([step], [step]) | of_plan, (), {}).critic_only


def test_sample_record_with_a_column_of_another_length_names_sample_and_column(samples: tuple[SampleRecord, ...]) -> None:
    with pytest.raises(DataError, match="values of logged sample 10 of rollout 1 has 2 entries, expected 4"):
        replace(samples[1], values=(0.1, 0.2))
