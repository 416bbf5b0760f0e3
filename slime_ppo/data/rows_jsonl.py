"""Rows of a JSON Lines file: one object per line, UTF-8."""

import json
from collections.abc import Iterator
from itertools import islice
from typing import BinaryIO

from slime_ppo.config.prompt_path import PromptPath
from slime_ppo.data.rows import RawRow
from slime_ppo.errors import DataError

# a file that is one JSON array without line ends would otherwise be read whole
_LONGEST_LINE_BYTES = 64 * 1024**2


def read_jsonl(path: PromptPath) -> Iterator[RawRow]:
    """The rows that `path` names; in memory is one line at a time.

    Lines end at newlines only: a JSON string may hold other characters that `splitlines` takes for line ends. Raises OSError,
    and DataError for a line that is too long to be a prompt.
    """
    start, end = path.start or 0, path.end
    if path.counts_from_end:
        with open(path.file, "rb") as file:
            rows = path.rows(sum(1 for _ in _lines(file, path.file)))
        start, end = rows.start, rows.stop
    with open(path.file, "rb") as file:
        for index, line in islice(enumerate(_lines(file, path.file)), start, end):
            yield _row(index, f"{path.file}:{index + 1}", line)


def _lines(file: BinaryIO, name: str) -> Iterator[bytes]:
    number = 0
    while line := file.readline(_LONGEST_LINE_BYTES + 1):
        number += 1
        if len(line) > _LONGEST_LINE_BYTES:
            raise DataError(
                f"{name}:{number}: a line of more than {_LONGEST_LINE_BYTES} bytes. Expected JSON Lines, one object per line; is "
                "the file a single JSON array, or of another format?"
            )
        yield line.removesuffix(b"\n")


def _row(index: int, place: str, line: bytes) -> RawRow:
    if not line.strip():
        return RawRow(index, place, None, "blank line; expected one JSON object per line. Remove the line")
    try:
        return RawRow(index, place, json.loads(line.decode("utf-8")))
    except UnicodeDecodeError as error:
        return RawRow(index, place, None, f"not UTF-8 (byte {error.start + 1} of the line). Save the file as UTF-8")
    except (ValueError, RecursionError) as error:
        problem = f"broken line, {error}; found {line[:60]!r}. Expected one JSON object per line"
        return RawRow(index, place, None, problem)
