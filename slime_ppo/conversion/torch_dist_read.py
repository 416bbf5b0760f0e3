"""Reading a torch_dist folder, by ranks and by tools: any box of any tensor, in place or one piece at a time. No Megatron."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import IOBase
from itertools import groupby
from math import prod
from pathlib import Path
from typing import IO, NoReturn, cast

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
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

_AGAIN = "It is not as it was written: copy it again, or use an earlier checkpoint"


@dataclass(frozen=True)
class Region:
    """The box of the stored tensor `key` that starts at `offsets` and is of shape `sizes`."""

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class _Part:
    """What one stored chunk, which lies at `home`, has of the `number`-th region."""

    number: int
    item: ReadItem
    home: _StorageInfo


@dataclass(frozen=True)
class ReadPlan:
    """Which chunks fill which regions, file by file and in each as they lie there."""

    parts: tuple[_Part, ...]


class TorchDistReader:
    """What a folder holds, by its index, which is read once: `tensors` and `objects` by key. Files are read when asked for.

    A rank plans what it needs, which looks at the files it needs and no others: together the ranks look at all that count, and none
    of them asks a shared file system about the files of all. A tool speaks of the folder, and asks `check_whole` first.
    Raises CheckpointError when the index is missing or cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            metadata = FileSystemReader(folder).read_metadata()
            entries = metadata.state_dict_metadata
            self._homes: dict[MetadataIndex, _StorageInfo] = dict(metadata.storage_data)
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{folder} is no torch_dist checkpoint: it has no {METADATA_FILE}, which is written last. Use another one"
            ) from error
        except Exception as error:  # whatever a damaged pickle comes to
            self._refuse(f"{METADATA_FILE} cannot be read ({type(error).__name__}: {error})", error)
        self.tensors: dict[str, TensorStorageMetadata] = {
            key: entry for key, entry in entries.items() if isinstance(entry, TensorStorageMetadata)
        }
        self.objects: tuple[str, ...] = tuple(key for key in entries if key not in self.tensors)

    def check_whole(self) -> None:
        """Raises CheckpointError that lists every file that is missing or cut off, and all of which the index does not say where it
        lies."""
        problems = self._file_problems(self._homes.values())
        for key, entry in self.tensors.items():
            stored = sum(chunk.sizes.numel() for chunk in entry.chunks if MetadataIndex(key, chunk.offsets) in self._homes)
            problems += _holes(key, stored, entry.size.numel())
        lost = [key for key in self.objects if MetadataIndex(key) not in self._homes]
        problems += [f"{key}: the index does not say where it lies" for key in lost]
        self._require_none(problems)

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
        return self._homes[MetadataIndex(key)].length

    def plan(self, regions: Sequence[Region]) -> ReadPlan:
        """What fills the regions, whose keys are all there.

        Raises CheckpointError that lists every file needed that is missing or cut off, and every tensor that is not all in files.
        """
        by_key: dict[str, list[int]] = {}
        for number, region in enumerate(regions):
            by_key.setdefault(region.key, []).append(number)
        parts: list[_Part] = []
        problems: list[str] = []
        for key, numbers in by_key.items():
            found = list(self._parts(key, numbers, regions))
            wanted = sum(prod(regions[number].sizes) for number in numbers)
            problems += _holes(key, sum(prod(part.item.lengths) for part in found), wanted)
            parts += found
        self._require_none([*self._file_problems(part.home for part in parts), *problems])
        return ReadPlan(tuple(sorted(parts, key=lambda part: (part.home.relative_path, part.home.offset))))

    def _parts(self, key: str, numbers: Sequence[int], regions: Sequence[Region]) -> Iterator[_Part]:
        wanted = [regions[number] for number in numbers]
        chunks = [ChunkStorageMetadata(torch.Size(one.offsets), torch.Size(one.sizes)) for one in wanted]
        for item in create_read_items_for_chunk_list(key, self.tensors[key], chunks):
            home = self._homes.get(item.storage_index)
            if home is not None:
                yield _Part(numbers[cast(int, item.dest_index.index)], item, home)

    def fill(self, plan: ReadPlan, targets: Sequence[torch.Tensor]) -> None:
        """Read into `targets`, one for each region of the plan and of its shape; types are converted.

        Besides them one stored chunk at a time is in memory. Raises CheckpointError naming file and tensor.
        """
        for file, of_file in groupby(plan.parts, key=lambda part: part.home.relative_path):
            with self._open(file) as stream:
                for _, of_chunk in groupby(of_file, key=lambda part: part.home.offset):
                    self._fill_from_chunk(stream, list(of_chunk), targets)

    def _fill_from_chunk(self, stream: IO[bytes], parts: Sequence[_Part], targets: Sequence[torch.Tensor]) -> None:
        stored = self._load(stream, parts[0])
        for part in parts:
            item = part.item
            target = _narrow(targets[part.number].detach(), item.dest_offsets, item.lengths)
            target.copy_(_narrow(stored, item.storage_offsets, item.lengths))

    def read(self, place: StackPlace, *, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """The tensor at the place, or its rows from `start` to `stop`. Raises CheckpointError as `plan` and `fill` do."""
        rows, *columns = self.tensors[place.key].size[len(place.lead) :]
        offsets = (*place.index, start, *(0 for _ in columns))
        sizes = (*(1 for _ in place.index), (rows if stop is None else stop) - start, *columns)
        return self._read_region(Region(place.key, offsets, sizes)).reshape(sizes[len(place.index) :])

    def read_whole(self, key: str) -> torch.Tensor:
        """The tensor of a key with all its dimensions. Raises as `read`."""
        sizes = tuple(self.tensors[key].size)
        return self._read_region(Region(key, (0,) * len(sizes), sizes))

    def _read_region(self, region: Region) -> torch.Tensor:
        plan = self.plan([region])
        if len(plan.parts) == 1:  # the stored chunk itself, which saves a copy
            (part,) = plan.parts
            with self._open(part.home.relative_path) as stream:
                return _narrow(self._load(stream, part), part.item.storage_offsets, part.item.lengths)
        target = torch.empty(region.sizes, dtype=self.dtype(region.key))
        self.fill(plan, [target])
        return target

    def read_object(self, key: str) -> bytes:
        """The bytes of one of the `objects`. Raises CheckpointError when there are none."""
        home = self._homes.get(MetadataIndex(key))
        if home is None:
            raise CheckpointError(f"{self.folder} holds no object {key}. {_AGAIN}")
        self._require_none(self._file_problems([home]))
        with self._open(home.relative_path) as stream:
            stream.seek(home.offset)
            return stream.read(home.length)

    def _open(self, file: str) -> IO[bytes]:
        try:
            return (self.folder / file).open("rb")
        except OSError as error:
            self._refuse(f"{file} cannot be read ({error.strerror})", error)

    def _load(self, stream: IO[bytes], part: _Part) -> torch.Tensor:
        """The whole stored chunk."""
        index, home = part.item.storage_index, part.home
        expected = self.tensors[index.fqn].chunks[cast(int, index.index)].sizes
        try:
            view = cast(IO[bytes], _create_file_view(cast(IOBase, stream), home.offset, home.length))
            stored: torch.Tensor = torch.load(view, map_location="cpu", weights_only=True)
            found = stored.shape
        except Exception as error:  # whatever damaged bytes come to; torch's own words advise to read them without care
            why = error.strerror if isinstance(error, OSError) else type(error).__name__
            self._refuse(f"{home.relative_path}: {index.fqn} cannot be read ({why})", error)
        if found != expected:
            self._refuse(f"{home.relative_path}: {index.fqn} is {list(found)} there, the index says {list(expected)}")
        return stored

    def _file_problems(self, homes: Iterable[_StorageInfo]) -> list[str]:
        """What is wrong with the files that hold these: each is there, and ends no earlier than what it holds."""
        ends: dict[str, int] = {}
        for home in homes:
            ends[home.relative_path] = max(ends.get(home.relative_path, 0), home.offset + home.length)
        problems = []
        for file, end in sorted(ends.items()):
            try:
                size = (self.folder / file).stat().st_size
            except OSError as error:
                problems.append(f"{file}: {error.strerror}")
                continue
            if size < end:
                problems.append(f"{file} has {size:,} bytes, expected {end:,} or more")
        return problems

    def _require_none(self, problems: Sequence[str]) -> None:
        if problems:
            raise CheckpointError(f"{self.folder}: {'; '.join(problems)}. {_AGAIN}")

    def _refuse(self, problem: str, error: Exception | None = None) -> NoReturn:
        raise CheckpointError(f"{self.folder}/{problem}. {_AGAIN}") from error


def _holes(key: str, found: int, wanted: int) -> list[str]:
    return [] if found == wanted else [f"{key}: the index knows where {found:,} of {wanted:,} numbers lie"]


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
