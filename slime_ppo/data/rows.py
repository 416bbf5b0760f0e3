"""Rows of a prompt file or of a folder of shards, one at a time."""

import sys
from collections.abc import Iterator
from dataclasses import replace

from slime_ppo.config.prompt_files import prompt_files
from slime_ppo.config.prompt_path import PromptPath
from slime_ppo.data.row import RawRow, RowFile
from slime_ppo.errors import DataError


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
