"""Weights on their way from a trainer to an engine: a manifest of tensors, cut into flat byte buckets.

Both ends cut the same manifest with the same `bucket_bytes` and so agree on the buckets without sending the plan. The layout
is that of SGLang's flattened bucket: one tensor after the other without a gap.
Names are Hugging Face names. Torch is imported where tensors are touched, so that planning needs none.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING
from warnings import catch_warnings, simplefilter

import numpy as np

from slime_ppo.errors import WeightSyncError

if TYPE_CHECKING:
    import torch

ITEM_BYTES: Mapping[str, int] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "uint8": 1,
    "bool": 1,
}


@dataclass(frozen=True)
class TensorSpec:
    """One entry of the manifest; `dtype` is torch's name without the prefix, like "float32"."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        if self.dtype not in ITEM_BYTES:
            raise WeightSyncError(f"tensor {self.name} has dtype {self.dtype!r}; weights are pushed as one of {sorted(ITEM_BYTES)}")
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Bucket:
    """Tensors that travel together: `specs[i]` lies at byte `offsets[i]` of a flat array of `num_bytes`.

    Tensors with larger items come first, so that each begins at a multiple of its item size with no gap before it.
    """

    index: int
    specs: tuple[TensorSpec, ...]
    offsets: tuple[int, ...]
    num_bytes: int


def plan_buckets(specs: Sequence[TensorSpec], bucket_bytes: int) -> list[Bucket]:
    """Cut the manifest into buckets of at most `bucket_bytes`, in manifest order; within a bucket larger items come first.

    A tensor is never split; one that is larger than a bucket goes alone. Raises WeightSyncError on a tensor named
    twice, an unknown dtype or bucket_bytes < 1.
    """
    if bucket_bytes < 1:
        raise WeightSyncError(f"bucket_bytes is {bucket_bytes}, expected at least 1 (--weight-bucket-bytes)")
    names = [spec.name for spec in specs]
    doubled = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if doubled:
        raise WeightSyncError(f"tensors named twice in the manifest: {doubled}")
    buckets: list[Bucket] = []
    chosen: list[TensorSpec] = []
    size = 0
    for spec in specs:
        grown = size + spec.num_bytes
        if chosen and grown > bucket_bytes:
            buckets.append(_lay_out(len(buckets), chosen))
            chosen, grown = [], spec.num_bytes
        chosen.append(spec)
        size = grown
    if chosen:
        buckets.append(_lay_out(len(buckets), chosen))
    return buckets


def pack_bucket(bucket: Bucket, tensors: "Mapping[str, torch.Tensor]") -> np.ndarray:
    """The bucket's bytes, uint8 [num_bytes], copied from tensors on any device. `tensors` may hold more than the bucket's.

    Raises WeightSyncError for a tensor that is missing or has another shape or dtype than its manifest entry.
    """
    import torch

    flat = np.zeros(bucket.num_bytes, np.uint8)
    fill_bucket(bucket, tensors, torch.from_numpy(flat))
    return flat


def fill_bucket(bucket: Bucket, tensors: "Mapping[str, torch.Tensor]", flat: "torch.Tensor") -> None:
    """As `pack_bucket`, into `flat`, uint8 [num_bytes] on any device."""
    for spec, offset in zip(bucket.specs, bucket.offsets, strict=True):
        if spec.name not in tensors:
            raise WeightSyncError(f"tensor {spec.name} is in the manifest but was not given to pack")
        tensor = tensors[spec.name]
        found = TensorSpec(spec.name, tuple(tensor.shape), dtype_name(tensor.dtype))
        if found != spec:
            raise WeightSyncError(
                f"tensor {spec.name} is {found.dtype} {list(found.shape)}, the manifest says {spec.dtype} {list(spec.shape)}"
            )
        _view(flat, spec, offset).copy_(tensor.detach())


def check_flat(bucket: Bucket, flat: np.ndarray) -> None:
    """Raise WeightSyncError when `flat` is not uint8 [num_bytes]: the bytes of another bucket than the manifest's."""
    if flat.dtype != np.uint8 or flat.shape != (bucket.num_bytes,):
        raise WeightSyncError(
            f"bucket {bucket.index} ({bucket.specs[0].name} to {bucket.specs[-1].name}) arrived as {flat.dtype} "
            f"{list(flat.shape)}, expected uint8 [{bucket.num_bytes}]; both ends must cut the same manifest with the same "
            "bucket_bytes"
        )


def unpack_bucket(bucket: Bucket, flat: np.ndarray) -> "Iterator[tuple[str, torch.Tensor]]":
    """(name, tensor) of each tensor in the bucket: views of `flat`, which may be read-only. Read them, never write.

    Raises WeightSyncError, before the first tensor, when `flat` is not uint8 [num_bytes].
    """
    import torch

    check_flat(bucket, flat)
    with catch_warnings():
        # An array from an object store is a read-only view of shared memory; torch warns because it can't mark it so.
        simplefilter("ignore", UserWarning)
        source = torch.from_numpy(flat)
    for spec, offset in zip(bucket.specs, bucket.offsets, strict=True):
        yield spec.name, _view(source, spec, offset)


def dtype_name(dtype: "torch.dtype") -> str:
    """`torch.float32` -> "float32"."""
    return str(dtype).removeprefix("torch.")


def checksum(name: str, content: np.ndarray) -> str:
    """A fingerprint of one tensor's bytes, uint8 [n], and its name, to compare between trainer and engine."""
    digest = blake2b(name.encode(), digest_size=8)
    digest.update(np.ascontiguousarray(content).data)
    return digest.hexdigest()


def bucket_checksums(bucket: Bucket, flat: np.ndarray) -> dict[str, str]:
    """Tensor name -> checksum of its bytes in a packed bucket."""
    return {
        spec.name: checksum(spec.name, flat[offset : offset + spec.num_bytes])
        for spec, offset in zip(bucket.specs, bucket.offsets, strict=True)
    }


def tensor_checksum(name: str, tensor: "torch.Tensor") -> str:
    """The same number as `bucket_checksums` gives, from a tensor on any device."""
    import torch

    # A copy: memory that numpy has seen can't be resized any more, and offload resizes that of parameters.
    host = tensor.detach().to("cpu", copy=True).contiguous()
    return checksum(name, host.reshape(-1).view(torch.uint8).numpy())


def _lay_out(index: int, specs: Sequence[TensorSpec]) -> Bucket:
    ordered = sorted(specs, key=lambda spec: -ITEM_BYTES[spec.dtype])
    ends = list(accumulate((spec.num_bytes for spec in ordered), initial=0))
    return Bucket(index=index, specs=tuple(ordered), offsets=tuple(ends[:-1]), num_bytes=ends[-1])


def _view(flat: "torch.Tensor", spec: TensorSpec, offset: int) -> "torch.Tensor":
    import torch

    dtype: torch.dtype = getattr(torch, spec.dtype)
    if spec.num_bytes == 0:
        return torch.empty(spec.shape, dtype=dtype)
    return flat[offset : offset + spec.num_bytes].view(dtype).view(spec.shape)
