"""Prompts that are ready to be drawn, on disk: in memory is 8 bytes for each."""

import json
import os
import struct
import tempfile
from array import array
from collections.abc import Sequence
from typing import overload

import numpy as np

from slime_ppo.errors import DataError
from slime_ppo.types.sample import Prompt

_HEADER = struct.Struct("<I")


class PromptStore(Sequence[Prompt]):
    """A sequence of prompts in a temporary file, which ends with the process however that ends.

    Reading any of them takes one read of its bytes, whatever format they came from, and a prompt file that is changed during
    the run does not change the run. The file takes about the space of the prompt file, in the folder that TMPDIR names.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="slime_ppo_prompts_")  # noqa: SIM115  as long as this object lives
        # ends[i] is where record i ends; array doubles in place, a list of ints would take 40 bytes each
        self._ends = array("q")
        self._size = 0

    def append(self, prompt: Prompt) -> None:
        """Add a prompt behind the others. Raises DataError when the disk is full."""
        fields = [prompt.index, prompt.text, prompt.label, prompt.metadata]
        header = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
        try:
            written = self._file.write(_HEADER.pack(len(header)) + header + prompt.token_ids.astype("<i4").tobytes())
        except OSError as error:
            raise self._cannot_write(error) from error
        self._size += written
        self._ends.append(self._size)

    def seal(self) -> None:
        """Make everything that was appended readable. Raises DataError when the disk is full."""
        try:
            self._file.flush()
        except OSError as error:
            raise self._cannot_write(error) from error

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...

    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...

    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        places = range(len(self))[index]
        return self._read(places) if isinstance(places, int) else [self._read(place) for place in places]

    def _read(self, place: int) -> Prompt:
        start = self._ends[place - 1] if place else 0
        record = os.pread(self._file.fileno(), self._ends[place] - start, start)
        split = _HEADER.size + _HEADER.unpack_from(record)[0]
        index, text, label, metadata = json.loads(record[_HEADER.size : split].decode("utf-8", "surrogatepass"))
        token_ids = np.frombuffer(record, "<i4", offset=split).astype(np.int32)
        return Prompt(index=index, text=text, token_ids=token_ids, label=label, metadata=metadata)

    def _cannot_write(self, error: OSError) -> DataError:
        return DataError(
            f"prompts are kept in a temporary file in {tempfile.gettempdir()}, which cannot be written after {self._size} bytes: "
            f"{error.strerror}. Make room there, or set TMPDIR to a folder with room for the prompt files"
        )
