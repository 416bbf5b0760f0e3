"""Cutting, packing and unpacking weights; every mismatch names the tensor and both numbers."""

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_ppo.errors import WeightSyncError
from slime_ppo.weight_sync.bucket import (
    ITEM_BYTES,
    TensorSpec,
    bucket_checksums,
    checksum,
    pack_bucket,
    plan_buckets,
    tensor_checksum,
    unpack_bucket,
)

TENSORS = {
    "w": torch.randn(3, 5, generator=torch.Generator().manual_seed(0)),
    "half": torch.arange(3.0).to(torch.bfloat16),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "empty": torch.zeros(0, 4),
    "ids": torch.arange(7, dtype=torch.int64),
}
SPECS = [TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in TENSORS.items()]


def test_plan_buckets_hand_example_fills_in_order_and_leaves_the_large_one_alone() -> None:
    specs = [TensorSpec(name, (size,), "float32") for name, size in (("a", 4), ("b", 2), ("c", 100), ("d", 1), ("e", 5))]
    buckets = plan_buckets(specs, 32)
    assert [[spec.name for spec in bucket.specs] for bucket in buckets] == [["a", "b"], ["c"], ["d", "e"]]
    assert [bucket.num_bytes for bucket in buckets] == [24, 400, 24]
    assert [bucket.offsets for bucket in buckets] == [(0, 16), (0,), (0, 4)]


@settings(max_examples=50, deadline=None)
@given(sizes=st.lists(st.integers(0, 40), max_size=20), bucket_bytes=st.integers(1, 200))
def test_plan_buckets_any_sizes_keeps_every_tensor_once_in_order_within_the_limit(sizes: list[int], bucket_bytes: int) -> None:
    specs = [TensorSpec(f"t{index}", (size,), "bfloat16") for index, size in enumerate(sizes)]
    buckets = plan_buckets(specs, bucket_bytes)
    assert [spec for bucket in buckets for spec in bucket.specs] == specs
    assert [bucket.index for bucket in buckets] == list(range(len(buckets)))
    assert all(bucket.num_bytes <= bucket_bytes or len(bucket.specs) == 1 for bucket in buckets)


def test_plan_buckets_mixed_dtypes_leaves_no_gap_and_every_tensor_begins_at_a_multiple_of_its_item() -> None:
    (bucket,) = plan_buckets([*SPECS, TensorSpec("odd", (3,), "uint8"), TensorSpec("last", (5,), "float32")], 10_000)
    ends = [offset + spec.num_bytes for spec, offset in zip(bucket.specs, bucket.offsets, strict=True)]
    assert [0, *ends] == [*bucket.offsets, bucket.num_bytes]
    for spec, offset in zip(bucket.specs, bucket.offsets, strict=True):
        assert offset % ITEM_BYTES[spec.dtype] == 0, spec.name
    assert [spec.name for spec in bucket.specs] == ["scalar", "ids", "w", "empty", "last", "half", "odd"]


def test_plan_buckets_bad_manifest_raises() -> None:
    spec = TensorSpec("a", (2,), "float32")
    with pytest.raises(WeightSyncError, match=r"named twice in the manifest: \['a'\]"):
        plan_buckets([spec, spec], 10)
    with pytest.raises(WeightSyncError, match="bucket_bytes is 0"):
        plan_buckets([spec], 0)
    with pytest.raises(WeightSyncError, match="tensor a has dtype 'float7'"):
        plan_buckets([TensorSpec("a", (2,), "float7")], 10)


@pytest.mark.parametrize("bucket_bytes", [1, 64, 10_000])
def test_pack_and_unpack_mixed_dtypes_is_bit_exact(bucket_bytes: int) -> None:
    unpacked: dict[str, torch.Tensor] = {}
    for bucket in plan_buckets(SPECS, bucket_bytes):
        flat = pack_bucket(bucket, TENSORS)
        assert (flat.dtype, flat.shape) == (np.uint8, (bucket.num_bytes,))
        unpacked |= {name: tensor.clone() for name, tensor in unpack_bucket(bucket, flat)}
    assert set(unpacked) == set(TENSORS)
    for name, tensor in TENSORS.items():
        torch.testing.assert_close(unpacked[name], tensor, rtol=0, atol=0)


def test_pack_bucket_copies_non_contiguous_tensors_in_row_order() -> None:
    base = torch.arange(6.0).view(2, 3)
    (bucket,) = plan_buckets([TensorSpec("t", (3, 2), "float32")], 100)
    flat = pack_bucket(bucket, {"t": base.T})
    assert flat.view(np.float32).tolist() == [0, 3, 1, 4, 2, 5]


def test_unpack_bucket_read_only_array_gives_no_warning() -> None:
    (bucket,) = plan_buckets(SPECS, 10_000)
    flat = pack_bucket(bucket, TENSORS)
    flat.setflags(write=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dict(unpack_bucket(bucket, flat))["ids"].tolist() == list(range(7))


def test_pack_bucket_wrong_tensor_raises_naming_both() -> None:
    (bucket,) = plan_buckets(SPECS, 10_000)
    with pytest.raises(WeightSyncError, match=r"tensor w is float32 \[5, 3\], the manifest says float32 \[3, 5\]"):
        pack_bucket(bucket, TENSORS | {"w": torch.zeros(5, 3)})
    with pytest.raises(WeightSyncError, match=r"tensor half is float32 \[3\], the manifest says bfloat16 \[3\]"):
        pack_bucket(bucket, TENSORS | {"half": torch.zeros(3)})
    with pytest.raises(WeightSyncError, match="tensor ids is in the manifest but was not given"):
        pack_bucket(bucket, {name: tensor for name, tensor in TENSORS.items() if name != "ids"})


@pytest.mark.parametrize(
    ("flat", "found"),
    [
        (np.zeros(3, np.uint8), r"uint8 \[3\]"),
        (np.zeros(156, np.int8), r"int8 \[156\]"),
        (np.zeros((1, 156), np.uint8), r"uint8 \[1, 156\]"),
    ],
)
def test_unpack_bucket_wrong_array_raises_with_both_sizes(flat: np.ndarray, found: str) -> None:
    (bucket,) = plan_buckets(SPECS, 10_000)
    with pytest.raises(
        WeightSyncError, match=rf"bucket 0 \(scalar to half\) arrived as {found}, expected uint8 \[{bucket.num_bytes}\]"
    ):
        list(unpack_bucket(bucket, flat))


def test_checksums_agree_between_bucket_and_tensor_and_see_name_and_bytes() -> None:
    (bucket,) = plan_buckets(SPECS, 10_000)
    packed = bucket_checksums(bucket, pack_bucket(bucket, TENSORS))
    assert packed == {name: tensor_checksum(name, tensor) for name, tensor in TENSORS.items()}
    assert len(set(packed.values())) == len(packed)
    content = np.arange(9, dtype=np.uint8)
    changed = content.copy()
    changed[8] ^= 1
    assert checksum("a", content) == checksum("a", content.copy())
    assert len({checksum("a", content), checksum("b", content), checksum("a", changed)}) == 3


def test_tensor_checksum_of_a_view_is_that_of_its_values() -> None:
    base = torch.arange(6.0).view(2, 3)
    assert tensor_checksum("t", base.T) == tensor_checksum("t", base.T.clone().contiguous())
