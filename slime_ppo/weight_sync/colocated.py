"""Weight sync by buckets: they go from the actor's first rank to the engine, by whatever carries them."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from slime_ppo.errors import WeightSyncError
from slime_ppo.rollout.engine import EnginePart
from slime_ppo.weight_sync.bucket import Bucket, TensorSpec, bucket_checksums, plan_buckets


class WeightSource(Protocol):
    """The trainer's end. What `export_bucket` returns is the bucket's bytes, or a reference that the target can read."""

    def manifest(self) -> tuple[TensorSpec, ...]: ...

    def export_bucket(self, bucket: Bucket) -> Any: ...


class WeightTarget(Protocol):
    """The engine's end; the methods are EmbeddedEngine's, and `check_bucket` compares what arrived with what was sent."""

    def begin_update(self, manifest: tuple[TensorSpec, ...], version: int, *, bucket_bytes: int) -> None: ...

    def load_bucket(self, index: int, flat: Any) -> None: ...

    def check_bucket(self, bucket: Bucket, flat: Any) -> None: ...

    def end_update(self) -> int: ...

    def wake(self, parts: EnginePart) -> None: ...


class ColocatedSync:
    """`WeightSync` bucket by bucket.

    The first push is checked: the engine's checksums must equal those of the bytes that the trainer sent.
    """

    def __init__(self, source: WeightSource, target: WeightTarget, *, bucket_bytes: int) -> None:
        self._source = source
        self._target = target
        self._bucket_bytes = bucket_bytes
        self._checked = False

    def connect(self) -> None:
        self._manifest = self._source.manifest()
        self._buckets = plan_buckets(self._manifest, self._bucket_bytes)

    def push(self, version: int) -> int:
        target = self._target
        target.begin_update(self._manifest, version, bucket_bytes=self._bucket_bytes)
        for bucket in self._buckets:
            flat = self._source.export_bucket(bucket)
            target.load_bucket(bucket.index, flat)
            if not self._checked:
                target.check_bucket(bucket, flat)
        self._checked = True
        reported = target.end_update()
        if reported != version:
            raise WeightSyncError(f"version {version} was pushed, the engine reports {reported}")
        target.wake(EnginePart.KV_CACHE)
        return reported

    def close(self) -> None:
        self._checked = False


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
