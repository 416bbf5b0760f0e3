"""The files of a data set that is named by a folder: its shards, in order, once nothing speaks against reading them together."""

import os
import re
from collections.abc import Sequence

from slime_ppo.errors import DataError

_FORMATS = (".parquet", ".jsonl")
# what download tools and Spark put beside shards
_BESIDE = re.compile(r"[._].*|(readme|licen[cs]e)\b.*|.*\.md|(dataset_infos?|dataset_dict|state)\.json", re.IGNORECASE)
_NUMBERED = re.compile(r"-(?P<number>\d+)-of-(?P<count>\d+)\b")
_SPLIT = re.compile(r"(?<![a-z])(train|test|valid|validation|val|dev|eval)(?![a-z])")


def prompt_files(path: str, *, origin: str) -> tuple[str, ...]:
    """`path` itself, or where it is a folder the parquet or JSONL files in it (not below), by name, numbers in it as numbers.

    `origin` is the flag that named it. Hidden files, those that begin with an underscore, and README, license and dataset_info
    files are passed over. Raises DataError for a folder without shards, with shards of both formats, with any other file, with
    files of several splits (train and test), or without some of the shards that a name like train-00000-of-00008.parquet counts;
    OSError when it cannot be read.
    """
    if not os.path.isdir(path):
        return (path,)
    with os.scandir(path) as entries:
        found = sorted((entry.name for entry in entries if not entry.is_dir() and not _BESIDE.fullmatch(entry.name)), key=_natural)
    by_format = {suffix: [name for name in found if name.endswith(suffix)] for suffix in _FORMATS}
    others = [name for name in found if not name.endswith(_FORMATS)]
    problem = _mixture(found, by_format, others) or _split_problem(found) or _missing(found)
    if problem:
        raise DataError(f"prompt folder {path} ({origin}) {problem}")
    return tuple(os.path.join(path, name) for name in found)


def _natural(name: str) -> tuple[list[str | int], str]:
    """Text and numbers take turns, so that part 2 comes before part 10."""
    return [int(piece) if place % 2 else piece for place, piece in enumerate(re.split(r"([0-9]+)", name))], name


def _mixture(found: Sequence[str], by_format: dict[str, list[str]], others: Sequence[str]) -> str:
    if not any(by_format.values()):
        held = f"; it has {_some(others)}" if others else ""
        return f"holds no prompts: expected .parquet or .jsonl files in it{held}. Subfolders are not searched"
    if all(by_format.values()):
        counts = " and ".join(f"{len(names)} {suffix} files" for suffix, names in by_format.items())
        return f"mixes formats: {counts}. Name one file, or a folder with shards of one format"
    return f"holds {_some(others)} beside its {len(found) - len(others)} shards. Take away what is no shard" if others else ""


def _split_problem(found: Sequence[str]) -> str:
    """Of the names that say of which split they are; to train on the test split is no one's wish."""
    splits = {split[1] for name in found if (split := _SPLIT.search(name.lower()))}
    if len(splits) < 2:
        return ""
    return f"holds several splits ({', '.join(sorted(splits))}): {_some(found)}. Name one file, or give each split its own folder"


def _missing(found: Sequence[str]) -> str:
    """Shards that others count: a copy that has not come to its end."""
    sets: dict[tuple[str, int], set[int]] = {}
    for name in found:
        if numbered := _NUMBERED.search(name):
            sets.setdefault((name[: numbered.start()], int(numbered["count"])), set()).add(int(numbered["number"]))
    for (stem, count), numbers in sets.items():
        absent = sorted(set(range(count)) - numbers) if numbers <= set(range(count)) else []
        if absent:
            return f"has {len(numbers)} of the {count} shards of {stem!r}; number {absent[0]} is missing. Copy the folder again"
    return ""


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if names[4:] else "")
