"""What is on disk before it counts, and folders that take a name."""

import os
from pathlib import Path

import pytest

from slime_ppo.disk import flush_tree, make_folder, root_cause, swap_in


@pytest.fixture
def flushed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths in the order in which they are flushed."""
    paths: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda handle: paths.append(os.readlink(f"/proc/self/fd/{handle}")))
    return paths


def test_flush_tree_takes_every_file_and_folder_and_the_folder_last(tmp_path: Path, flushed: list[str]) -> None:
    (tmp_path / "one" / "two").mkdir(parents=True)
    for name in ("a", "one/b", "one/two/c"):
        (tmp_path / name).touch()
    flush_tree(tmp_path)
    assert sorted(flushed) == sorted(str(path) for path in (tmp_path, *tmp_path.rglob("*"))) and flushed[-1] == str(tmp_path)


def test_make_folder_flushes_the_names_of_those_it_had_to_make(tmp_path: Path, flushed: list[str]) -> None:
    make_folder(tmp_path / "one" / "two")
    assert (tmp_path / "one" / "two").is_dir() and flushed == [str(tmp_path), str(tmp_path / "one")]
    with pytest.raises(FileExistsError):
        make_folder(tmp_path / "one")


@pytest.mark.parametrize("there", [True, False])
def test_swap_in_that_fails_gives_the_old_folder_its_name_back(tmp_path: Path, there: bool) -> None:
    partial, target, aside = (tmp_path / name for name in ("partial", "target", "aside"))
    if there:
        target.mkdir()
        (target / "old").touch()
    with pytest.raises(FileNotFoundError):
        swap_in(partial, target, aside)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == (["target", "target/old"] if there else [])
    partial.mkdir()
    swap_in(partial, target, aside)
    assert sorted(path.name for path in tmp_path.iterdir()) == (["aside", "target"] if there else ["target"])
    assert list(target.iterdir()) == []


def test_root_cause_is_the_systems_error_below_others_or_the_error() -> None:
    try:
        try:
            raise OSError(28, "No space left on device")
        except OSError as error:
            raise RuntimeError("unexpected pos 704 vs 598") from error
    except RuntimeError as error:
        assert root_cause(error) == "[Errno 28] No space left on device"
    assert root_cause(ValueError("other")) == "ValueError: other"
