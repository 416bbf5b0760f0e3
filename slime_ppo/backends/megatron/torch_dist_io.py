"""Rectangles of tensors to and from the files of a torch_dist folder, by torch.distributed.checkpoint.

Each rank writes one file, tensor by tensor, and the first rank writes what lies where. Nothing here forks or spawns: Megatron's own
writer does both, which asks for a main guard and a process without threads, and a rank under Ray or torchrun has neither.
"""

import io
import math
import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from slime_ppo.conversion.torch_dist import METADATA_FILE
from slime_ppo.errors import CheckpointError

_READ_ERRORS = (OSError, RuntimeError, EOFError, ValueError, AssertionError, KeyError, AttributeError, pickle.UnpicklingError)


@dataclass(frozen=True)
class Piece:
    """A rectangle of the stored tensor `key`, which is `whole` in all; `tensor` has the rectangle's shape. `of_vocabulary`: a
    tensor with more rows will do, too."""

    key: str
    whole: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: torch.Tensor
    of_vocabulary: bool

    def fits(self, whole: tuple[int, ...]) -> bool:
        """True when the rectangle can be read from a tensor of this shape."""
        return whole == self.whole or (self.of_vocabulary and whole[1:] == self.whole[1:] and whole[0] > self.whole[0])

    @property
    def index(self) -> MetadataIndex:
        return MetadataIndex(self.key, self.offsets)

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(offsets=torch.Size(self.offsets), sizes=self.tensor.shape)


@dataclass(frozen=True)
class Written:
    """What one rank has put into its file."""

    items: list[WriteItem]
    results: list[WriteResult]


class RankWriter:
    """One rank's file: `pieces`, and `objects` by key, as bytes.

    torch's own writer keeps host copies of all tensors of a file until it is closed; here there is one at a time.
    """

    def __init__(self, folder: Path, pieces: Sequence[Piece], objects: Mapping[str, bytes], *, rank: int) -> None:
        self._path = folder / f"__{rank}_0.distcp"
        self._items = [WriteItem(index=MetadataIndex(key), type=WriteItemType.BYTE_IO) for key in objects]
        self._items += [_write_item(piece) for piece in pieces]
        self._data: list[torch.Tensor | bytes] = [*objects.values(), *(piece.tensor for piece in pieces)]

    def detach(self) -> None:
        """Copy what is to be written to the host, so that training may go on."""
        self._data = [held.detach().to("cpu", copy=True) if isinstance(held, torch.Tensor) else held for held in self._data]

    def write(self) -> Written:
        """Write and flush the file."""
        results = []
        with self._path.open("wb") as file:
            for item, held in zip(self._items, self._data, strict=True):
                start = file.tell()
                if isinstance(held, bytes):
                    file.write(held)
                else:
                    torch.save(_on_host(held), file)
                length = file.tell() - start
                results.append(WriteResult(item.index, length, _StorageInfo(self._path.name, start, length)))
            file.flush()
            os.fsync(file.fileno())
        return Written(self._items, results)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in host memory of its own: torch.save writes all of the memory that a tensor is a part of. One that is there
    already stays."""
    tensor = tensor.detach()
    alone = tensor.device.type == "cpu" and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if alone else tensor.to("cpu", copy=True)


def _write_item(piece: Piece) -> WriteItem:
    properties = TensorProperties(dtype=piece.tensor.dtype)
    data = TensorWriteData(chunk=piece.chunk, properties=properties, size=torch.Size(piece.whole))
    return WriteItem(index=piece.index, type=WriteItemType.SHARD, tensor_data=data)


def write_metadata(folder: Path, written: Sequence[Written]) -> None:
    """What lies in which rank's file; after it the folder can be read. Raises CheckpointError when not all files are here."""
    names = {result.storage_data.relative_path for one in written for result in one.results}
    absent = sorted(name for name in names if not (folder / name).is_file())
    if absent:
        raise CheckpointError(
            f"{folder} has no {', '.join(absent)} where the first rank runs, although other ranks have written it: the run folder "
            "must be the same one on all nodes"
        )
    _, metadata = create_default_global_save_plan([SavePlan(one.items) for one in written])
    FileSystemWriter(folder).finish(metadata, [one.results for one in written])


