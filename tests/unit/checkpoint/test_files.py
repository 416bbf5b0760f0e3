"""In which order names and contents reach the disk."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from slime_ppo.checkpoint.files import publish_folder, size_problems, write_atomically

Did = Callable[[], list[str]]


@pytest.fixture
def did(monkeypatch: pytest.MonkeyPatch) -> Did:
    """What was flushed and renamed, by name, in order."""
    journal: list[str] = []
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def name_of(descriptor: int) -> str:
        return Path(os.readlink(f"/proc/self/fd/{descriptor}")).name

    monkeypatch.setattr(os, "fsync", lambda fd: (journal.append(f"flush {name_of(fd)}"), fsync(fd)))
    monkeypatch.setattr(os, "rename", lambda a, b: (journal.append(f"rename to {Path(b).name}"), rename(a, b)))
    monkeypatch.setattr(os, "replace", lambda a, b: (journal.append(f"replace {Path(b).name}"), replace(a, b)))
    return lambda: journal


def test_write_atomically_has_the_content_on_disk_before_the_name_and_the_name_before_it_returns(tmp_path: Path, did: Did) -> None:
    write_atomically(tmp_path / "list", b"old")
    del did()[:]
    write_atomically(tmp_path / "list", b"new")
    assert did() == ["flush list.new", "replace list", f"flush {tmp_path.name}"]
    assert (tmp_path / "list").read_bytes() == b"new"


def test_write_atomically_that_fails_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_atomically(tmp_path / "list", b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(tmp_path / "list", b"new")
    assert (tmp_path / "list").read_bytes() == b"old"


def test_publish_folder_has_its_names_on_disk_before_and_its_own_after(tmp_path: Path, did: Did) -> None:
    partial, final = tmp_path / "iter.partial", tmp_path / "iter"
    partial.mkdir()
    publish_folder(partial, final)
    assert did() == ["flush iter.partial", "rename to iter", f"flush {tmp_path.name}"]


def test_size_problems_names_what_is_missing_and_what_was_cut(tmp_path: Path) -> None:
    for name, size in (("whole", 3), ("cut", 2)):
        (tmp_path / name).write_bytes(bytes(size))
    assert size_problems(tmp_path, {"whole": 3, "cut": 3, "lost": 3}) == [
        f"{tmp_path}/cut has 2 bytes, 3 were written",
        f"{tmp_path}/lost is missing",
    ]
