"""Scalars for TensorBoard, in <run folder>/tensorboard. Written by TensorBoard's own writer, which needs no torch."""

import shutil
from collections.abc import Sequence
from typing import Any

from slime_ppo.errors import ConfigError
from slime_ppo.tracking.base import RolloutRecord, RunInfo, SampleRecord
from slime_ppo.tracking.jsonl import read_records

EVENTS_FOLDER = "tensorboard"


class TensorBoardTracker:
    """Metrics of a rollout stand at its rollout id, `step/*` at the number of the optimizer step.

    The constructor imports the package, and raises ConfigError when it is missing.
    """

    def __init__(self) -> None:
        try:
            from tensorboard.summary import Writer
        except Exception as error:  # a broken installation raises other errors than ImportError
            raise ConfigError(
                f"--use-tensorboard needs the package tensorboard, and importing it failed ({error}). "
                "Install it (pip install tensorboard) or leave the flag out; metrics.jsonl and report.html need neither."
            ) from error
        self._make_writer: Any = Writer
        self._writer: Any = None

    def start(self, run: RunInfo) -> None:
        """A resumed run writes its earlier rollouts anew, from metrics.jsonl: event files cannot be cut."""
        earlier: list[RolloutRecord] = []
        if run.start_rollout:
            earlier = [record for record in read_records(run.run_dir) if record.rollout_id < run.start_rollout]
            shutil.rmtree(run.run_dir / EVENTS_FOLDER, ignore_errors=True)
        self._writer = self._make_writer(str(run.run_dir / EVENTS_FOLDER))
        for record in earlier:
            self.log(record)

    def log(self, record: RolloutRecord) -> None:
        for name, value in sorted(record.metrics.items()):
            self._writer.add_scalar(name, value, record.rollout_id)
        for step in record.steps:
            number = int(step["step"])
            for name, value in sorted(step.items()):
                if name != "step":
                    self._writer.add_scalar(f"step/{name}", value, number)
        self._writer.flush()

    def log_table(self, rollout_id: int, samples: Sequence[SampleRecord]) -> None:
        """This writer has scalars only; samples are in samples.jsonl and report.html."""

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
