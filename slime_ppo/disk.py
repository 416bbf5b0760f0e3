"""What must be on disk before it counts as written, and folders that take a name when they are whole. Standard library only."""

import os
from pathlib import Path


def flush(path: Path) -> None:
    """Of a file the content, of a folder the names: after a power cut they are there."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def flush_tree(folder: Path) -> None:
    """Everything below a folder, and the folder."""
    for path in folder.rglob("*"):
        flush(path)
    flush(folder)


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it that are not there; their names are then on disk. Raises FileExistsError."""
    if not folder.parent.exists():
        make_folder(folder.parent)
    folder.mkdir()
    flush(folder.parent)


def swap_in(partial: Path, target: Path, aside: Path) -> None:
    """Name the whole folder `partial` `target`. What had that name is `aside` afterwards, and has its name back if this fails."""
    try:
        if target.exists():
            target.rename(aside)
        partial.rename(target)
    except BaseException:
        if aside.exists() and not target.exists():
            aside.rename(target)
        raise


def root_cause(error: BaseException) -> str:
    """The system's error below one of torch's, which says nothing of a full disk; else the error's own type and words."""
    below: BaseException | None = error
    while below is not None:
        if isinstance(below, OSError):
            return str(below)
        below = below.__cause__ or below.__context__
    return f"{type(error).__name__}: {error}"
