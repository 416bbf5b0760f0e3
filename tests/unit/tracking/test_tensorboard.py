import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from slime_ppo.errors import ConfigError
from slime_ppo.tracking.base import RolloutRecord, RunInfo, TrackerSet
from slime_ppo.tracking.jsonl import JsonlTracker
from slime_ppo.tracking.tensorboard import TensorBoardTracker


def read_scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder))
    events.Reload()
    # this writer stores scalars as tensors, as TensorFlow 2 does
    tags = events.Tags()["tensors"]
    return {tag: [(event.step, float(event.tensor_proto.float_val[0])) for event in events.Tensors(tag)] for tag in tags}


def test_tensorboard_events_read_back_at_rollout_and_step_numbers(run: RunInfo, records: tuple[RolloutRecord, ...]) -> None:
    tracker = TensorBoardTracker()
    tracker.start(run)
    for record in records[:2]:
        tracker.log(record)
    tracker.close()
    found = read_scalars(run.run_dir / "tensorboard")
    assert found["rollout/raw_reward"] == [(0, pytest.approx(0.25)), (1, pytest.approx(0.268))]
    assert found["train/pg_loss"] == [(1, pytest.approx(-0.0031))]
    assert found["step/value_loss"] == [(0, pytest.approx(0.092)), (1, pytest.approx(0.092))]
    assert set(found) == set(records[0].metrics) | set(records[1].metrics) | {f"step/{name}" for name in records[1].steps[0]} - {
        "step/step"
    }


def test_tensorboard_of_a_resumed_run_has_every_rollout_once(run: RunInfo, records: tuple[RolloutRecord, ...]) -> None:
    """The interrupted run had come to rollout 2, its checkpoint only to the end of rollout 0."""
    for start, logged in ((0, records[:3]), (1, records[1:4])):
        trackers = TrackerSet([TensorBoardTracker(), JsonlTracker()])
        trackers.start(replace(run, start_rollout=start))
        for record in logged:
            trackers.log(record)
        trackers.close()
    found = read_scalars(run.run_dir / "tensorboard")
    assert [step for step, _ in found["rollout/raw_reward"]] == [0, 1, 2, 3]
    assert [step for step, _ in found["step/value_loss"]] == [int(step["step"]) for one in records for step in one.steps]


def test_tensorboard_metric_that_is_nan_is_kept_as_nan(run: RunInfo) -> None:
    tracker = TensorBoardTracker()
    tracker.start(run)
    tracker.log(RolloutRecord(7, {"train/loss": math.nan}, (), {}))
    tracker.close()
    ((step, value),) = read_scalars(run.run_dir / "tensorboard")["train/loss"]
    assert step == 7 and math.isnan(value)


def test_tensorboard_package_missing_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.summary", None)
    with pytest.raises(ConfigError, match="--use-tensorboard needs the package tensorboard.*pip install tensorboard"):
        TensorBoardTracker()


def test_trackers_import_no_torch_in_the_driver(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from slime_ppo.tracking import base, console, jsonl, report, tensorboard, wandb\n"
        f"tensorboard.TensorBoardTracker().start(base.RunInfo('t', Path({str(tmp_path)!r}), 1, '', ()))\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, cwd=Path(__file__).parents[3]).returncode == 0
