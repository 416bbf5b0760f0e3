"""Writing a torch_dist folder, by ranks and by tools: every tensor is made when its turn to be written comes. No Megatron.

torch's own writer of this format keeps all tensors of a file in host memory until it is closed, so only the index is left to it.
Nothing here forks or spawns: Megatron's writer does both, which asks for a main guard and a process without threads, and a rank
under Ray or torchrun has neither.
"""

import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from slime_ppo.conversion.mapping import Rule, Split
from slime_ppo.conversion.shapes import hf_shapes, megatron_shape
from slime_ppo.conversion.shard import shard
from slime_ppo.conversion.table import ConversionTable
from slime_ppo.conversion.torch_dist import BACKEND, BACKEND_FILE, COMMON_FILE
from slime_ppo.conversion.torch_dist_folder import places, stored_rules
from slime_ppo.disk import flush, root_cause
from slime_ppo.errors import CheckpointError

_MAX_FILE_BYTES = 8 << 30
_MAX_PADDING_BYTES = 16 << 20


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

    @property
    def item(self) -> WriteItem:
        """As the index lists it."""
        data = TensorWriteData(
            chunk=ChunkStorageMetadata(torch.Size(self.start), torch.Size(self.shape)),
            properties=TensorProperties(dtype=self.dtype),
            size=torch.Size(self.whole),
        )
        return WriteItem(index=MetadataIndex(self.key, self.start), type=WriteItemType.SHARD, tensor_data=data)


@dataclass(frozen=True)
class Written:
    """What is in files, and where."""

    items: list[WriteItem]
    results: list[WriteResult]


def write_file(
    path: Path, objects: Mapping[str, bytes], chunks: Iterable[Chunk], progress: Callable[[int], None] = lambda _: None
) -> Written:
    """Write and flush one file: `objects` by key, then chunks, each as torch.save writes it; `progress` is told the bytes of each
    chunk. Raises OSError or RuntimeError."""
    items: list[WriteItem] = []
    results: list[WriteResult] = []
    with path.open("wb") as file:

        def note(item: WriteItem, start: int) -> None:
            length = file.tell() - start
            items.append(item)
            results.append(WriteResult(item.index, length, _StorageInfo(path.name, start, length)))

        for key, content in objects.items():
            start = file.tell()
            file.write(content)
            note(WriteItem(index=MetadataIndex(key), type=WriteItemType.BYTE_IO), start)
        for chunk in chunks:
            start = file.tell()
            _save(_on_host(chunk.make()), file)
            note(chunk.item, start)
            progress(chunk.num_bytes)
    flush(path)
    return Written(items, results)


def _save(tensor: torch.Tensor, file: IO[bytes]) -> None:
    try:
        torch.save(tensor, file)
    except RuntimeError as error:
        if isinstance(error.__context__, KeyboardInterrupt):  # torch, ending its archive, stumbles over where it was left
            raise error.__context__ from None
        raise


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in host memory of its own: torch.save writes all of the memory that a tensor is a part of. One that is there
    already stays."""
    tensor = tensor.detach()
    alone = tensor.device.type == "cpu" and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if alone else tensor.to("cpu", copy=True)


def packed(value: object) -> bytes:
    """An object as Megatron stores it: the list of its copies."""
    buffer = io.BytesIO()
    torch.save([value], buffer)
    return buffer.getvalue()


def write_common(folder: Path, common: Mapping[str, Any]) -> None:
    """What all ranks have in common, and Megatron's mark of the format."""
    torch.save(dict(common), folder / COMMON_FILE)
    (folder / BACKEND_FILE).write_text(json.dumps(BACKEND), encoding="utf-8")


def write_metadata(folder: Path, written: Sequence[Written]) -> None:
    """The index: what lies in which file; after it the folder can be read. Raises CheckpointError when not all files are here."""
    names = {result.storage_data.relative_path for one in written for result in one.results}
    absent = sorted(name for name in names if not (folder / name).is_file())
    if absent:
        raise CheckpointError(
            f"{folder} has no {', '.join(absent)} where the first rank runs, although other ranks have written it: the run folder "
            "must be the same one on all nodes"
        )
    _, metadata = create_default_global_save_plan([SavePlan(one.items) for one in written])
    FileSystemWriter(folder).finish(metadata, [one.results for one in written])


def write_torch_dist(
    folder: Path, chunks: Sequence[Chunk], *, empty_objects: Iterable[str], iteration: int, progress: Callable[[int], None]
) -> None:
    """Fill the empty `folder` with a whole checkpoint; `progress` is told the bytes of each tensor that was written.

    `empty_objects`: keys of modules whose extra state is None. Raises CheckpointError when the folder cannot be written.
    """
    try:
        written = [write_file(folder / "__0_0.distcp", dict.fromkeys(empty_objects, packed(None)), ())]
        for number, of_file in enumerate(_cut(chunks), 1):
            written.append(write_file(folder / f"__0_{number}.distcp", {}, of_file, progress))
        write_common(folder, {"iteration": iteration})
        write_metadata(folder, written)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{folder} cannot be written ({root_cause(error)}): make room, or write elsewhere") from error


def _cut(chunks: Sequence[Chunk]) -> list[list[Chunk]]:
    files: list[list[Chunk]] = []
    size = 0
    for chunk in chunks:
        if not files or size + chunk.num_bytes > _MAX_FILE_BYTES:
            files.append([])
            size = 0
        files[-1].append(chunk)
        size += chunk.num_bytes
    return files


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
        pieces += _zeros(vocab_rows - shape.vocab_size, shape.hidden_size)
    return pieces


def _zeros(rows: int, columns: int) -> Iterator[tuple[tuple[int, ...], Callable[[], torch.Tensor]]]:
    """Rows of zeros in pieces, so that padding takes less memory than what it pads."""
    most = max(1, _MAX_PADDING_BYTES // (4 * columns))
    for start in range(0, rows, most):
        shape = (min(most, rows - start), columns)
        yield shape, partial(torch.zeros, shape)


def _cast(make: Callable[[], torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    return lambda: make().to(dtype).reshape(shape)
