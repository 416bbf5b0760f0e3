"""Writing a torch_dist folder without ranks and without Megatron: every tensor is made when its turn to be written comes."""

import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_saver import save

from slime_ppo.conversion.mapping import Rule, Split
from slime_ppo.conversion.shapes import hf_shapes, megatron_shape
from slime_ppo.conversion.shard import shard
from slime_ppo.conversion.table import ConversionTable
from slime_ppo.conversion.torch_dist import COMMON_FILE, FORMAT_FILE, places, stored_rules
from slime_ppo.errors import CheckpointError

_FORMAT = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}


@dataclass(frozen=True)
class Chunk:
    """A box of the tensor `key` of shape `whole`: it starts at `start`, is of shape `shape`, and `make()` makes it."""

    key: str
    whole: tuple[int, ...]
    start: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], torch.Tensor]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def model_chunks(
    table: ConversionTable,
    weights: Mapping[str, torch.Tensor],
    *,
    dtype_of: Callable[[str], torch.dtype],
    vocab_rows: int,
) -> Iterator[Chunk]:
    """The model's parameters as boxes, layer by layer. `vocab_rows`: rows of embedding and output layer, padded with zeros.

    `dtype_of`: type to write by HF name. The head of a critic is float32, as in training.
    """
    for rule in stored_rules(table):
        place = places(rule, table)[0]
        dtype = torch.float32 if rule.hf == table.family.value_head.hf else dtype_of(rule.hf[0])
        whole = (*place.lead, *megatron_shape(rule, table.shape, vocab_rows=vocab_rows))
        first = 0
        for shape, make in _pieces(rule, table, weights, vocab_rows):
            start = (*place.index, first, *(0 for _ in shape[1:]))
            box = (*(1 for _ in place.index), *shape)
            yield Chunk(place.key, whole, start, box, dtype, _cast(make, box, dtype))
            first += shape[0]


def _pieces(
    rule: Rule, table: ConversionTable, weights: Mapping[str, torch.Tensor], vocab_rows: int
) -> list[tuple[tuple[int, ...], Callable[[], torch.Tensor]]]:
    """(shape, maker) of what lies below each other in the rule's parameter. Tensors that need no fusing stay apart, so that a rank
    that wants a part of them need not read the rest."""
    shape = table.shape

    def reader(name: str) -> Callable[[], torch.Tensor]:
        return lambda: weights[name]

    if rule.split is Split.QKV:

        def fused() -> torch.Tensor:
            parts = [weights[name] for name in rule.hf]
            return shard(rule.split, parts, num_query_groups=shape.num_query_groups, padded_vocab=0, tp_size=1, tp_rank=0)

        return [(megatron_shape(rule, shape, vocab_rows=vocab_rows), fused)]
    pieces = [(of_part, reader(name)) for name, of_part in zip(rule.hf, hf_shapes(rule, shape), strict=True)]
    if rule.split is Split.VOCAB and vocab_rows > shape.vocab_size:
        padding = (vocab_rows - shape.vocab_size, shape.hidden_size)
        pieces.append((padding, lambda: torch.zeros(padding)))
    return pieces


def _cast(make: Callable[[], torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    return lambda: make().to(dtype).reshape(shape)


def write_torch_dist(
    folder: Path, chunks: Sequence[Chunk], *, empty_objects: Sequence[str], iteration: int, progress: Callable[[int], None]
) -> None:
    """Fill the empty `folder`; `progress` is told the bytes of each tensor that was written.

    Raises CheckpointError when it cannot be written.
    """
    writer = FileSystemWriter(folder, single_file_per_rank=True, sync_files=True, thread_count=1, per_thread_copy_ahead=0)
    try:
        save({}, storage_writer=writer, planner=_OneByOne(chunks, empty_objects, progress), no_dist=True)
        torch.save({"iteration": iteration}, folder / COMMON_FILE)
        # the mark that Megatron looks for comes last
        (folder / FORMAT_FILE).write_text(json.dumps(_FORMAT), encoding="utf-8")
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        if isinstance(cause, OSError):
            raise CheckpointError(f"{folder} cannot be written ({cause}): make room, or write elsewhere") from error
        raise cause from error
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written ({error}): make room, or write elsewhere") from error


class _OneByOne(SavePlanner):
    """Plans one file of all chunks, and makes each when the writer asks for it."""

    def __init__(self, chunks: Sequence[Chunk], empty_objects: Sequence[str], progress: Callable[[int], None]) -> None:
        self._chunks = {MetadataIndex(chunk.key, torch.Size(chunk.start)): chunk for chunk in chunks}
        self._empty_objects = empty_objects
        self._progress = progress

    def set_up_planner(self, state_dict: Mapping[str, object], storage_meta: object = None, is_coordinator: bool = False) -> None:
        """The chunks are known already."""

    def create_local_plan(self) -> SavePlan:
        tensors = [_write_item(index, chunk) for index, chunk in self._chunks.items()]
        size = len(_EMPTY_OBJECT)
        objects = [
            WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO, bytes_io_data=BytesIOWriteData(size))
            for key in self._empty_objects
        ]
        return SavePlan([*tensors, *objects])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = create_default_global_save_plan(all_plans)
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.type is WriteItemType.BYTE_IO:
            return io.BytesIO(_EMPTY_OBJECT)
        chunk = self._chunks[write_item.index]
        made = chunk.make()
        self._progress(chunk.num_bytes)
        return made


def _write_item(index: MetadataIndex, chunk: Chunk) -> WriteItem:
    box = ChunkStorageMetadata(torch.Size(chunk.start), torch.Size(chunk.shape))
    properties = TensorProperties(dtype=chunk.dtype)
    return WriteItem(index, WriteItemType.SHARD, tensor_data=TensorWriteData(box, properties, torch.Size(chunk.whole)))


def _saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


_EMPTY_OBJECT = _saved([None])
"""What Megatron stores for a module whose extra state is None: the list of its copies."""
