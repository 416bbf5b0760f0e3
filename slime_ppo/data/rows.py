"""Rows of a prompt file, one at a time: what the readers of the file formats have in common."""

from collections.abc import Iterator
from dataclasses import dataclass

from slime_ppo.config.prompt_path import PromptPath
from slime_ppo.errors import DataError


class BrokenRow(Exception):
    """Why a row holds no prompt, and what to do; whether that ends the run is --broken-row's business."""


@dataclass(frozen=True)
class RawRow:
    """One row as it was read: an object of JSON's types, if all is well. `index` is the row in the file, from 0, `place` how a
    message names it; `problem` says why there is no `content`, "" when there is. `is_padded`: objects in it have every key that one
    in any row of the file has, with null where they had none.
    """

    index: int
    place: str
    content: object
    problem: str = ""
    is_padded: bool = False


def read_rows(path: PromptPath, *, origin: str) -> Iterator[RawRow]:
    """The rows that `path` names, read as they are asked for: parquet where the name ends in .parquet, otherwise JSON Lines.

    `origin` is the flag that named the file. Raises DataError for a file that cannot be read.
    """
    try:
        if path.file.endswith(".parquet"):
            # pyarrow takes a third of a second and 60 MB: only where it is needed
            from slime_ppo.data.rows_parquet import read_parquet

            yield from read_parquet(path, origin)
        else:
            from slime_ppo.data.rows_jsonl import read_jsonl

            yield from read_jsonl(path)
    except OSError as error:
        raise DataError(
            f"prompt file {path.file} ({origin}) cannot be read: {error.strerror or error}. Expected a JSONL or parquet file; "
            "relative paths start at the folder the command runs in"
        ) from error
