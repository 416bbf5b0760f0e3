"""The seam between a trainer that has weights and an engine that needs them, and the two ends that every way of sending has."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from slime_ppo.errors import WeightSyncError
from slime_ppo.rollout.engine import EnginePart
from slime_ppo.weight_sync.bucket import Bucket, TensorSpec, bucket_checksums

CheckMode = Literal["first", "always", "never"]


class WeightSync(Protocol):
    """All or nothing per version: after a push that raised, the engine has no valid version and refuses to generate.

    The named tensors come from the trainer the implementation is made for; names are Hugging Face names.
    """

    def connect(self) -> None:
        """Learn the trainer's manifest, once, before the first push."""
        ...

    def push(self, version: int) -> int:
        """Send the trainer's weights as `version` (0 or more) and return the version the engine reports afterwards."""
        ...

    def close(self) -> None:
        """Free what the connection holds; the engine keeps its weights."""
        ...


@dataclass(frozen=True)
class Meeting:
    """Where the trainer's rank 0 and the ranks of the engine's servers meet, for one process group. Rank 0 is the trainer's."""

    address: str
    port: int
    world_size: int
    group_name: str
    backend: str


class WeightSource(Protocol):
    """The trainer's end."""

    def manifest(self) -> tuple[TensorSpec, ...]: ...

    def export_bucket(self, bucket: Bucket) -> Any:
        """The bucket's bytes, or a reference that the target can read."""
        ...


class SharingSource(WeightSource, Protocol):
    """A trainer on the engine's GPUs."""

    def share_bucket(self, bucket: Bucket) -> list[str]:
        """By rank, how the engine's processes on the same GPU find the bucket's bytes. They stay until the next call, or
        `release_shared`."""
        ...

    def release_shared(self) -> None: ...


class BroadcastSource(WeightSource, Protocol):
    """A trainer that can meet an engine in a process group. A group that breaks is a WeightSyncError and ends no rank."""

    def meet_engine(self, num_engine_ranks: int) -> Meeting:
        """Open a new place to meet, under a name that was never used; an earlier group is left."""
        ...

    def join_engine(self, meeting: Meeting) -> None:
        """Join the group; returns when all are there. Called while the engine joins."""
        ...

    def broadcast_bucket(self, bucket: Bucket) -> None:
        """Gather the bucket over the ranks and broadcast it. Called while the engine receives."""
        ...

    def abandon_engine(self) -> None:
        """End the wait of a `join_engine` or `broadcast_bucket` that runs in another thread: the engine has failed."""
        ...

    def leave_engine(self) -> None:
        """Leave the group, if there is one."""
        ...


class FolderSource(WeightSource, Protocol):
    """A trainer that can write its weights as a Hugging Face folder."""

    def publish_hf(self, folder: str) -> None:
        """The folder appears whole or not at all; WeightSyncError when it can't be written, and the ranks go on."""
        ...


class WeightTarget(Protocol):
    """The engine's end. From `begin_update` until `end_update` succeeds it has no version."""

    def begin_update(self, manifest: tuple[TensorSpec, ...], version: int, *, bucket_bytes: int) -> None:
        """Compare the manifest with the engine's weights, before anything is sent."""
        ...

    def check_bucket(self, bucket: Bucket, flat: Any) -> None:
        """Compare what the engine holds with the bytes of a bucket that it was sent: now, or at `end_update`."""
        ...

    def end_update(self) -> int: ...

    def wake(self, parts: EnginePart) -> None: ...


class TensorTarget(WeightTarget, Protocol):
    """An engine that takes bytes."""

    def load_bucket(self, index: int, flat: Any) -> None: ...


class SharingTarget(WeightTarget, Protocol):
    """An engine on the trainer's GPUs."""

    def load_shared(self, index: int, payloads: Sequence[str]) -> None: ...


class BroadcastTarget(WeightTarget, Protocol):
    """An engine whose servers join a process group."""

    def num_ranks(self) -> int:
        """Tensor-parallel ranks of all servers."""
        ...

    def incarnation(self) -> int:
        """Another number whenever a server was started anew, which has left every group."""
        ...

    def join_group(self, meeting: Meeting) -> None: ...

    def receive_bucket(self, index: int) -> None:
        """Take part in one broadcast; returns when every server holds the tensors."""
        ...

    def leave_group(self) -> None: ...


class FolderTarget(WeightTarget, Protocol):
    """An engine that reads folders."""

    def manifest(self) -> tuple[TensorSpec, ...]:
        """What a push must bring."""
        ...

    def load_folder(self, folder: str) -> None: ...


class PushCheck:
    """Which pushes are checked (--check-weight-update-equal)."""

    def __init__(self, mode: CheckMode) -> None:
        self._mode = mode
        self._passed = False

    @property
    def is_due(self) -> bool:
        """The push at hand is to be checked."""
        return self._mode == "always" or (self._mode == "first" and not self._passed)

    def passed(self) -> None:
        """A push has ended well."""
        self._passed = True

    def renew(self) -> None:
        """The next push is a first one again."""
        self._passed = False


def check_first(problems: Sequence[str | None]) -> None:
    """Raise WeightSyncError when the first rank, which deals with the engine, reports a problem."""
    if problems[0] is not None:
        raise WeightSyncError(problems[0])


def finish_push(target: WeightTarget, version: int) -> int:
    """End the update and wake the KV cache. Raises WeightSyncError when the engine reports another version."""
    reported = target.end_update()
    if reported != version:
        raise WeightSyncError(f"version {version} was pushed, the engine reports {reported}")
    target.wake(EnginePart.KV_CACHE)
    return reported


def check_manifest(specs: Sequence[TensorSpec], expected: Mapping[str, tuple[tuple[int, ...], str]]) -> None:
    """Compare a manifest with the engine's parameters: name -> (shape, dtype).

    Raises one WeightSyncError that lists every missing, unexpected, doubled and mis-shaped name.
    """
    problems: list[str] = []
    seen: dict[str, TensorSpec] = {}
    for spec in specs:
        if spec.name in seen:
            problems.append(f"twice: {spec.name}")
        seen[spec.name] = spec
    problems += [f"missing: {name}" for name in expected if name not in seen]
    problems += [f"unexpected: {name}" for name in seen if name not in expected]
    for name, (shape, dtype) in expected.items():
        if name in seen and (seen[name].shape, seen[name].dtype) != (shape, dtype):
            found = seen[name]
            problems.append(f"{name} is {found.dtype} {list(found.shape)}, the engine expects {dtype} {list(shape)}")
    if problems:
        raise WeightSyncError(
            f"the trainer's {len(specs)} tensors do not fit the engine's {len(expected)} parameters; both must come from the same "
            "model folder (--hf-checkpoint):\n  " + "\n  ".join(problems)
        )


class HoldsChecksums(Protocol):
    """An engine that can tell the checksums of its parameters."""

    def checksums(self, names: Sequence[str] | None = None) -> dict[str, str]: ...


def check_bucket(engine: HoldsChecksums, bucket: Bucket, flat: np.ndarray) -> None:
    """Compare the engine's parameters with the bytes that the trainer sent. Raises WeightSyncError naming the tensors."""
    sent = bucket_checksums(bucket, flat)
    held = engine.checksums(list(sent))
    different = [name for name in sent if held[name] != sent[name]]
    if different:
        raise WeightSyncError(f"after the push the engine's {', '.join(different)} differ from the trainer's")
