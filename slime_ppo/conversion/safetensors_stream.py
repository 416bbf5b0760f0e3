"""A safetensors file written tensor by tensor: its header is known before the first of them is made.

safetensors' own writer wants all tensors of a file at once, and copies them into one more block of bytes.
"""

import json
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf, prod
from pathlib import Path

import torch

from slime_ppo.errors import CheckpointError

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor that is yet to be made."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def write_safetensors(
    path: Path, planned: Mapping[str, PlannedTensor], make: Callable[[str], torch.Tensor], progress: Callable[[int], None]
) -> None:
    """Write the tensors in the order of `planned` and flush them to the disk. `progress` is told the bytes of each.

    Raises CheckpointError when the file can't be written, and for a number that is too large for its type.
    """
    try:
        with path.open("wb") as file:
            file.write(_header(planned))
            for name, plan in planned.items():
                tensor = _as_type(name, make(name), plan.dtype).contiguous()
                if tuple(tensor.shape) != plan.shape:
                    raise AssertionError(f"{name} is {list(tensor.shape)}, planned as {list(plan.shape)}")
                file.write(tensor.view(-1).view(torch.uint8).numpy().data)
                progress(plan.num_bytes)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written ({error}): make room, or write elsewhere") from error


def _as_type(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A finite weight stays one: bfloat16 and float32 hold numbers that would be infinite in float16."""
    most = torch.finfo(dtype).max
    if most < torch.finfo(tensor.dtype).max:
        largest = max(abs(bound.item()) for bound in tensor.aminmax())
        if most < largest < inf:
            raise CheckpointError(f"{name} holds {largest:g}, and {dtype} nothing above {most:g}. Take bfloat16 or float32")
    return tensor.to(dtype)


def _header(planned: Mapping[str, PlannedTensor]) -> bytes:
    """Eight bytes of little-endian length, then JSON, padded so that the tensors start at a multiple of eight."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, plan in planned.items():
        end = start + plan.num_bytes
        entries[name] = {"dtype": _NAMES[plan.dtype], "shape": list(plan.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def split_into_files(planned: Mapping[str, PlannedTensor], max_bytes: int) -> list[dict[str, PlannedTensor]]:
    """The tensors in their order, cut so that no file is larger than `max_bytes` unless one tensor alone is."""
    files: list[dict[str, PlannedTensor]] = []
    size = 0
    for name, plan in planned.items():
        if not files or size + plan.num_bytes > max_bytes:
            files.append({})
            size = 0
        files[-1][name] = plan
        size += plan.num_bytes
    return files
