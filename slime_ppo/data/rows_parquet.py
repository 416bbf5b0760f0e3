"""Rows of a parquet file, read batch by batch."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

import pyarrow as pa
import pyarrow.parquet as pq

from slime_ppo.data.row import RawRow
from slime_ppo.errors import DataError

_BATCH_ROWS = 64
# compressed pages are read through a buffer of this size, not a column of a row group at once
_BUFFER_BYTES = 1024**2
_PLAIN_TYPES = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class ParquetFile:
    """See RowFile; columns that hold bytes (images) are not read.

    Values become what JSON has: a date, a time or a decimal number its text, a map an object.
    """

    file: str
    origin: str

    def num_rows(self) -> int:
        """Raises OSError, and DataError for a file that is no whole parquet file."""
        with self._opened() as file:
            return int(file.metadata.num_rows)

    def rows(self, start: int, end: int) -> Iterator[RawRow]:
        """Row groups without any of the rows are not read. Raises what `num_rows` does."""
        with self._opened() as file:
            yield from self._rows(file, start, end)

    @contextmanager
    def _opened(self) -> Iterator[pq.ParquetFile]:
        try:
            with pq.ParquetFile(self.file, pre_buffer=False, buffer_size=_BUFFER_BYTES) as file:
                yield file
        except pa.ArrowException as error:
            raise DataError(
                f"prompt file {self.file} ({self.origin}) is no parquet file that can be read: {error}. Copy it again from "
                "where it came from"
            ) from error

    def _rows(self, file: pq.ParquetFile, start: int, end: int) -> Iterator[RawRow]:
        counts = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
        ends = list(accumulate(counts))
        groups = [group for group, last in enumerate(ends) if last > start and last - counts[group] < end]
        columns = [field.name for field in file.schema_arrow if not _holds_bytes(field.type)]
        index = ends[groups[0]] - counts[groups[0]] if groups else 0
        for batch in file.iter_batches(_BATCH_ROWS, row_groups=groups, columns=columns, use_threads=False):
            first, last = max(index, start), min(index + len(batch), end)
            kept = batch.slice(first - index, max(0, last - first))
            for place, content in enumerate(_contents(kept), start=first):
                problem, found = (content, None) if isinstance(content, str) else ("", content)
                yield RawRow(place, f"{self.file}[{place}]", found, problem, is_padded=True)
            index += len(batch)
            if index >= end:
                return


def _contents(batch: pa.RecordBatch) -> list[dict[str, object] | str]:
    """Each row, or why it cannot be read: text that is not UTF-8, a time to the nanosecond, a day after the year 9999."""
    try:
        return [{key: _as_json(value) for key, value in row.items()} for row in batch.to_pylist()]
    except (ValueError, OverflowError) as error:
        if len(batch) == 1:
            return [f"a value that cannot be read, {error}. Write the file again with one that can"]
    return [content for row in range(len(batch)) for content in _contents(batch.slice(row, 1))]


def _holds_bytes(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _holds_bytes(kind.value_type)
    is_bytes = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary, pa.types.is_binary_view)
    return any(check(kind) for check in is_bytes) or any(_holds_bytes(kind.field(i).type) for i in range(kind.num_fields))


def _as_json(value: object) -> object:
    if isinstance(value, dict):
        return {str(key): _as_json(entry) for key, entry in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], tuple):  # a map; older versions of pyarrow have no other form
        return {str(key): _as_json(entry) for key, entry in value}
    if isinstance(value, list):
        return [_as_json(entry) for entry in value]
    return value if isinstance(value, _PLAIN_TYPES) else str(value)
