import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from slime_ppo.errors import DataError
from slime_ppo.tracking.base import RolloutRecord, RunInfo, SampleRecord
from slime_ppo.tracking.jsonl import JsonlTracker, read_records, read_run, read_samples
from slime_ppo.tracking.phrases import Phrase


def write(run: RunInfo, records: tuple[RolloutRecord, ...], samples: tuple[SampleRecord, ...] = ()) -> None:
    tracker = JsonlTracker()
    tracker.start(run)
    for record in records:
        tracker.log(record)
        tracker.log_table(record.rollout_id, [sample for sample in samples if sample.rollout_id == record.rollout_id])
    tracker.close()


def test_jsonl_read_back_equals_what_was_written(
    run: RunInfo, records: tuple[RolloutRecord, ...], samples: tuple[SampleRecord, ...]
) -> None:
    write(run, records, samples)
    (run.run_dir / "config.yaml").write_text(run.config_yaml, encoding="utf-8")
    assert read_records(run.run_dir) == records
    assert tuple(read_samples(run.run_dir)) == samples
    assert read_run(run.run_dir) == run
    assert list(read_records(run.run_dir)[0].phases) == list(records[0].phases), "phases keep their order"


def test_metrics_line_is_flat_with_sorted_keys_and_full_precision(run: RunInfo) -> None:
    third = 1 / 3
    write(
        run,
        (
            RolloutRecord(
                0, {"train/loss": third, "rollout/kl": 1e-17}, ({"step": 0.0, "lr": 0.1},), {"wake": 2.0, "generate": 1.0}
            ),
        ),
    )
    line = (run.run_dir / "metrics.jsonl").read_text(encoding="utf-8")
    assert line == (
        '{"phases": {"wake": 2.0, "generate": 1.0}, "rollout/kl": 1e-17, "rollout_id": 0, '
        '"steps": [{"lr": 0.1, "step": 0.0}], "train/loss": 0.3333333333333333}\n'
    )


def test_metrics_line_holds_the_phrases_most_common_first_and_no_metric_of_that_name(run: RunInfo) -> None:
    phrases = (Phrase("the great", 0.75), Phrase("a great", 0.5))
    write(run, (RolloutRecord(0, {"train/loss": 1.0}, (), {}, phrases),))
    row = json.loads((run.run_dir / "metrics.jsonl").read_text(encoding="utf-8"))
    assert list(row["phrases"].items()) == [("the great", 0.75), ("a great", 0.5)]
    (read,) = read_records(run.run_dir)
    assert (read.metrics, read.phrases) == ({"train/loss": 1.0}, phrases)


def test_metrics_line_without_phrases_is_read_as_a_rollout_without_any(run: RunInfo) -> None:
    write(run, (RolloutRecord(0, {"train/loss": 1.0}, (), {}),))
    assert "phrases" not in json.loads((run.run_dir / "metrics.jsonl").read_text(encoding="utf-8"))
    assert read_records(run.run_dir)[0].phrases == ()


def test_metrics_that_are_not_finite_are_null_in_the_file_and_nan_when_read(
    run: RunInfo, samples: tuple[SampleRecord, ...]
) -> None:
    record = RolloutRecord(0, {"train/loss": math.nan}, ({"step": 0.0, "lr": math.inf},), {})
    write(run, (record,), (replace(samples[0], values=(math.nan, 1.0, 2.0, 3.0)),))
    row = json.loads((run.run_dir / "metrics.jsonl").read_text(encoding="utf-8"))
    assert row["train/loss"] is None and row["steps"][0]["lr"] is None
    assert math.isnan(read_records(run.run_dir)[0].metrics["train/loss"])
    assert math.isnan(next(read_samples(run.run_dir)).values[0])


def test_metrics_are_on_disk_before_close(
    run: RunInfo, records: tuple[RolloutRecord, ...], samples: tuple[SampleRecord, ...]
) -> None:
    tracker = JsonlTracker()
    tracker.start(run)
    tracker.log(records[0])
    tracker.log_table(0, samples[:1])
    assert read_records(run.run_dir) == records[:1]
    assert tuple(read_samples(run.run_dir)) == samples[:1]
    tracker.close()


def test_resumed_run_replaces_the_rollouts_after_its_checkpoint(
    run: RunInfo, records: tuple[RolloutRecord, ...], samples: tuple[SampleRecord, ...]
) -> None:
    write(run, records, samples)
    before = (run.run_dir / "metrics.jsonl").read_bytes()
    write(replace(run, start_rollout=2), records[2:3], samples)
    assert [record.rollout_id for record in read_records(run.run_dir)] == [0, 1, 2]
    assert [sample.rollout_id for sample in read_samples(run.run_dir)] == [0, 1, 2]
    assert before.startswith((run.run_dir / "metrics.jsonl").read_bytes()), "kept lines are the same bytes"


def test_new_run_in_an_old_folder_starts_with_empty_files(run: RunInfo, records: tuple[RolloutRecord, ...]) -> None:
    write(run, records)
    write(run, records[:1])
    assert read_records(run.run_dir) == records[:1]


def test_last_line_cut_off_by_a_kill_is_left_out(run: RunInfo, records: tuple[RolloutRecord, ...]) -> None:
    write(run, records)
    path = run.run_dir / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-30])
    assert read_records(run.run_dir) == records[:3]


@pytest.mark.parametrize(("line", "message"), [("{broken", "line 5 is not JSON"), ('{"a": 1}', "line 5 has no rollout_id")])
def test_broken_line_is_named(run: RunInfo, records: tuple[RolloutRecord, ...], line: str, message: str) -> None:
    write(run, records)
    with (run.run_dir / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(line + "\n")
    with pytest.raises(DataError, match=f"metrics.jsonl, {message}"):
        read_records(run.run_dir)


def test_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no run\.json: expected the folder of a run"):
        read_run(tmp_path)
