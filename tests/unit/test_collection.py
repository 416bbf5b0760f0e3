"""Tests that nobody runs prove nothing: what pytest is told to collect, and that it holds every folder of tests."""

import tomllib
from fnmatch import fnmatch
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def test_pytest_leaves_out_no_folder_of_tests() -> None:
    """pytest would by itself pass over a folder called dist, where the tests on several ranks are."""
    options = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"]
    assert options["testpaths"] == ["tests"]
    folders = {part for file in (REPOSITORY / "tests").rglob("test_*.py") for part in file.relative_to(REPOSITORY).parts[:-1]}
    assert "dist" in folders
    assert not [name for name in folders for pattern in options["norecursedirs"] if fnmatch(name, pattern)]
