"""report.html: one self-contained file with the curves, the time split and the samples of a run. It opens without a network.

python -m slime_ppo.tracking.report RUN_DIR        rebuilds it from metrics.jsonl, samples.jsonl, run.json and config.yaml
"""

import argparse
import html
import os
import re
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from slime_ppo.errors import SlimePpoError
from slime_ppo.tracking.base import RolloutRecord, RunInfo, SampleRecord
from slime_ppo.tracking.jsonl import read_records, read_run, read_samples
from slime_ppo.tracking.report_payload import MAX_SAMPLE_TOKENS, SampleKeeper, report_payload, script_json, thin_samples

REPORT_FILE = "report.html"
_PAGE_FOLDER = "report_page"
_PLACEHOLDER = re.compile(r"\{\{([a-z_.]+)\}\}")


def render_report(run: RunInfo, records: Sequence[RolloutRecord], samples: Sequence[SampleRecord]) -> str:
    """The page as text. Metrics that no record has are left out of it; samples are thinned to MAX_SAMPLE_TOKENS."""
    folder = resources.files("slime_ppo.tracking") / _PAGE_FOLDER
    shown = thin_samples(samples, max_tokens=MAX_SAMPLE_TOKENS)
    filled = {"title": html.escape(run.title), "payload": script_json(report_payload(run, records, shown))}

    def fill(match: re.Match[str]) -> str:
        name = match.group(1)
        return filled[name] if name in filled else (folder / name).read_text(encoding="utf-8")

    # one pass: text that came from a model or a config is never searched for placeholders
    return _PLACEHOLDER.sub(fill, (folder / "page.html").read_text(encoding="utf-8"))


def write_report(path: Path, run: RunInfo, records: Sequence[RolloutRecord], samples: Sequence[SampleRecord]) -> None:
    """Write the page to `path`, atomically: a reader finds the old page or the new one."""
    beside = path.with_name(f"{path.name}.{os.getpid()}.new")
    beside.write_text(render_report(run, records, samples), encoding="utf-8")
    beside.replace(path)


def rebuild_report(run_dir: Path) -> Path:
    """Write the report of a run folder from its files and return its path. Raises DataError when they cannot be read."""
    path = run_dir / REPORT_FILE
    kept = SampleKeeper()
    kept.add(read_samples(run_dir))
    write_report(path, read_run(run_dir), read_records(run_dir), kept.samples)
    return path


class ReportTracker:
    """Writes the report after the first rollout, after every `interval` rollouts, and at the end.

    A long run's page takes longer to write, so the interval grows to a twentieth of the rollouts so far.
    """

    def __init__(self, *, interval: int = 5) -> None:
        self._interval = interval
        self._run: RunInfo | None = None
        self._records: list[RolloutRecord] = []
        self._kept = SampleKeeper()
        self._num_written = 0

    def start(self, run: RunInfo) -> None:
        """A resumed run shows its earlier rollouts too, from the files of the run folder."""
        self._run = run
        if run.start_rollout:
            self._records = [record for record in read_records(run.run_dir) if record.rollout_id < run.start_rollout]
            self._kept.add(sample for sample in read_samples(run.run_dir) if sample.rollout_id < run.start_rollout)

    def log(self, record: RolloutRecord) -> None:
        self._records.append(record)
        num_new = len(self._records) - self._num_written
        if len(self._records) == 1 or num_new >= max(self._interval, len(self._records) // 20):
            self._write()

    def log_table(self, rollout_id: int, samples: Sequence[SampleRecord]) -> None:
        self._kept.add(samples)

    def close(self) -> None:
        if self._run is not None and self._records:
            self._write()

    def _write(self) -> None:
        assert self._run is not None, "start comes before log"
        self._run.run_dir.mkdir(parents=True, exist_ok=True)
        write_report(self._run.run_dir / REPORT_FILE, self._run, self._records, self._kept.samples)
        self._num_written = len(self._records)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m slime_ppo.tracking.report", description="Rebuild report.html of a run folder from its metrics and samples."
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="folder with run.json, metrics.jsonl and samples.jsonl")
    try:
        path = rebuild_report(parser.parse_args(arguments).run_dir)
    except SlimePpoError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 2
    sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
