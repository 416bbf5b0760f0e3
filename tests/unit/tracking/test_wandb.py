import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import pytest

from slime_ppo.errors import ConfigError
from slime_ppo.tracking.base import RolloutRecord, RunInfo, SampleRecord
from slime_ppo.tracking.wandb import WandbTracker


class FakeRun:
    def __init__(self) -> None:
        self.axes: list[tuple[str, str]] = []
        self.logged: list[dict[str, Any]] = []
        self.finished = 0

    def define_metric(self, name: str, *, step_metric: str) -> None:
        self.axes.append((name, step_metric))

    def log(self, values: dict[str, Any]) -> None:
        self.logged.append(values)

    def finish(self) -> None:
        self.finished += 1


class FakeWandb(ModuleType):
    """The part of the package that the tracker calls."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.run = FakeRun()
        self.settings: dict[str, Any] = {}

    def init(self, **settings: Any) -> FakeRun:
        self.settings = settings
        return self.run

    def Table(self, *, columns: list[str], data: list[list[Any]]) -> tuple[list[str], list[list[Any]]]:
        return columns, data


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    module = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_wandb_run_gets_the_config_the_axes_and_every_metric(
    fake: FakeWandb, run: RunInfo, records: tuple[RolloutRecord, ...]
) -> None:
    tracker = WandbTracker(project="p", group=None, mode="offline")
    tracker.start(run)
    tracker.log(records[1])
    tracker.close()
    tracker.close()
    assert fake.settings["config"] == {"ppo": {"gamma": 1.0}}
    assert (fake.settings["project"], fake.settings["mode"], fake.settings["dir"]) == ("p", "offline", str(run.run_dir))
    assert fake.run.axes == [("*", "rollout_id"), ("step/*", "step/step")]
    step, rollout = fake.run.logged
    assert step["step/step"] == 1.0 and step["step/pg_loss"] == -0.0031
    assert rollout == {"rollout_id": 1, **records[1].metrics}
    assert fake.run.finished == 1


@pytest.mark.parametrize(("mode", "resume"), [("online", "allow"), ("offline", None)])
def test_wandb_run_goes_on_under_the_id_of_before(
    fake: FakeWandb, run: RunInfo, mode: Literal["online", "offline"], resume: str | None
) -> None:
    WandbTracker(project="p", group=None, mode=mode).start(replace(run, run_id="abc", start_rollout=2))
    assert (fake.settings["id"], fake.settings["resume"]) == ("abc", resume)


def test_wandb_samples_are_one_table_per_rollout(fake: FakeWandb, run: RunInfo, samples: tuple[SampleRecord, ...]) -> None:
    tracker = WandbTracker(project="p", group=None, mode="offline")
    tracker.start(run)
    tracker.log_table(3, samples[3:])
    columns, rows = fake.run.logged[0]["samples"]
    assert dict(zip(columns, rows[1], strict=True)) == {
        "rollout_id": 3,
        "sample_id": 900,
        "kind": "eval",
        "data_set": "math",
        "prompt": "He had",
        "response": " won",
        "reward": 0.57,
        "finish": "stop",
    }


def test_wandb_package_missing_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="--use-wandb needs the package wandb.*pip install wandb"):
        WandbTracker(project="p", group=None, mode="online")


@pytest.mark.parametrize(
    ("mode", "advice"),
    [
        ("online", "Run `wandb login` or set WANDB_API_KEY, or use --wandb-mode offline, which needs neither key nor network."),
        ("offline", "Leave --use-wandb out; metrics.jsonl and report.html do not need it."),
    ],
)
def test_wandb_run_that_does_not_start_is_a_config_error_with_advice(
    fake: FakeWandb, run: RunInfo, monkeypatch: pytest.MonkeyPatch, mode: Literal["online", "offline"], advice: str
) -> None:
    def refuse(**_: Any) -> FakeRun:
        raise OSError("no answer from the service.\nTraceback: many lines")

    monkeypatch.setattr(fake, "init", refuse)
    tracker = WandbTracker(project="p", group=None, mode=mode)
    with pytest.raises(ConfigError) as error:
        tracker.start(run)
    tracker.close()
    assert str(error.value) == (
        f"--use-wandb: Weights & Biases did not start a run in project 'p' (--wandb-mode {mode}): no answer from the service. "
        + advice
    )


def test_wandb_error_without_text_is_named_by_its_type(fake: FakeWandb, run: RunInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: Any) -> FakeRun:
        raise TimeoutError

    monkeypatch.setattr(fake, "init", refuse)
    with pytest.raises(ConfigError, match=r"\(--wandb-mode online\): TimeoutError\. Run `wandb login`"):
        WandbTracker(project="p", group=None, mode="online").start(run)


def test_wandb_run_folder_is_made_before_the_run_starts(fake: FakeWandb, run: RunInfo) -> None:
    tracker = WandbTracker(project="p", group=None, mode="offline")
    tracker.start(replace(run, run_dir=run.run_dir / "new"))
    assert (run.run_dir / "new").is_dir()


if importlib.util.find_spec("wandb") is not None:

    def test_wandb_online_run_of_the_real_package_without_a_key_is_a_config_error(
        run: RunInfo, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.delenv("WANDB_API_KEY", raising=False)
        monkeypatch.setenv("NETRC", str(tmp_path / "none"))
        monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
        monkeypatch.setenv("WANDB_SILENT", "true")
        with pytest.raises(ConfigError, match=r"No API key configured.*WANDB_API_KEY"):
            WandbTracker(project="p", group=None, mode="online").start(run)

    def test_wandb_offline_run_of_the_real_package_lies_in_the_run_folder(
        run: RunInfo,
        records: tuple[RolloutRecord, ...],
        samples: tuple[SampleRecord, ...],
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
    ) -> None:
        for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
            monkeypatch.setenv(name, str(tmp_path / name))
        monkeypatch.setenv("WANDB_SILENT", "true")
        tracker = WandbTracker(project="p", group=None, mode="offline")
        tracker.start(run)
        tracker.log(records[1])
        tracker.log_table(1, samples[1:2])
        tracker.close()
        assert list((run.run_dir / "wandb").glob("offline-run-*/run-*.wandb"))
