"""Rows of a prompt file, one at a time: what the readers of the file formats have in common."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from slime_ppo.config.prompt_files import prompt_files
from slime_ppo.config.prompt_path import PromptPath
from slime_ppo.errors import DataError


class BrokenRow(Exception):
    """Why a row holds no prompt, and what to do; whether that ends the run is --broken-row's business."""


@dataclass(frozen=True)
class RawRow:
    """One row as it was read: an object of JSON's types, if all is well. `index` is the row in the data set, from 0, `place` how a
    message names it, by its file and its row there; `problem` says why there is no `content`, "" when there is. `is_padded`:
    objects in it have every key that one in any row of the file has, with null where they had none.
    """

    index: int
    place: str
    content: object
    problem: str = ""
    is_padded: bool = False


class RowFile(Protocol):
    """A file of one format. Both raise OSError, and DataError for a file of another format."""

    def num_rows(self) -> int:
        """How many rows it has."""
        ...

    def rows(self, start: int, end: int) -> Iterator[RawRow]:
        """Its rows from `start` to `end` (not included), or to its end, read as they are asked for."""
        ...


def read_rows(path: PromptPath, *, origin: str) -> Iterator[RawRow]:
    """The rows that `path` names, read as they are asked for: parquet where the name ends in .parquet, otherwise JSON Lines. Those
    of a folder are those of its shards (`prompt_files`) one after the other, and so are their numbers.

    `origin` is the flag that named the file. Raises DataError for what cannot be read.
    """
    file = path.file
    try:
        files = prompt_files(path.file, origin=origin)
        if path.counts_from_end:
            num_rows = 0
            for file in files:
                num_rows += _opened(file, origin).num_rows()
            wanted = path.rows(num_rows)
            start, end = wanted.start, wanted.stop
        else:
            start, end = (min(bound, sys.maxsize) for bound in (path.start or 0, sys.maxsize if path.end is None else path.end))
        first = 0
        for file in files:
            if first >= end:
                break
            shard = _opened(file, origin)
            # where rows begin in a later shard, those before are counted and not read
            may_skip = start > first and file != files[-1]
            num_rows = shard.num_rows() if may_skip else 0
            if not may_skip or start < first + num_rows:
                for row in shard.rows(max(start - first, 0), end - first):
                    yield replace(row, index=first + row.index) if first else row
                    num_rows = max(num_rows, row.index + 1)
            first += num_rows
    except OSError as error:
        raise DataError(
            f"prompt file {file} ({origin}) cannot be read: {error.strerror or error}. Expected a JSONL or parquet file, or a "
            "folder of either; relative paths start at the folder the command runs in"
        ) from error


def _opened(file: str, origin: str) -> RowFile:
    if file.endswith(".parquet"):
        # pyarrow takes a third of a second and 60 MB: only where it is needed
        from slime_ppo.data.rows_parquet import ParquetFile

        return ParquetFile(file, origin)
    from slime_ppo.data.rows_jsonl import JsonLines

    return JsonLines(file, origin)
