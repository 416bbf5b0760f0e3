import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from slime_ppo.config.tracking import TrackingConfig
from slime_ppo.errors import ConfigError
from slime_ppo.tracking.base import RolloutRecord, RunInfo
from slime_ppo.tracking.jsonl import METRICS_FILE, JsonlTracker, read_records
from slime_ppo.tracking.trackers import build_trackers


class RefusingWandb(ModuleType):
    """A package that takes no run."""

    def __init__(self) -> None:
        super().__init__("wandb")

    def init(self, **_: Any) -> None:
        raise RuntimeError("No API key configured. Use `wandb login` to log in.\nmore lines")


def write_metrics(run: RunInfo, records: tuple[RolloutRecord, ...]) -> None:
    tracker = JsonlTracker()
    tracker.start(run)
    for record in records:
        tracker.log(record)
    tracker.close()


@pytest.mark.parametrize(
    ("config", "module", "flag"),
    [
        (TrackingConfig(use_tensorboard=True), "tensorboard.summary", "--use-tensorboard"),
        (TrackingConfig(use_wandb=True), "wandb", "--use-wandb"),
    ],
)
def test_build_trackers_package_missing_is_a_config_error_before_any_start(
    config: TrackingConfig, module: str, flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=f"{flag} needs the package"):
        build_trackers(config)
    build_trackers(TrackingConfig())  # nobody else needs it


def test_build_trackers_when_wandb_does_not_start_old_metrics_are_still_there(
    run: RunInfo, records: tuple[RolloutRecord, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", RefusingWandb())
    write_metrics(run, records)
    trackers = build_trackers(TrackingConfig(use_wandb=True))
    with pytest.raises(ConfigError, match="No API key configured"):
        trackers.start(run)
    trackers.close()
    assert read_records(run.run_dir) == records


def test_build_trackers_with_tensorboard_writes_metrics_and_events(run: RunInfo, records: tuple[RolloutRecord, ...]) -> None:
    trackers = build_trackers(TrackingConfig(use_tensorboard=True))
    folder = Path(run.run_dir)
    assert not any(folder.iterdir())
    trackers.start(run)
    trackers.log(records[1])
    trackers.close()
    assert (folder / METRICS_FILE).stat().st_size > 0
    assert list((folder / "tensorboard").glob("events.*"))
