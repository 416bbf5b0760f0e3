"""What the converters ask of a folder before they write it, and of their input until they have."""

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from slime_ppo.config.hf_folder import COMPANION_FILES, check_replaceable, staging_folders
from slime_ppo.conversion.torch_dist import BACKEND_FILE, COMMON_FILE, HF_FOLDER, METADATA_FILE
from slime_ppo.conversion.torch_dist_folder import LATEST_FILE, iteration_folder
from slime_ppo.errors import CheckpointError

ITERATION = iteration_folder(0)
Stamps = dict[Path, tuple[int, int, int]]
"""File -> (inode, bytes, time of the last change in ns)."""


def check_hf_output(out: Path, *, sources: Iterable[Path], num_bytes: int) -> None:
    """Return if an export of `num_bytes` may be written to `out`: it is apart from the `sources`, there is room, and nothing is
    replaced but an earlier export.

    Raises CheckpointError.
    """
    _check_output(out, sources, num_bytes, check_replaceable)


def check_torch_dist_output(out: Path, *, sources: Iterable[Path], num_bytes: int) -> None:
    """As `check_hf_output`, for a converted torch_dist folder."""
    _check_output(out, sources, num_bytes, check_torch_dist_replaceable)


def _check_output(out: Path, sources: Iterable[Path], num_bytes: int, check: Callable[[Path], None]) -> None:
    target = Path(os.path.realpath(out))
    folders = (target, *staging_folders(target))
    for source in sources:
        for folder in folders:
            _require_apart(Path(os.path.realpath(source)), folder)
    if os.path.ismount(target):
        raise CheckpointError(f"{target} is a mount point, which no folder can be renamed to. Write to a folder in it")
    _require_room(target, num_bytes)
    for folder in folders:
        check(folder)


def check_torch_dist_replaceable(folder: Path) -> None:
    """Return if `folder` may be removed to make room: it is not there, or holds nothing but a conversion's files.

    Raises CheckpointError naming what else it holds: checkpoints of a training run, and whatever else a user names, must survive.
    """
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file, expected a folder to write to. Write elsewhere")
    foreign = [
        path for path in folder.rglob("*") if path.is_symlink() or (path.is_file() and not _is_ours(path.relative_to(folder)))
    ]
    if foreign:
        raise CheckpointError(
            f"{folder} holds {foreign[0].relative_to(folder)}: it is not an earlier conversion, so it is not replaced. Write to a "
            "new or empty folder, or move this file away"
        )


def _is_ours(path: Path) -> bool:
    if path == Path(LATEST_FILE):
        return True
    if path.parent == Path(HF_FOLDER):
        return path.name in ("config.json", *COMPANION_FILES)
    known = path.name in (METADATA_FILE, f"{METADATA_FILE}.tmp", BACKEND_FILE, COMMON_FILE) or path.suffix == ".distcp"
    return known and path.parent == Path(ITERATION)


def _require_apart(source: Path, out: Path) -> None:
    """Neither may be the other or lie in it: the output is renamed to its place, and what was there is removed."""
    if source == out or source in out.parents or out in source.parents:
        raise CheckpointError(f"the output {out} and the input {source} lie in each other. Write elsewhere")


def _require_room(out: Path, num_bytes: int) -> None:
    parent = next(path for path in out.parents if path.exists())
    if not parent.is_dir():
        raise CheckpointError(f"{parent} is a file, so {out} cannot be made. Write elsewhere")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise CheckpointError(f"{parent} cannot be written: it is read-only, or belongs to someone else. Write elsewhere")
    free = shutil.disk_usage(parent).free
    if free < num_bytes:
        raise CheckpointError(f"{parent} has {free / 1e9:.1f} GB free, the output needs {num_bytes / 1e9:.1f} GB. Make room")


def stamps(folder: Path, names: Iterable[str]) -> Stamps:
    """Of the files in `folder` that are there."""
    found = {}
    for path in (folder / name for name in dict.fromkeys(names)):
        if path.is_file():
            state = path.stat()
            found[path] = (state.st_ino, state.st_size, state.st_mtime_ns)
    return found


def config_stamps(folder: Path) -> Stamps:
    """Of config.json and the tokenizer files in `folder`."""
    return stamps(folder, ("config.json", *COMPANION_FILES))


@contextmanager
def whole_or_nothing(out: Path, sources: Stamps, discard: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """Calls `discard` when anything goes wrong in the block, also an interrupt. In it, call what is given when all is read.

    Raises CheckpointError when the disk is full, and when one of the `sources` has changed since it was stamped, which also comes
    before what else went wrong.
    """

    def require_unchanged() -> None:
        changed = [path for path, stamp in sources.items() if stamps(path.parent, [path.name]).get(path) != stamp]
        if changed:
            raise CheckpointError(f"{changed[0]} has changed while it was read, so nothing is written. Convert again")

    try:
        yield require_unchanged
    except BaseException as error:
        discard()
        if isinstance(error, Exception):
            require_unchanged()
        if isinstance(error, OSError):
            raise CheckpointError(f"{out} cannot be written ({error}): make room, or write elsewhere") from error
        raise
