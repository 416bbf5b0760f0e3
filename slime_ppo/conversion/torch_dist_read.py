"""Reading a torch_dist folder without ranks and without Megatron, one piece of one tensor at a time."""

import pickle
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import IO, cast

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.utils import _create_file_view

from slime_ppo.conversion.mapping import Rule, Split
from slime_ppo.conversion.shapes import hf_shapes
from slime_ppo.conversion.shard import unshard
from slime_ppo.conversion.table import ConversionTable
from slime_ppo.conversion.torch_dist import METADATA_FILE
from slime_ppo.conversion.torch_dist_folder import StackPlace, places, stored_rules
from slime_ppo.errors import CheckpointError

_AGAIN = "the checkpoint is incomplete: copy it again, or use another one"


class TorchDistReader:
    """The tensors of a folder by key. Raises CheckpointError when the index cannot be read, or names bytes that are not there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        metadata = self._read_index()
        self._places: dict[MetadataIndex, _StorageInfo] = metadata.storage_data
        entries = metadata.state_dict_metadata
        self.tensors: dict[str, TensorStorageMetadata] = {
            key: entry for key, entry in entries.items() if isinstance(entry, TensorStorageMetadata)
        }
        self.objects: tuple[str, ...] = tuple(key for key in entries if key not in self.tensors)

    def _read_index(self) -> Metadata:
        """The index; `metadata.storage_data` says for each chunk in which bytes of which file it lies."""
        try:
            metadata = FileSystemReader(self.folder).read_metadata()
            ends: dict[str, int] = {}
            for info in metadata.storage_data.values():
                ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        except (OSError, EOFError, pickle.UnpicklingError, AttributeError, ImportError, ValueError, TypeError) as error:
            raise CheckpointError(
                f"{self.folder / METADATA_FILE} cannot be read ({type(error).__name__}: {error}): {_AGAIN}"
            ) from error
        wrong = [problem for name, end in sorted(ends.items()) if (problem := _file_problem(self.folder / name, end))]
        if wrong:
            raise CheckpointError(f"{self.folder}: {'; '.join(wrong)}: {_AGAIN}")
        return metadata

    def find(self, candidates: Sequence[StackPlace]) -> StackPlace | None:
        """The first place whose key is there."""
        return next((place for place in candidates if place.key in self.tensors), None)

    def shape(self, place: StackPlace) -> tuple[int, ...]:
        """Shape of what lies at the place, or of the whole tensor when its leading dimensions are not those of the place."""
        whole = tuple(self.tensors[place.key].size)
        return whole[len(place.lead) :] if whole[: len(place.lead)] == place.lead else whole

    def dtype(self, key: str) -> torch.dtype:
        """Type in which a tensor is stored."""
        return self.tensors[key].properties.dtype

    def object_bytes(self, key: str) -> int:
        """Bytes of one of the `objects` on disk."""
        return self._places[MetadataIndex(key)].length

    def read(self, place: StackPlace, *, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """The tensor at the place, or its rows from `start` to `stop`. Raises CheckpointError when some of it is nowhere."""
        whole = self.tensors[place.key]
        rows, *columns = whole.size[len(place.lead) :]
        offsets = (*place.index, start, *(0 for _ in columns))
        sizes = (*(1 for _ in place.index), (rows if stop is None else stop) - start, *columns)
        return self._read_region(place.key, ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))).reshape(
            sizes[len(place.index) :]
        )

    def read_whole(self, key: str) -> torch.Tensor:
        """The tensor of a key with all its dimensions."""
        size = self.tensors[key].size
        return self._read_region(key, ChunkStorageMetadata(torch.Size([0] * len(size)), size))

    def _read_region(self, key: str, region: ChunkStorageMetadata) -> torch.Tensor:
        whole = self.tensors[key]
        items = create_read_items_for_chunk_list(key, whole, [region])
        found = sum(prod(item.lengths) for item in items)
        if found != prod(region.sizes):
            raise CheckpointError(
                f"{self.folder}: the index knows where {found:,} of {prod(region.sizes):,} numbers of {key} lie: {_AGAIN}"
            )
        if len(items) == 1:
            return self._load(items[0])
        target = torch.empty(region.sizes, dtype=whole.properties.dtype)
        for item in items:
            _narrow(target, item.dest_offsets, item.lengths).copy_(self._load(item))
        return target

    def _load(self, item: ReadItem) -> torch.Tensor:
        """One stored tensor, cut to what is wanted of it."""
        info = self._places[item.storage_index]
        try:
            with (self.folder / info.relative_path).open("rb") as file:
                stored = torch.load(
                    cast(IO[bytes], _create_file_view(file, info.offset, info.length)), map_location="cpu", weights_only=True
                )
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            key = item.storage_index.fqn
            raise CheckpointError(f"{self.folder}: {key} cannot be read ({type(error).__name__}: {error}): {_AGAIN}") from error
        return _narrow(stored, item.storage_offsets, item.lengths)


def _narrow(tensor: torch.Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    for dim, (start, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dim, start, length)
    return tensor


class TorchDistWeights(Mapping[str, torch.Tensor]):
    """HF name -> tensor of a torch_dist folder, without the padding of the vocabulary, read one at a time.

    The folder holds what the table needs (`conversion.check`).
    """

    def __init__(self, reader: TorchDistReader, table: ConversionTable) -> None:
        self.reader = reader
        self._table = table
        self._homes = {hf: rule for rule in stored_rules(table) for hf in rule.hf}
        self._fused: tuple[str, list[torch.Tensor]] = ("", [])  # q, k and v come from one parameter, which is read once

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._homes:
            raise CheckpointError(f"{self.reader.folder} has no tensor {name}")
        rule, shape = self._homes[name], self._table.shape
        place, part = self._place(rule), rule.hf.index(name)
        if rule.split is Split.QKV:
            if self._fused[0] != rule.megatron:
                self._fused = ("", [])  # the old ones go before the new ones come
                self._fused = (rule.megatron, self._unfused(rule, place))
            return self._fused[1][part]
        self._fused = ("", [])
        rows = hf_shapes(rule, shape)[part][0]
        return self.reader.read(place, start=part * rows, stop=(part + 1) * rows)

    def _unfused(self, rule: Rule, place: StackPlace) -> list[torch.Tensor]:
        shape = self._table.shape
        return unshard(
            rule.split,
            [self.reader.read(place)],
            num_query_groups=shape.num_query_groups,
            num_heads=shape.num_attention_heads,
            vocab_size=shape.vocab_size,
        )

    def dtype(self, name: str) -> torch.dtype:
        """Type in which a tensor is stored; it is not read."""
        return self.reader.dtype(self._place(self._homes[name]).key)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor; it is not read."""
        rule = self._homes[name]
        return hf_shapes(rule, self._table.shape)[rule.hf.index(name)]

    def _place(self, rule: Rule) -> StackPlace:
        place = self.reader.find(places(rule, self._table))
        if place is None:
            raise CheckpointError(f"{self.reader.folder} does not hold {rule.megatron}")
        return place

    def __contains__(self, name: object) -> bool:
        return name in self._homes

    def __iter__(self) -> Iterator[str]:
        return iter(self._homes)

    def __len__(self) -> int:
        return len(self._homes)


def _file_problem(path: Path, end: int) -> str:
    """What is wrong with a file that must have `end` bytes or more; empty when nothing is."""
    if not path.is_file():
        return f"{path.name} is not there"
    size = path.stat().st_size
    return f"{path.name} ends after {size:,} bytes, expected {end:,}" if size < end else ""
