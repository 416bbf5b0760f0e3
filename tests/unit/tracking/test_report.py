import json
import re
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from slime_ppo.tracking.base import RolloutRecord, RunInfo, SampleRecord
from slime_ppo.tracking.clock import CRITIC_FREE_PHASES, SIDE_BY_SIDE_PHASES
from slime_ppo.tracking.jsonl import JsonlTracker
from slime_ppo.tracking.phrases import Phrase
from slime_ppo.tracking.report import ReportTracker, main, rebuild_report, render_report, write_report

NASTY = "</script><script>alert(1)</script><!-- \"'\n{{style.css}} &amp; \u2028"


@dataclass
class Page(HTMLParser):
    """The elements of a page as a browser would see them."""

    attributes: list[tuple[str, str, str | None]] = field(default_factory=list)
    scripts: list[str] = field(default_factory=list)
    tags: list[str] = field(default_factory=list)
    title: str = ""

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.lasttag == "script" and self.scripts:
            self.scripts[-1] += data
        if self.lasttag == "title":
            self.title += data


def parse(html: str) -> tuple[Page, dict[str, Any]]:
    page = Page()
    page.feed(html)
    page.close()
    return page, json.loads(page.scripts[0].strip())


def asset(name: str) -> str:
    return (resources.files("slime_ppo.tracking") / "report_page" / name).read_text(encoding="utf-8")


def test_report_is_self_contained(run: RunInfo, records: tuple[RolloutRecord, ...], samples: tuple[SampleRecord, ...]) -> None:
    html = render_report(run, records, samples)
    page, _ = parse(html)
    loads = [
        (tag, name, value) for tag, name, value in page.attributes if name in ("src", "href", "srcset", "data", "action", "poster")
    ]
    assert loads == [("a", "href", "#samples")]
    # a namespace name is no address; nothing else may look like one
    assert re.findall(r"https?://[^\s\"')]*", html) == ["http://www.w3.org/2000/svg"]
    assert not re.search(r"url\(|@import|fetch\(|XMLHttpRequest|WebSocket|import\(", html)
    policy = next(
        value for tag, name, value in page.attributes if tag == "meta" and name == "content" and "default-src" in (value or "")
    )
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    assert not re.search(r"\{\{[a-z_.]+\}\}", html), "every placeholder is filled"


def test_report_escapes_every_text_of_the_run(
    run: RunInfo, records: tuple[RolloutRecord, ...], samples: tuple[SampleRecord, ...]
) -> None:
    sample = replace(samples[0], prompt=NASTY, response=NASTY, finish=NASTY, tokens=(NASTY, *samples[0].tokens[1:]))
    nasty_run = replace(run, title=NASTY, config_yaml=NASTY, notes=(NASTY,))
    record = RolloutRecord(9, {NASTY: 1.0, **records[1].metrics}, (), {NASTY: 1.0}, (Phrase(NASTY, 1.0),))
    page, payload = parse(render_report(nasty_run, [record], [sample]))
    plain, _ = parse(render_report(run, records, samples))
    assert page.tags == plain.tags, "no text became an element"
    assert page.title.removesuffix("\n") == NASTY
    assert [payload["title"], payload["config"], payload["notes"]] == [NASTY, NASTY, [NASTY]]
    assert payload["phrases"] == [[{"text": NASTY, "share": 1.0}]]
    shown = payload["samples"][0]
    assert [shown["prompt"], shown["response"], shown["finish"], shown["tokens"][0]] == [NASTY] * 4


def test_report_page_makes_no_element_from_text() -> None:
    for name in ("page.js", "notes.js", "charts.js", "viewer.js"):
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|DOMParser", asset(name)), name


def test_report_charts_read_metrics_and_phases_that_the_trainer_writes(records: tuple[RolloutRecord, ...]) -> None:
    read = set(re.findall(r"\"((?:rollout|train|eval|perf)/[^\"]+)\"", asset("charts.js") + asset("page.js")))
    written = set(records[0].metrics) | set(records[1].metrics)
    assert read - {"train/nll", "eval/nll"} <= written, "those two are of supervised fine-tuning"
    series = re.findall(r"run\.evalSets\.map.*`eval/\$\{name\}`", asset("charts.js") + asset("page.js"))
    assert len(series) == 2, "a curve and a tile per data set"
    assert len(read) > 15
    for phase in {*records[0].phases, *CRITIC_FREE_PHASES, *SIDE_BY_SIDE_PHASES}:
        assert f"--p-{phase.replace(' ', '-')}:" in asset("style.css")


