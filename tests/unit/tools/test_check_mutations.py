"""The table of mutations fits the sources as they are, and the script tells a mutation that is caught from one that is not."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from tools.check_mutations import Mutation, defects, load_mutations

ROOT = Path(__file__).resolve().parents[3]
TABLE = load_mutations(ROOT / "tools" / "mutations")

TOY = {
    "toy/__init__.py": "",
    "toy/maths.py": "def clip(x, low, high):\n    return max(low, min(x, high))\n",
    "tests/test_maths.py": ("from toy.maths import clip\n\n\ndef test_clip_above():\n    assert clip(9, 0, 2) == 2\n"),
    "tests/test_broken.py": "def test_fails_anyway():\n    assert False\n",
    "tools/mutations/1_first.yaml": """
- section: 1
  file: toy/maths.py
  tests: [tests/test_maths.py]
  mutations:
    - {ruling: the upper side, old: 'min(x, high)', new: 'x'}
    - {ruling: the lower side, old: 'max(low, min(x, high))', new: 'min(x, high)'}
    - {ruling: a crash, old: 'low, high):', new: 'low, top):'}
    - {ruling: no end, old: 'return max', new: "import time; time.sleep(600); return max"}
- section: 2
  file: toy/maths.py
  tests: [tests/test_broken.py]
  mutations:
    - {ruling: tests that fail anyway, old: 'min(x, high)', new: 'x'}
""",
}


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """A repository of one function with a test for its upper side only."""
    for name, text in TOY.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def run(root: Path, *options: str) -> tuple[int, list[str]]:
    """Exit code and lines of the script on the repository at `root`."""
    command = [sys.executable, ROOT / "tools" / "check_mutations.py", "--root", root, "--preload", "", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout.splitlines()


def test_table_every_mutation_can_be_applied_to_the_sources() -> None:
    """After a change of a source: move the mutation along with the line that holds its ruling (tools/mutations/*.yaml)."""
    assert defects(ROOT, TABLE) == []


def test_table_covers_every_section_of_the_semantics_and_every_collective() -> None:
    assert {mutation.section for mutation in TABLE} == set(range(15))
    sharded = [mutation for mutation in TABLE if any(test.startswith("tests/dist") for test in mutation.tests)]
    assert {mutation.file.split("/")[-1] for mutation in sharded} >= {"vocab_rows.py", "cp_ops.py", "whiten.py"}


def test_table_files_stay_short_enough_to_read() -> None:
    for path in (ROOT / "tools" / "mutations").glob("*.yaml"):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 400, path.name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"old": "minimum"}, "the old text occurs 0 times"),
        ({"old": "high"}, "the old text occurs 2 times"),
        ({"new": "min(x, high)"}, "new and old text are the same"),
        ({"new": "min(x, high"}, "the new text is no Python"),
        ({"file": "toy/other.py"}, "no such file"),
        ({"tests": ("tests/test_other.py::test_x",)}, "no test file tests/test_other.py::test_x"),
    ],
)
def test_defects_unfit_mutation_is_named(toy: Path, changes: dict[str, str], message: str) -> None:
    good = Mutation(1, "the upper side", "toy/maths.py", "min(x, high)", "x", ("tests/test_maths.py",))
    assert defects(toy, [good]) == []
    (found,) = defects(toy, [dataclasses.replace(good, **changes)])
    assert message in found and "the upper side" in found
    assert "is there 2 times" in defects(toy, [good, good])[0]


def test_script_tells_caught_from_survived_broken_and_endless_and_leaves_the_sources_alone(toy: Path) -> None:
    code, lines = run(toy, "--timeout", "6", "--jobs", "2")
    assert code == 1
    found = {
        mutation: line.split()[0]
        for mutation in ("upper side", "lower side", "a crash", "no end")
        for line in lines
        if mutation in line
    }
    assert found == {"upper side": "caught", "lower side": "survived", "a crash": "broken", "no end": "timed"}
    assert any("tests/test_maths.py::test_clip_above" in line for line in lines if line.startswith("caught"))
    assert lines[-1] == "5 mutations: 1 caught, 1 survived, 1 broken, 1 timed out, 1 not tried"
    assert {name: (toy / name).read_text() for name in TOY} == TOY


def test_script_only_the_caught_one_ends_with_zero(toy: Path) -> None:
    code, lines = run(toy, "--only", "upper side")
    assert (code, lines[-1]) == (0, "1 mutations: 1 caught, 0 survived, 0 broken, 0 timed out, 0 not tried")


def test_script_list_runs_nothing(toy: Path) -> None:
    code, lines = run(toy, "--list")
    assert (code, lines[-1]) == (0, "5 mutations")
    assert lines[0] == " 1  the upper side  [toy/maths.py]"