class TorchDistFolder:
    """A torch_dist folder as it is read: which tensors it holds, and their rectangles."""

    def __init__(self, folder: Path) -> None:
        """Raises CheckpointError when the folder's table of contents is missing or can't be read."""
        self.path = folder
        self._reader = FileSystemReader(folder)
        try:
            self._metadata: Metadata = self._reader.read_metadata()
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{folder} is no torch_dist checkpoint: it has no {METADATA_FILE}, which is written last. Load another one"
            ) from error
        except _READ_ERRORS as error:
            raise CheckpointError(
                f"{folder / METADATA_FILE} cannot be read ({type(error).__name__}: {error}). Load an earlier checkpoint"
            ) from error
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=False)

    @property
    def keys(self) -> set[str]:
        """Names of tensors and objects."""
        return set(self._metadata.state_dict_metadata)

    @property
    def tensor_keys(self) -> set[str]:
        """Names of tensors."""
        return {key for key, found in self._metadata.state_dict_metadata.items() if isinstance(found, TensorStorageMetadata)}

    def tensor(self, key: str) -> TensorStorageMetadata:
        """Shape, dtype and chunks of a tensor. Raises CheckpointError when `key` is an object."""
        found = self._metadata.state_dict_metadata[key]
        if not isinstance(found, TensorStorageMetadata):
            raise CheckpointError(f"{self.path}: {key} is an object, expected a tensor. Load another checkpoint")
        return found

    def holds(self, key: str, whole: tuple[int, ...]) -> bool:
        """True when there is a tensor of this name and shape."""
        return key in self.tensor_keys and tuple(self.tensor(key).size) == whole

    def plan(self, pieces: Sequence[Piece]) -> list[ReadItem]:
        """What to read to fill `pieces`, whose keys are all there. Raises CheckpointError naming a tensor with a hole, or a file
        that is missing or too short."""
        by_key: dict[str, list[Piece]] = {}
        for piece in pieces:
            by_key.setdefault(piece.key, []).append(piece)
        items: list[ReadItem] = []
        for key, wanted in by_key.items():
            found = create_read_items_for_chunk_list(key, self.tensor(key), [piece.chunk for piece in wanted])
            missing = sum(piece.tensor.numel() for piece in wanted) - sum(math.prod(item.lengths) for item in found)
            if missing:
                raise CheckpointError(
                    f"{self.path}: {missing} elements of {key} are in none of its files. Load an earlier checkpoint"
                )
            items += found
        self._check_files(items)
        return items

    def read(self, items: Sequence[ReadItem], pieces: Sequence[Piece]) -> None:
        """Fill the pieces, in place. Raises CheckpointError naming the file that can't be read."""
        planner = _Target({piece.index: piece.tensor for piece in pieces})
        by_file: dict[str, list[ReadItem]] = {}
        for item in items:
            by_file.setdefault(self._home(item).relative_path, []).append(item)
        for file, of_file in by_file.items():
            self._read_file(file, of_file, planner)

    def read_object(self, key: str) -> bytes:
        """The bytes of an object. Raises CheckpointError."""
        index = MetadataIndex(key)
        item = ReadItem(LoadItemType.BYTE_IO, index, torch.Size([0]), index, torch.Size([0]), torch.Size([0]))
        self._check_files([item])
        planner = _Target({})
        self._read_file(self._home(item).relative_path, [item], planner)
        return planner.objects[key]

    def _read_file(self, file: str, items: list[ReadItem], planner: "_Target") -> None:
        try:
            self._reader.read_data(LoadPlan(items), planner).value()
        except _READ_ERRORS as error:
            raise CheckpointError(
                f"{self.path / file} cannot be read ({type(error).__name__}: {error}): it is not as it was written. Load an "
                "earlier checkpoint"
            ) from error

    def _check_files(self, items: Sequence[ReadItem]) -> None:
        ends: dict[str, int] = {}
        for item in items:
            home = self._home(item)
            ends[home.relative_path] = max(ends.get(home.relative_path, 0), home.offset + home.length)
        for file, end in ends.items():
            try:
                size = os.stat(self.path / file).st_size
            except OSError as error:
                raise CheckpointError(f"{self.path / file}: {error.strerror}. Load an earlier checkpoint") from error
            if size < end:
                raise CheckpointError(
                    f"{self.path / file} has {size} bytes, expected {end} or more: it was cut off. Load an earlier checkpoint"
                )

    def _home(self, item: ReadItem) -> Any:
        """File, offset and length of the chunk that the item reads from."""
        return self._metadata.storage_data[item.storage_index]


class _Target(DefaultLoadPlanner):
    def __init__(self, pieces: Mapping[MetadataIndex, torch.Tensor]) -> None:
        super().__init__()
        self._pieces = pieces
        self.objects: dict[str, bytes] = {}

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        piece = self._pieces[read_item.dest_index].detach()
        return narrow_tensor_by_index(piece, read_item.dest_offsets, read_item.lengths)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None: ...

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.objects[read_item.dest_index.fqn] = value.getvalue()
