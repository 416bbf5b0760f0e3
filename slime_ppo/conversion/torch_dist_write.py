"""Writing a torch_dist folder without ranks and without Megatron: every tensor is made when its turn to be written comes."""

import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from slime_ppo.conversion.mapping import Rule, Split
from slime_ppo.conversion.shapes import hf_shapes, megatron_shape
from slime_ppo.conversion.shard import shard
from slime_ppo.conversion.table import ConversionTable
from slime_ppo.conversion.torch_dist import BACKEND, BACKEND_FILE, COMMON_FILE
from slime_ppo.conversion.torch_dist_folder import places, stored_rules
from slime_ppo.errors import CheckpointError

_MAX_FILE_BYTES = 8 << 30


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
    folder: Path, chunks: Sequence[Chunk], *, empty_objects: Iterable[str], iteration: int, progress: Callable[[int], None]
) -> None:
    """Fill the empty `folder`; `progress` is told the bytes of each tensor that was written.

    torch's own writer of this format keeps all tensors of a file until it is closed, so only the index is left to it.
    Raises CheckpointError when the folder cannot be written.
    """
    try:
        results = [*_write_objects(folder, empty_objects), *_write_chunks(folder, chunks, progress)]
        FileSystemWriter(folder).finish(_metadata(chunks, empty_objects), [results])
        torch.save({"iteration": iteration}, folder / COMMON_FILE)
        # the mark that Megatron looks for comes last
        (folder / BACKEND_FILE).write_text(json.dumps(BACKEND), encoding="utf-8")
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{folder} cannot be written ({_root(error)}): make room, or write elsewhere") from error


def _root(error: BaseException) -> BaseException:
    """The system's error below one of torch.save's, which says nothing of a full disk."""
    below: BaseException | None = error
    while below is not None and not isinstance(below, OSError):
        below = below.__cause__ or below.__context__
    return error if below is None else below


def _write_chunks(folder: Path, chunks: Sequence[Chunk], progress: Callable[[int], None]) -> Iterator[WriteResult]:
    """One file after the other, each a row of tensors as torch.save writes them."""
    for number, of_file in enumerate(_cut(chunks), 1):
        name = f"__0_{number}.distcp"
        with (folder / name).open("wb") as file:
            for chunk in of_file:
                start = file.tell()
                torch.save(_alone(chunk.make()), file)
                progress(chunk.num_bytes)
                yield _result(_index(chunk), name, start, file)
            _flush(file)


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in memory of its own: torch.save writes all of the memory that a tensor is a part of."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


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


def _write_objects(folder: Path, keys: Iterable[str]) -> Iterator[WriteResult]:
    """What Megatron stores for a module whose extra state is None: the list of its copies."""
    buffer = io.BytesIO()
    torch.save([None], buffer)
    name = "__0_0.distcp"
    with (folder / name).open("wb") as file:
        for key in keys:
            start = file.tell()
            file.write(buffer.getbuffer())
            yield _result(MetadataIndex(key), name, start, file)
        _flush(file)


def _index(chunk: Chunk) -> MetadataIndex:
    return MetadataIndex(chunk.key, torch.Size(chunk.start))


def _result(index: MetadataIndex, name: str, start: int, file: IO[bytes]) -> WriteResult:
    length = file.tell() - start
    return WriteResult(index, length, _StorageInfo(name, start, length))


def _flush(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _metadata(chunks: Sequence[Chunk], empty_objects: Iterable[str]) -> Metadata:
    tensors: dict[str, TensorStorageMetadata] = {}
    for chunk in chunks:
        properties = TensorProperties(dtype=chunk.dtype)
        entry = tensors.setdefault(chunk.key, TensorStorageMetadata(properties, torch.Size(chunk.whole), []))
        entry.chunks.append(ChunkStorageMetadata(torch.Size(chunk.start), torch.Size(chunk.shape)))
    return Metadata(tensors | {key: BytesStorageMetadata() for key in empty_objects})
