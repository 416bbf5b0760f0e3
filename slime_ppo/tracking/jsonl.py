"""The run folder's own record, always written: run.json, metrics.jsonl (a line per rollout), samples.jsonl (a line per sample).

Metrics stand flat in their line (`{"rollout_id": 3, "train/pg_loss": ..., "phases": {...}, "steps": [...]}`), so that
`pandas.read_json(path, lines=True)` gives a table. A rollout with words has `"phrases": {"of the": 0.3, ...}` too. Metric
names have a slash, so none of these four keys can be one. Floats are written in full (repr); a NaN or an infinity is null,
since JSON has neither, and is read back as NaN.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from slime_ppo.config.preflight import CONFIG_FILE, METRICS_FILE
from slime_ppo.errors import DataError
from slime_ppo.tracking.base import RolloutRecord, RunInfo, SampleRecord
from slime_ppo.tracking.phrases import Phrase

RUN_FILE = "run.json"
SAMPLES_FILE = "samples.jsonl"
_NOT_METRICS = ("phases", "phrases", "rollout_id", "steps")
_FLOAT_COLUMNS = ("log_probs", "ref_log_probs", "values", "advantages", "returns")


def _to_json(value: float) -> float | int | None:
    if isinstance(value, bool | int):
        return value
    number = float(value)
    return number if math.isfinite(number) else None


def _from_json(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _numbers(values: Mapping[str, float]) -> dict[str, float | int | None]:
    return {name: _to_json(value) for name, value in values.items()}


def record_line(record: RolloutRecord) -> str:
    """One line of metrics.jsonl, keys sorted; phases and phrases keep their order."""
    steps = [dict(sorted(_numbers(step).items())) for step in record.steps]
    row = {"rollout_id": record.rollout_id, **_numbers(record.metrics), "phases": _numbers(record.phases), "steps": steps}
    if record.phrases:
        row["phrases"] = {phrase.text: phrase.share for phrase in record.phrases}
    return json.dumps(dict(sorted(row.items())), allow_nan=False)


def sample_line(sample: SampleRecord) -> str:
    """One line of samples.jsonl, keys sorted."""
    row = asdict(sample)
    row |= {name: [_to_json(value) for value in row[name]] for name in _FLOAT_COLUMNS}
    row["loss_mask"] = [bool(trainable) for trainable in sample.loss_mask]
    row["reward"] = _to_json(sample.reward)
    return json.dumps(row, sort_keys=True, allow_nan=False)


def _parse_record(row: Mapping[str, Any]) -> RolloutRecord:
    shares = row.get("phrases", {})  # a rollout without any has no such key
    return RolloutRecord(
        rollout_id=row["rollout_id"],
        metrics={name: _from_json(value) for name, value in row.items() if name not in _NOT_METRICS},
        steps=tuple({name: _from_json(value) for name, value in step.items()} for step in row["steps"]),
        phases={name: _from_json(value) for name, value in row["phases"].items()},
        phrases=tuple(Phrase(text, share) for text, share in shares.items()),
    )


def _parse_sample(row: Mapping[str, Any]) -> SampleRecord:
    columns = {name: tuple(_from_json(value) for value in row[name]) for name in _FLOAT_COLUMNS}
    lists = {"tokens": tuple(row["tokens"]), "loss_mask": tuple(row["loss_mask"]), "reward": _from_json(row["reward"])}
    return SampleRecord(**{**row, **columns, **lists})


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSONL file. A last line without its newline is from a run killed while writing, and is left out."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith("\n"):
                return
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(f"{path}, line {number} is not JSON ({error.msg}); delete that line to go on without it") from error
            if not isinstance(row, dict) or "rollout_id" not in row:
                raise DataError(f"{path}, line {number} has no rollout_id: this is not a file that slime_ppo wrote")
            yield row


def read_records(run_dir: Path) -> tuple[RolloutRecord, ...]:
    """The rollouts of metrics.jsonl in order; none when there is no such file. Raises DataError naming a broken line."""
    return tuple(_parse_record(row) for row in _rows(run_dir / METRICS_FILE))


def read_samples(run_dir: Path) -> Iterator[SampleRecord]:
    """The samples of samples.jsonl in order, one at a time: a long run's file does not fit into memory.

    None when there is no such file. Raises DataError naming a broken line.
    """
    return (_parse_sample(row) for row in _rows(run_dir / SAMPLES_FILE))


def read_run(run_dir: Path) -> RunInfo:
    """run.json and config.yaml of a run folder. Raises DataError when the folder has no run.json."""
    path = run_dir / RUN_FILE
    if not path.is_file():
        raise DataError(f"{run_dir} has no {RUN_FILE}: expected the folder of a run, the one that holds {METRICS_FILE}")
    run = json.loads(path.read_text(encoding="utf-8"))
    config = run_dir / CONFIG_FILE
    config_yaml = config.read_text(encoding="utf-8") if config.is_file() else ""
    return RunInfo(run["title"], run_dir, run["num_rollout"], config_yaml, tuple(run["notes"]))


class JsonlTracker:
    """Appends to the files of the run folder and flushes after each call, so that a kill loses at most the line being written."""

    def __init__(self) -> None:
        self._metrics: TextIO | None = None
        self._samples: TextIO | None = None

    def start(self, run: RunInfo) -> None:
        run.run_dir.mkdir(parents=True, exist_ok=True)
        about = {"title": run.title, "num_rollout": run.num_rollout, "notes": list(run.notes)}
        (run.run_dir / RUN_FILE).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        self._metrics = _open_at(run.run_dir / METRICS_FILE, run.start_rollout)
        self._samples = _open_at(run.run_dir / SAMPLES_FILE, run.start_rollout)

    def log(self, record: RolloutRecord) -> None:
        _append(self._metrics, [record_line(record)])

    def log_table(self, rollout_id: int, samples: Sequence[SampleRecord]) -> None:
        _append(self._samples, [sample_line(sample) for sample in samples])

    def close(self) -> None:
        for file in (self._metrics, self._samples):
            if file is not None:
                file.close()


def _open_at(path: Path, start_rollout: int) -> TextIO:
    """Open for appending with only the rollouts before `start_rollout` left in the file."""
    beside = path.with_name(path.name + ".new")
    with beside.open("w", encoding="utf-8") as file:
        if start_rollout:
            file.writelines(json.dumps(row) + "\n" for row in _rows(path) if row["rollout_id"] < start_rollout)
    beside.replace(path)
    return path.open("a", encoding="utf-8")


def _append(file: TextIO | None, lines: Iterable[str]) -> None:
    assert file is not None, "start comes before log"
    file.writelines(line + "\n" for line in lines)
    file.flush()
