"""Files that are there whole or not at all, and folders that appear when they are whole."""

import json
import os
import shutil
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from slime_ppo.checkpoint.layout import OLD, is_half
from slime_ppo.disk import flush
from slime_ppo.errors import CheckpointError


def write_atomically(path: Path, content: bytes) -> None:
    """Replace `path`: a reader, and whoever comes after a power cut, finds the old content or the new one."""
    beside = path.with_name(path.name + ".new")
    with beside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    flush(path.parent)


def publish_folder(partial: Path, final: Path) -> None:
    """Give a folder that is whole its name. What already has that name, and by the caller's word counts for nothing, goes."""
    flush(partial)
    if final.exists():
        delete_checkpoint(final)
    os.rename(partial, final)
    flush(final.parent)


def delete_checkpoint(folder: Path) -> None:
    """Delete the folder of a checkpoint, by another name: what a kill leaves of it is not taken for one that is whole."""
    if not is_half(folder):
        half = folder.with_name(folder.name + OLD)
        shutil.rmtree(half, ignore_errors=True)
        folder = folder.rename(half)
    shutil.rmtree(folder)


def json_bytes(content: Mapping[str, object]) -> bytes:
    """JSON for people to read."""
    return (json.dumps(content, indent=1) + "\n").encode("utf-8")


def read_json(path: Path, *, digest: str | None = None) -> dict[str, Any]:
    """The object in a file that we wrote. Raises CheckpointError naming the file when it is missing, cut short or edited: not
    JSON, or with `digest` another sha256."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if digest is not None and sha256(content).hexdigest() != digest:
        raise CheckpointError(f"{path} is not as it was written ({len(content)} bytes, another sha256): it was edited or damaged")
    try:
        found = json.loads(content)
    except ValueError as error:
        raise CheckpointError(f"{path} is not whole JSON ({error}): it was edited or damaged") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds a JSON {type(found).__name__}, expected an object: it was edited or damaged")
    return found


def file_sizes(folder: Path) -> dict[str, int]:
    """Bytes of every file below `folder`, by relative path."""
    return {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}


def size_problems(folder: Path, expected: Mapping[str, int]) -> list[str]:
    """What is missing in `folder`, or of another size than it was written with."""
    if not folder.is_dir():
        return [f"{folder} is not there"]
    found = file_sizes(folder)
    return [
        f"{folder / name} is missing" if name not in found else f"{folder / name} has {found[name]} bytes, {size} were written"
        for name, size in expected.items()
        if found.get(name) != size
    ]