@pytest.mark.parametrize("missing", ["all", "policy", "steps and phases"])
def test_report_tolerates_missing_metrics(run: RunInfo, records: tuple[RolloutRecord, ...], missing: str) -> None:
    partial = {
        "all": RolloutRecord(0, {}, (), {}),
        "policy": records[0],
        "steps and phases": replace(records[1], steps=(), phases={}),
    }[missing]
    _, payload = parse(render_report(run, [partial], []))
    assert payload["rollouts"] == [partial.rollout_id]
    assert payload["evalSets"] == [name for name in ("code", "math") if f"eval/{name}" in partial.metrics]
    assert set(payload["metrics"]) == set(partial.metrics)


def test_report_of_no_rollout_is_a_page(run: RunInfo) -> None:
    _, payload = parse(render_report(run, [], []))
    assert (payload["rollouts"], payload["metrics"], payload["phases"], payload["samples"]) == ([], {}, [], [])
    assert payload["phrases"] == []


def test_report_written_over_an_old_one_leaves_nothing_beside(run: RunInfo, records: tuple[RolloutRecord, ...]) -> None:
    path = run.run_dir / "report.html"
    write_report(path, run, records[:1], [])
    write_report(path, run, records, [])
    assert [child.name for child in run.run_dir.iterdir()] == ["report.html"]
    assert parse(path.read_text(encoding="utf-8"))[1]["rollouts"] == [0, 1, 2, 3]


def log_run(run: RunInfo, records: tuple[RolloutRecord, ...], samples: tuple[SampleRecord, ...]) -> Path:
    trackers = (JsonlTracker(), ReportTracker(interval=2))
    for tracker in trackers:
        tracker.start(run)
    for record in records:
        for tracker in trackers:
            tracker.log_table(record.rollout_id, [sample for sample in samples if sample.rollout_id == record.rollout_id])
            tracker.log(record)
    for tracker in trackers:
        tracker.close()
    (run.run_dir / "config.yaml").write_text(run.config_yaml, encoding="utf-8")
    return run.run_dir / "report.html"


def test_report_rebuilt_from_the_run_folder_equals_the_one_of_the_run(
    run: RunInfo, records: tuple[RolloutRecord, ...], samples: tuple[SampleRecord, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    path = log_run(run, records, samples)
    written = path.read_bytes()
    path.unlink()
    assert rebuild_report(run.run_dir) == path
    assert path.read_bytes() == written
    path.unlink()
    assert main([str(run.run_dir)]) == 0
    assert path.read_bytes() == written
    assert capsys.readouterr().out == f"{path}\n"


def test_report_of_a_resumed_run_shows_its_earlier_rollouts(
    run: RunInfo, records: tuple[RolloutRecord, ...], samples: tuple[SampleRecord, ...]
) -> None:
    path = log_run(run, records, samples)
    whole = path.read_bytes()
    log_run(replace(run, start_rollout=2), records[2:], samples)
    assert path.read_bytes() == whole


def test_report_tracker_writes_after_the_first_rollout_and_at_each_interval(
    run: RunInfo, records: tuple[RolloutRecord, ...]
) -> None:
    tracker = ReportTracker(interval=2)
    tracker.start(run)
    shown = []
    for record in records:
        tracker.log(record)
        shown.append(len(parse((run.run_dir / "report.html").read_text(encoding="utf-8"))[1]["rollouts"]))
    assert shown == [1, 1, 3, 3]
    tracker.close()
    assert len(parse((run.run_dir / "report.html").read_text(encoding="utf-8"))[1]["rollouts"]) == 4


def test_report_command_on_a_folder_that_is_no_run_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert "has no run.json" in capsys.readouterr().err
