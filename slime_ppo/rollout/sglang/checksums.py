"""What a server's ranks must hold after a push, told as SGLang's /weights_checker tells it: a hash per parameter and rank.

A server fuses Hugging Face tensors and splits them over its tensor-parallel ranks; this does the same to the trainer's bytes,
parameter by parameter. Only the parts of parameters that are not yet whole are kept: of one layer, mostly.
Covers the families of `slime_ppo.conversion.families` as SGLang 0.5.23 lays them out without quantization and without weights
repacked for a kernel (AMX on a CPU; some mixture-of-experts backends on a GPU): there the check fails although nothing is wrong,
and --check-weight-update-equal never turns it off.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from slime_ppo.config.model_shape import ModelShape
from slime_ppo.errors import WeightSyncError
from slime_ppo.rollout.sglang.tensor_hash import tensor_hash
from slime_ppo.weight_sync.bucket import ITEM_BYTES, Bucket

_VOCAB_MULTIPLE = 64
_CPU_FFN_MULTIPLE = 32
_SHOWN = 10
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_DENSE = re.compile(r"(?P<module>.+\.)(?P<part>q|k|v|gate|up)_proj\.(?P<kind>weight|bias)")
_EXPERT = re.compile(r"(?P<experts>.+\.mlp\.experts)\.(?P<expert>\d+)\.(?P<part>gate|up|down)_proj\.weight")

Shard = Callable[[Sequence[np.ndarray], int], np.ndarray]
"""(parts in order, tensor-parallel rank) -> the rank's parameter."""


@dataclass(frozen=True)
class _Place:
    """Where a Hugging Face tensor goes: part `index` of `num_parts` of the server's parameter `name`."""

    name: str
    index: int
    num_parts: int
    shard: Shard


