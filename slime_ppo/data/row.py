"""A row of a prompt file, and the file that it comes from, whatever its format."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol


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
