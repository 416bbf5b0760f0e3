"""Safetensors files that are written tensor by tensor: as other readers want them, and of the size that was asked for."""

import struct
from pathlib import Path

import torch
from safetensors.torch import load_file

from slime_ppo.conversion.safetensors_stream import PlannedTensor, split_into_files, write_safetensors


def _planned(numel: int) -> PlannedTensor:
    return PlannedTensor((numel,), torch.float32)


def test_write_safetensors_begins_its_tensors_at_a_multiple_of_eight_whatever_they_are_called(tmp_path: Path) -> None:
    for letters in range(1, 9):
        tensors = {"w" * letters: torch.arange(3.0), "v": torch.ones(2)}
        planned = {name: _planned(len(tensor)) for name, tensor in tensors.items()}
        write_safetensors(tmp_path / "file", planned, tensors.__getitem__, lambda num_bytes: None)
        (length,) = struct.unpack("<Q", (tmp_path / "file").read_bytes()[:8])
        assert length % 8 == 0
        found = load_file(tmp_path / "file")
        assert {name: tensor.tolist() for name, tensor in found.items()} == {"w" * letters: [0, 1, 2], "v": [1, 1]}


def test_split_into_files_keeps_to_the_size_but_for_a_tensor_that_is_larger_alone() -> None:
    planned = {name: _planned(numel) for name, numel in {"a": 2, "b": 1, "c": 2, "d": 9, "e": 1, "f": 2}.items()}
    assert [list(file) for file in split_into_files(planned, 12)] == [["a", "b"], ["c"], ["d"], ["e", "f"]]