class ExpectedChecksums:
    """The hashes of every rank of a server with `tp_size` ranks; buckets of a push are added in any order."""

    def __init__(self, shape: ModelShape, *, tp_size: int, device: Literal["cpu", "cuda"]) -> None:
        """Raises WeightSyncError for what a server on a CPU fills up with heads of its own making."""
        if device == "cpu" and (shape.num_attention_heads % tp_size or shape.num_query_groups % tp_size):
            raise WeightSyncError(
                f"a server on a CPU with {tp_size} ranks adds heads to a model of {shape.num_attention_heads} heads and "
                f"{shape.num_query_groups} key-value heads, which the check of a push does not reproduce: choose another "
                "--rollout-num-gpus-per-engine, or --check-weight-update-equal never"
            )
        self._shape = shape
        self._tp_size = tp_size
        self._ffn_multiple = _CPU_FFN_MULTIPLE * tp_size if device == "cpu" else 1
        self._hash = tensor_hash(device)
        self._waiting: dict[str, dict[int, np.ndarray]] = {}
        self.ranks: list[dict[str, str]] = [{} for _ in range(tp_size)]

    def add(self, bucket: Bucket, flat: np.ndarray) -> None:
        """Take in the tensors of a bucket, uint8 [num_bytes]."""
        for spec, offset in zip(bucket.specs, bucket.offsets, strict=True):
            items = flat[offset : offset + spec.num_bytes].view(_UNSIGNED[ITEM_BYTES[spec.dtype]])
            self._add(spec.name, items.reshape(spec.shape))

    @property
    def incomplete(self) -> list[str]:
        """Parameters of which parts are missing."""
        return sorted(self._waiting)

    def _add(self, name: str, tensor: np.ndarray) -> None:
        place = self._place(name)
        if place.num_parts == 1:
            parts = [tensor]
        else:
            waiting = self._waiting.setdefault(place.name, {})
            waiting[place.index] = tensor.copy()
            if len(waiting) < place.num_parts:
                return
            parts = [waiting[index] for index in range(place.num_parts)]
            del self._waiting[place.name]
        for rank, checksums in enumerate(self.ranks):
            checksums[place.name] = self._hash(place.shard(parts, rank))

    def _place(self, name: str) -> _Place:
        if (found := _EXPERT.fullmatch(name)) is not None:
            return self._expert_place(found["experts"], int(found["expert"]), found["part"])
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            return _Place(name, 0, 1, self._vocab)
        if (found := _DENSE.fullmatch(name)) is not None:
            fused, parts, shard = (
                ("qkv", "qkv", self._qkv) if found["part"] in "qkv" else ("gate_up", ("gate", "up"), self._gate_up)
            )
            return _Place(f"{found['module']}{fused}_proj.{found['kind']}", parts.index(found["part"]), len(parts), shard)
        shard = self._down if name.endswith(".down_proj.weight") else self._out if name.endswith(".o_proj.weight") else _whole
        return _Place(name, 0, 1, shard)

    def _expert_place(self, experts: str, expert: int, part: str) -> _Place:
        num_experts = self._shape.num_experts
        if part == "down":
            return _Place(f"{experts}.w2_weight", expert, num_experts, self._down_experts)
        return _Place(f"{experts}.w13_weight", 2 * expert + (part == "up"), 2 * num_experts, self._up_experts)

    def _gate_up(self, parts: Sequence[np.ndarray], rank: int) -> np.ndarray:
        return np.concatenate([self._ffn_shard(part, 0, rank) for part in parts])

    def _down(self, parts: Sequence[np.ndarray], rank: int) -> np.ndarray:
        return self._ffn_shard(parts[0], 1, rank)

    def _ffn_shard(self, part: np.ndarray, axis: int, rank: int) -> np.ndarray:
        """A server on a CPU fills the feed-forward size with zeros up to a multiple of 32 per rank."""
        return np.split(_padded(part, axis, self._ffn_multiple), self._tp_size, axis=axis)[rank]

    def _out(self, parts: Sequence[np.ndarray], rank: int) -> np.ndarray:
        return np.split(parts[0], self._tp_size, axis=1)[rank]

    def _qkv(self, parts: Sequence[np.ndarray], rank: int) -> np.ndarray:
        """Key and value heads are split like query heads; with fewer of them than ranks, each lies on several ranks."""
        num_pieces = min(self._tp_size, self._shape.num_query_groups)
        query, *others = parts
        piece = rank * num_pieces // self._tp_size
        return np.concatenate([np.split(query, self._tp_size)[rank], *(np.split(part, num_pieces)[piece] for part in others)])

    def _vocab(self, parts: Sequence[np.ndarray], rank: int) -> np.ndarray:
        """Rows of zeros fill the vocabulary up to a multiple of 64, or of 64 per rank where that does not divide."""
        multiple = _VOCAB_MULTIPLE
        if (-(-len(parts[0]) // multiple) * multiple) % self._tp_size:
            multiple *= self._tp_size
        return np.split(_padded(parts[0], 0, multiple), self._tp_size)[rank]

    def _up_experts(self, parts: Sequence[np.ndarray], rank: int) -> np.ndarray:
        return np.stack([self._gate_up(parts[at : at + 2], rank) for at in range(0, len(parts), 2)])

    def _down_experts(self, parts: Sequence[np.ndarray], rank: int) -> np.ndarray:
        return np.stack([self._down([part], rank) for part in parts])


def _padded(array: np.ndarray, axis: int, multiple: int) -> np.ndarray:
    missing = -array.shape[axis] % multiple
    if not missing:
        return array
    return np.pad(array, [(0, missing if at == axis else 0) for at in range(array.ndim)])


def _whole(parts: Sequence[np.ndarray], rank: int) -> np.ndarray:
    return parts[0]


def compare_checksums(expected: ExpectedChecksums, ranks: Sequence[Mapping[str, Any]], *, server: str) -> None:
    """Compare with the `ranks` of a /weights_checker answer. One WeightSyncError names what differs, rank by rank."""
    problems = [f"not all parts of {name} were pushed" for name in expected.incomplete]
    if len(ranks) != len(expected.ranks):
        problems.append(f"{len(ranks)} ranks answered, expected {len(expected.ranks)} (tensor-parallel ranks alone)")
    for held in ranks:
        rank = held["parallelism_info"][0]["tp_rank"]
        wanted, found = expected.ranks[rank], held["checksums"]
        problems += [f"rank {rank} has no {name}" for name in wanted if name not in found]
        problems += [f"rank {rank}: no push reaches {name}" for name in found if name not in wanted]
        problems += [f"rank {rank}: {name} differs" for name in wanted if name in found and found[name] != wanted[name]]
    if problems:
        more = f"\n  and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise WeightSyncError(
            f"after the push {server} does not hold the trainer's weights:\n  " + "\n  ".join(problems[:_SHOWN]) + more
        )
