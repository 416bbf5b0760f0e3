"""A prompt file as it is named on the command line: a path, or some of its rows as path@[start:end]."""

import re
from dataclasses import dataclass

_SLICED = re.compile(r"(?P<file>.+)@\[(?P<start>-?\d+)?:(?P<end>-?\d+)?\]")


@dataclass(frozen=True)
class PromptPath:
    """Rows `start` to `end` (not included) of `file`, counted from 0; None and negative numbers mean what they do in a slice
    of a Python list.

    Examples: "math.jsonl" is all of it, "math.jsonl@[:1000]" the first thousand rows, "math.parquet@[-100:]" the last hundred.
    """

    file: str
    start: int | None = None
    end: int | None = None

    @classmethod
    def parse(cls, text: str) -> "PromptPath":
        """Raises ValueError for a slice that cannot be read."""
        found = _SLICED.fullmatch(text)
        if found is not None:
            start, end = (None if bound is None else int(bound) for bound in (found["start"], found["end"]))
            return cls(found["file"], start, end)
        if "@[" in text:
            raise ValueError(f"{text!r} is no path@[start:end] with two whole numbers, either of which may be left out")
        return cls(text)

    def rows(self, num_rows: int) -> range:
        """The rows that are meant, of a file of `num_rows`."""
        return range(num_rows)[self.start : self.end]

    @property
    def counts_from_end(self) -> bool:
        """True when the number of rows must be known to tell which rows are meant."""
        return any(bound is not None and bound < 0 for bound in (self.start, self.end))
