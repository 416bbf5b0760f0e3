"""Weights & Biases, behind a flag. The package is imported when the run starts, so that nobody else needs it."""

from collections.abc import Sequence
from typing import Any, Literal

import yaml

from slime_ppo.errors import ConfigError
from slime_ppo.tracking.base import RolloutRecord, RunInfo, SampleRecord

WandbMode = Literal["online", "offline"]
_SAMPLE_COLUMNS = ("rollout_id", "sample_id", "kind", "prompt", "response", "reward", "finish")


class WandbTracker:
    """Metrics of a rollout are plotted over `rollout_id`, `step/*` over `step/step`; samples are one table per rollout.

    Offline mode needs no network: the run lies in <run folder>/wandb until `wandb sync` is called on it.
    """

    def __init__(self, *, project: str, group: str | None, mode: WandbMode) -> None:
        self._project = project
        self._group = group
        self._mode = mode
        self._wandb: Any = None
        self._run: Any = None

    def start(self, run: RunInfo) -> None:
        """Raises ConfigError when the package is missing."""
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                f"--use-wandb needs the package wandb, and importing it failed ({error}). "
                "Install it (pip install wandb) or leave the flag out; metrics.jsonl and report.html need neither."
            ) from error
        self._wandb = wandb
        self._run = wandb.init(
            project=self._project,
            group=self._group,
            name=run.title,
            notes="\n".join(run.notes),
            dir=str(run.run_dir),
            mode=self._mode,
            config=yaml.safe_load(run.config_yaml),
        )
        self._run.define_metric("*", step_metric="rollout_id")
        self._run.define_metric("step/*", step_metric="step/step")

    def log(self, record: RolloutRecord) -> None:
        for step in record.steps:
            self._run.log({f"step/{name}": value for name, value in step.items()})
        self._run.log({"rollout_id": record.rollout_id, **record.metrics})

    def log_table(self, rollout_id: int, samples: Sequence[SampleRecord]) -> None:
        rows = [[getattr(sample, name) for name in _SAMPLE_COLUMNS] for sample in samples]
        self._run.log({"rollout_id": rollout_id, "samples": self._wandb.Table(columns=list(_SAMPLE_COLUMNS), data=rows)})

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None
