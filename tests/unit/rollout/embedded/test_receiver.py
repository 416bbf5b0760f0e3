"""A push is all or nothing: every way it can fail leaves no valid version and says what to do."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from slime_ppo.errors import WeightSyncError
from slime_ppo.rollout.embedded.receiver import WeightReceiver
from slime_ppo.rollout.engine import NO_VERSION
from slime_ppo.weight_sync.bucket import TensorSpec, pack_bucket, plan_buckets

BUCKET_BYTES = 32
SOURCE = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(4.0) + 10, "c": torch.tensor([[7.0]])}


@pytest.fixture
def parameters() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in SOURCE.items()}


@pytest.fixture
def receiver(parameters: dict[str, torch.Tensor]) -> WeightReceiver:
    return WeightReceiver(parameters)


def _flats(receiver: WeightReceiver) -> list[np.ndarray]:
    return [pack_bucket(bucket, SOURCE) for bucket in plan_buckets(receiver.manifest(), BUCKET_BYTES)]


def _push(receiver: WeightReceiver, version: int) -> int:
    receiver.begin(receiver.manifest(), version, bucket_bytes=BUCKET_BYTES)
    for index, flat in enumerate(_flats(receiver)):
        receiver.load(index, flat)
    return receiver.end()


def _begun(receiver: WeightReceiver) -> list[np.ndarray]:
    """A valid version 1, then a push of version 2 under way."""
    _push(receiver, 1)
    receiver.begin(receiver.manifest(), 2, bucket_bytes=BUCKET_BYTES)
    return _flats(receiver)


def test_receiver_whole_push_sets_version_and_values(receiver: WeightReceiver, parameters: dict[str, torch.Tensor]) -> None:
    assert receiver.version == NO_VERSION
    assert len(_flats(receiver)) == 2
    assert _push(receiver, 5) == receiver.version == 5
    for name, tensor in SOURCE.items():
        torch.testing.assert_close(parameters[name], tensor, rtol=0, atol=0)


def test_receiver_buckets_in_any_order_are_accepted(receiver: WeightReceiver, parameters: dict[str, torch.Tensor]) -> None:
    receiver.begin(receiver.manifest(), 0, bucket_bytes=BUCKET_BYTES)
    for index, flat in reversed(list(enumerate(_flats(receiver)))):
        receiver.load(index, flat)
    assert receiver.end() == 0
    torch.testing.assert_close(parameters["b"], SOURCE["b"], rtol=0, atol=0)


def test_receiver_read_only_bucket_is_copied_and_never_aliased(
    receiver: WeightReceiver, parameters: dict[str, torch.Tensor]
) -> None:
    flats = _begun(receiver)
    for index, flat in enumerate(flats):
        flat.setflags(write=False)
        receiver.load(index, flat)
    receiver.end()
    parameters["a"].add_(1)
    for flat in flats:
        flat.setflags(write=True)
        flat[:] = 0
    torch.testing.assert_close(parameters["a"], SOURCE["a"] + 1, rtol=0, atol=0)


def test_receiver_begin_ends_validity_of_the_last_version(receiver: WeightReceiver) -> None:
    _begun(receiver)
    assert receiver.version == NO_VERSION


def test_receiver_end_with_missing_buckets_raises_naming_them(receiver: WeightReceiver) -> None:
    flats = _begun(receiver)
    receiver.load(0, flats[0])
    with pytest.raises(WeightSyncError, match=r"version 2 ended after 1 of 2 buckets; missing \[1\], first tensor b"):
        receiver.end()
    assert receiver.version == NO_VERSION


@pytest.mark.parametrize("index", [-1, 2])
def test_receiver_unknown_bucket_raises_and_ends_the_push(receiver: WeightReceiver, index: int) -> None:
    flats = _begun(receiver)
    with pytest.raises(WeightSyncError, match=f"bucket {index} of version 2 was pushed, expected 0 to 1"):
        receiver.load(index, flats[0])
    with pytest.raises(WeightSyncError, match="no push was under way"):
        receiver.load(0, flats[0])


def test_receiver_bucket_twice_raises(receiver: WeightReceiver) -> None:
    flats = _begun(receiver)
    receiver.load(0, flats[0])
    with pytest.raises(WeightSyncError, match="bucket 0 of version 2 was pushed twice"):
        receiver.load(0, flats[0])


def test_receiver_bucket_of_wrong_size_ends_the_push_until_a_whole_one(receiver: WeightReceiver) -> None:
    flats = _begun(receiver)
    receiver.load(1, flats[1])
    with pytest.raises(WeightSyncError, match=r"bucket 0 .* uint8 \[23\], expected uint8 \[24\]"):
        receiver.load(0, flats[0][:-1])
    with pytest.raises(WeightSyncError, match="no push was under way"):
        receiver.end()
    assert receiver.version == NO_VERSION
    assert _push(receiver, 2) == 2


def test_receiver_wrong_manifest_raises_and_leaves_no_version(receiver: WeightReceiver) -> None:
    _push(receiver, 1)
    with pytest.raises(WeightSyncError, match="missing: c"):
        receiver.begin(receiver.manifest()[:2], 2, bucket_bytes=BUCKET_BYTES)
    assert receiver.version == NO_VERSION


def test_receiver_wrong_dtype_raises_naming_both(receiver: WeightReceiver) -> None:
    manifest = (TensorSpec("a", (2, 3), "bfloat16"), *receiver.manifest()[1:])
    with pytest.raises(WeightSyncError, match=r"a is bfloat16 \[2, 3\], the engine expects float32 \[2, 3\]"):
        receiver.begin(manifest, 2, bucket_bytes=BUCKET_BYTES)


def test_receiver_negative_version_raises(receiver: WeightReceiver) -> None:
    with pytest.raises(WeightSyncError, match="weight version -1 pushed"):
        receiver.begin(receiver.manifest(), -1, bucket_bytes=BUCKET_BYTES)


def test_receiver_invalidate_during_a_push_ends_it(receiver: WeightReceiver) -> None:
    flats = _begun(receiver)
    receiver.invalidate()
    with pytest.raises(WeightSyncError, match="bucket 0 arrived while no push was under way"):
        receiver.load(0, flats[0])


def test_receiver_folder_brings_all_tensors_in_the_parameters_types(
    receiver: WeightReceiver, parameters: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    whole = {name: tensor.double() for name, tensor in SOURCE.items()} | {"unused": torch.zeros(3)}
    save_file(whole, tmp_path / "model.safetensors")
    receiver.begin(receiver.manifest(), 4, bucket_bytes=BUCKET_BYTES)
    receiver.load_folder(str(tmp_path))
    assert receiver.end() == 4
    for name, tensor in SOURCE.items():
        torch.testing.assert_close(parameters[name], tensor, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("change", "message"), [({"b": None}, "has no tensor b"), ({"b": torch.zeros(5)}, "do not fit the engine: .*size")]
)
def test_receiver_folder_that_does_not_fit_ends_the_push(
    receiver: WeightReceiver, tmp_path: Path, change: dict[str, torch.Tensor | None], message: str
) -> None:
    save_file({name: tensor for name, tensor in (SOURCE | change).items() if tensor is not None}, tmp_path / "model.safetensors")
    _begun(receiver)
    with pytest.raises(WeightSyncError, match=message):
        receiver.load_folder(str(tmp_path))
    assert receiver.version == NO_VERSION
    with pytest.raises(WeightSyncError, match="while no push was under way"):
        receiver.end()
