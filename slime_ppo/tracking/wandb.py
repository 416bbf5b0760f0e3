"""Weights & Biases, behind a flag. The package is imported when a tracker is made, so that nobody else needs it."""

from collections.abc import Sequence
from typing import Any, Literal

import yaml

from slime_ppo.errors import ConfigError
from slime_ppo.tracking.base import RolloutRecord, RunInfo, SampleRecord

WandbMode = Literal["online", "offline"]
_SAMPLE_COLUMNS = ("rollout_id", "sample_id", "kind", "data_set", "prompt", "response", "reward", "finish")


class WandbTracker:
    """Metrics of a rollout are plotted over `rollout_id`, `step/*` over `step/step`; samples are one table per rollout. A resumed
    run goes on under its id; rollouts that it does again appear twice there.

    Offline mode needs no network: the run lies in <run folder>/wandb until `wandb sync` is called on it.
    The constructor imports the package, and raises ConfigError when it is missing.
    """

    def __init__(self, *, project: str, group: str | None, mode: WandbMode) -> None:
        try:
            import wandb
        except Exception as error:  # a broken installation raises other errors than ImportError
            raise ConfigError(
                f"--use-wandb needs the package wandb, and importing it failed ({error}). "
                "Install it (pip install wandb) or leave the flag out; metrics.jsonl and report.html need neither."
            ) from error
        self._wandb: Any = wandb
        self._project = project
        self._group = group
        self._mode = mode
        self._run: Any = None

    def start(self, run: RunInfo) -> None:
        """Raises ConfigError when Weights & Biases does not take the run (no API key, no network, no such project)."""
        run.run_dir.mkdir(parents=True, exist_ok=True)  # else the package writes to a temporary folder
        config = yaml.safe_load(run.config_yaml)
        try:
            self._run = self._wandb.init(
                project=self._project,
                group=self._group,
                name=run.title,
                notes="\n".join(run.notes),
                dir=str(run.run_dir),
                mode=self._mode,
                config=config,
                id=run.run_id,
                resume="allow" if self._mode == "online" else None,  # offline it is `wandb sync` that joins runs of one id
            )
            self._run.define_metric("*", step_metric="rollout_id")
            self._run.define_metric("step/*", step_metric="step/step")
        except Exception as error:  # of the package, its service process, or the network below it
            raise ConfigError(self._about_start(error)) from error

    def _about_start(self, error: Exception) -> str:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        advice = "Leave --use-wandb out; metrics.jsonl and report.html do not need it"
        if self._mode == "online":
            advice = "Run `wandb login` or set WANDB_API_KEY, or use --wandb-mode offline, which needs neither key nor network"
        return (
            f"--use-wandb: Weights & Biases did not start a run in project {self._project!r} (--wandb-mode {self._mode}): "
            f"{reason.rstrip('.')}. {advice}."
        )

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
