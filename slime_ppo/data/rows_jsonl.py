"""Rows of a JSON Lines file: one object per line, UTF-8."""

import codecs
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, repeat
from typing import BinaryIO

from slime_ppo.data.row import RawRow
from slime_ppo.errors import DataError

# a file that is one JSON array without line ends would otherwise be read whole
_LONGEST_LINE_BYTES = 64 * 1024**2
# how files begin that are often taken for JSON Lines; the longer of two that begin alike comes first
_OTHERS = {
    b"\x1f\x8b": "compressed by gzip", b"PK\x03\x04": "a zip archive", b"\x28\xb5\x2f\xfd": "compressed by zstd",
    b"BZh": "compressed by bzip2", b"\xfd7zXZ": "compressed by xz", b"PAR1": "a parquet file whose name does not end in .parquet",
    codecs.BOM_UTF16_LE: "text in UTF-16", codecs.BOM_UTF16_BE: "text in UTF-16",
}  # fmt: skip


@dataclass(frozen=True)
class JsonLines:
    """See RowFile; in memory is one line at a time.

    Lines end at newlines only: a JSON string may hold other characters that `splitlines` takes for line ends. Blank lines at the
    end of the file are no rows, and a byte order mark at its beginning is no part of one.
    """

    file: str
    origin: str

    def num_rows(self) -> int:
        """Raises OSError, and DataError for a line that is too long to be a prompt or a file of another kind."""
        with open(self.file, "rb") as file:
            return sum(1 for _ in self._lines(file))

    def rows(self, start: int, end: int) -> Iterator[RawRow]:
        """Raises what `num_rows` does."""
        with open(self.file, "rb") as file:
            for index, line in islice(enumerate(self._lines(file)), start, end):
                yield _row(index, f"{self.file}:{index + 1}", line)

    def _lines(self, file: BinaryIO) -> Iterator[bytes]:
        self._skip_mark(file)
        number = num_blank = 0
        while line := file.readline(_LONGEST_LINE_BYTES + 1):
            number += 1
            if len(line) > _LONGEST_LINE_BYTES:
                raise DataError(
                    f"{self.file}:{number}: a line of more than {_LONGEST_LINE_BYTES} bytes. Expected JSON Lines, one object per "
                    "line; is the file a single JSON array, or of another format?"
                )
            if line.isspace():
                num_blank += 1
                continue
            yield from repeat(b"", num_blank)
            num_blank = 0
            yield line.removesuffix(b"\n")

    def _skip_mark(self, file: BinaryIO) -> None:
        """To the first byte of text. Raises DataError where the file is none."""
        head = file.read(8)
        for mark, what in _OTHERS.items():
            if head.startswith(mark):
                raise DataError(
                    f"prompt file {self.file} ({self.origin}) is {what}. Expected JSON Lines in UTF-8: unpack, convert or rename it"
                )
        file.seek(len(codecs.BOM_UTF8) if head.startswith(codecs.BOM_UTF8) else 0)


def _row(index: int, place: str, line: bytes) -> RawRow:
    if not line:
        return RawRow(index, place, None, "blank line; expected one JSON object per line. Remove the line")
    try:
        return RawRow(index, place, json.loads(line.decode("utf-8"), object_pairs_hook=_object))
    except UnicodeDecodeError as error:
        return RawRow(index, place, None, f"not UTF-8 (byte {error.start + 1} of the line). Save the file as UTF-8")
    except (ValueError, RecursionError) as error:
        problem = f"broken line, {error}; found {line[:60]!r}. Expected one JSON object per line"
        return RawRow(index, place, None, problem)


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """JSON leaves open which of two equal keys counts. Raises ValueError for them."""
    made = dict(pairs)
    if len(made) < len(pairs):
        [(twice, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {twice!r} stands twice in one object")
    return made
