"""What the tool calls equal, and when it kills; whole runs are in tests/e2e/test_resume.py."""

import ast
import importlib.util
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tools import kill_matrix as tool


def write_run(folder: Path) -> Path:
    """The files of a finished run that are compared."""
    contents = {
        "hf/model.safetensors": "w",
        "critic/hf/model.safetensors": "w",
        "samples.jsonl": "s",
        "metrics.jsonl": json.dumps({"rollout_id": 0, "train/pg_loss": 0.5, "perf/step_time": 1.0, "phases": {"generate": 1.0}})
        + "\n",
        "state.json": json.dumps({"progress": {"kl_beta": 0.1}, "files": {}}),
        "run_state.json": json.dumps({"checkpoints": [{"state_file": "state.json"}]}),
    }
    contents |= {
        f"{part}/iter_0000006/{file}": "t" for part in ("actor", "critic") for file in ("__0_0.distcp", "common.pt", ".metadata")
    }
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder


def test_differences_of_equal_runs_are_none_whatever_time_they_took(tmp_path: Path) -> None:
    ours, theirs = write_run(tmp_path / "ours"), write_run(tmp_path / "theirs")
    row = json.loads((ours / "metrics.jsonl").read_text()) | {"perf/step_time": 2.0, "phases": {"generate": 2.0}}
    (ours / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (ours / "actor/iter_0000006/.metadata").write_text("another time")
    assert tool.differences(ours, theirs) == []


@pytest.mark.parametrize(
    ("file", "content", "named"),
    [
        ("actor/iter_0000006/__0_0.distcp", "x", "actor/iter_0000006/__0_0.distcp"),
        ("critic/iter_0000006/common.pt", "x", "critic/iter_0000006/common.pt"),
        ("hf/model.safetensors", "x", "hf/model.safetensors"),
        ("samples.jsonl", "s\ns", "samples.jsonl"),
        ("metrics.jsonl", '{"rollout_id": 0, "train/pg_loss": 0.5000001}\n', "metrics.jsonl"),
        ("state.json", '{"progress": {"kl_beta": 0.2}}', "the loop's state"),
        ("critic/iter_0000004.partial/__0_0.distcp", "t", "left over: iter_0000004.partial"),
    ],
)
def test_differences_name_what_is_not_the_same(tmp_path: Path, file: str, content: str, named: str) -> None:
    ours, theirs = write_run(tmp_path / "ours"), write_run(tmp_path / "theirs")
    (ours / file).parent.mkdir(exist_ok=True)
    (ours / file).write_text(content)
    assert tool.differences(ours, theirs) == [named]


def test_moments_name_functions_that_are_there() -> None:
    """Read, not imported: that takes seconds."""
    ours = [one.function.split(":") for one in tool.MOMENTS if one.function.startswith("slime_ppo.")]
    assert len(ours) > 10
    for module, path in ours:
        spec = importlib.util.find_spec(module)
        assert spec is not None and spec.origin is not None, module
        body: list[ast.stmt] = ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body
        for name in path.split("."):
            found = {one.name: one.body for one in body if isinstance(one, ast.ClassDef | ast.FunctionDef)}
            imported = {alias.name: [] for one in body if isinstance(one, ast.ImportFrom) for alias in one.names}
            assert name in found | imported, f"{module} has no {path}"
            body = (found | imported)[name]


@pytest.mark.parametrize(("after", "made"), [(False, ["one", "x.json"]), (True, ["one", "two", "x.json"])])
def test_moment_kills_at_the_call_that_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: bool, made: list[str]
) -> None:
    class Killed(BaseException):
        pass

    def kill() -> None:
        raise Killed

    monkeypatch.setattr(tool, "kill", kill)
    monkeypatch.setattr(os, "replace", os.replace)  # put back after the test
    moment = tool.Moment("", "os:replace", call=2, condition=tool.target(("one", "two")), after=after)
    moment.plant()
    for name in ("a", "b", "c"):
        (tmp_path / name).touch()
    os.replace(tmp_path / "a", tmp_path / "one")
    os.replace(tmp_path / "b", tmp_path / "x.json")  # the condition does not hold
    with pytest.raises(Killed):
        os.replace(tmp_path / "c", tmp_path / "two")
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "c") == made


@pytest.mark.parametrize(("ends", "asked"), [([0, -9, -9, 0], [8.0, 4.0, 2.0]), ([1], [8.0]), ([-9, 0], [8.0])])
def test_random_moment_that_comes_after_the_last_checkpoint_comes_again_in_half_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: list[int], asked: list[float]
) -> None:
    """Ends of runs, one after the other; all that were tried for a moment, but the last of them, had saved all."""
    reference, save, codes = write_run(tmp_path / "reference"), tmp_path / "save", list(ends)
    planted: list[float] = []

    def run_forked(_: Sequence[str], plant: Callable[[], None] | None = None) -> tool.Ended:
        code = codes.pop(0)
        done = plant is None or len(planted) + 1 < len(asked) or code > 0
        if plant is not None:
            plant()
        rollout_id = tool.NUM_ROLLOUT if done else 2
        write_run(save)
        (save / "run_state.json").write_text(json.dumps({"checkpoints": [{"rollout_id": rollout_id, "state_file": "state.json"}]}))
        return tool.Ended(code, code == -9, "")

    monkeypatch.setattr(tool, "run_forked", run_forked)
    monkeypatch.setattr(tool.RandomMoment, "plant", lambda moment: planted.append(moment.seconds))
    good, row = tool.try_moment(tool.RandomMoment(8.0), [], save, reference)
    assert planted == asked and codes == []
    assert good == (len(ends) > 1) and row.startswith(f"| {asked[-1]:.2f} s"), row
