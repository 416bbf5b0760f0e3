"""What the command lines on checkpoints share: how they start and fail, sizes in words, a progress bar, and care for what is there.
No torch."""

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from slime_ppo.config.hf_folder import staging_folders
from slime_ppo.errors import CheckpointError, ConfigError, SlimePpoError

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def tool_parser(description: str | None, example: str) -> argparse.ArgumentParser:
    """A parser without abbreviations, whose help shows both texts as they are written."""
    return argparse.ArgumentParser(
        description=description, epilog=example, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def run_tool(parser: argparse.ArgumentParser, action: Callable[[argparse.Namespace], int], argv: Sequence[str]) -> int:
    """The exit code: that of `action`, 2 with one line when its input is bad, or 130 after Ctrl-C."""
    arguments = parser.parse_args(argv)
    try:
        return action(arguments)
    except (SlimePpoError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except KeyboardInterrupt:  # writers remove what is not whole
        sys.stderr.write("interrupted: an output is there as a whole or not at all, and nothing half-written is left\n")
        return 130


def size_words(num_bytes: int) -> str:
    """As in "1.5 MB"; units are powers of 1000."""
    unit = next((name for name, factor in reversed(_UNITS.items()) if num_bytes >= factor), None)
    return f"{num_bytes} bytes" if unit is None else f"{num_bytes / _UNITS[unit]:.1f} {unit}"


def parse_size(text: str) -> int:
    """Bytes of "500MB" or "5GB". Raises ConfigError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]B)", text.strip().upper())
    if found is None or float(found[1]) == 0:
        raise ConfigError(f"{text!r} is no size, expected a number above 0 and one of {', '.join(_UNITS)}, as in 5GB")
    return int(float(found[1]) * _UNITS[found[2]])


def require_empty(out: Path, *, force: bool) -> None:
    """Raises CheckpointError for an output that holds something, unless `force`: writers then replace what is their own. So they do
    in the folder where what they replace waits for its removal: a user may have set a model aside under this name, or a writer that
    was killed.
    """
    if force:
        return
    _, replaced = staging_folders(Path(os.path.realpath(out)))
    for folder, why in ((out, ""), (replaced, f", and is removed when {out} is written")):
        if folder.is_dir() and any(folder.iterdir()):
            raise CheckpointError(
                f"{folder} is not empty{why}. Write to a new folder, or replace an earlier conversion with --force"
            )


@contextmanager
def progress_bar(total: int, text: str, unit: str = "B") -> Iterator[Callable[[int], None]]:
    """A function that is told how many units, bytes by default, are done; a bar shows them on a terminal."""
    with tqdm(total=total, desc=text, unit=unit, unit_scale=unit == "B", leave=False, disable=not sys.stderr.isatty()) as bar:

        def advance(done: int) -> None:
            bar.update(done)

        yield advance
