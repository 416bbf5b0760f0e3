"""Weight sync through memory: bytes that go from the actor's first rank to the engine, or memory of GPUs that both share."""

from abc import ABC, abstractmethod

from slime_ppo.weight_sync.base import (
    CheckMode,
    PushCheck,
    SharingSource,
    SharingTarget,
    TensorTarget,
    WeightSource,
    WeightTarget,
    finish_push,
)
from slime_ppo.weight_sync.bucket import Bucket, plan_buckets


class _BucketSync(ABC):
    """`WeightSync` bucket by bucket; the classes below say how a bucket travels."""

    def __init__(self, source: WeightSource, target: WeightTarget, *, bucket_bytes: int, check: CheckMode) -> None:
        self._source = source
        self._target = target
        self._bucket_bytes = bucket_bytes
        self._check = PushCheck(check)

    def connect(self) -> None:
        self._manifest = self._source.manifest()
        self._buckets = plan_buckets(self._manifest, self._bucket_bytes)

    def push(self, version: int) -> int:
        target = self._target
        target.begin_update(self._manifest, version, bucket_bytes=self._bucket_bytes)
        for bucket in self._buckets:
            self._send(bucket)
        reported = finish_push(target, version)
        self._check.passed()
        return reported

    def close(self) -> None:
        self._check.renew()

    @abstractmethod
    def _send(self, bucket: Bucket) -> None:
        """Send one bucket, and where the push is checked let the target compare it."""


class TensorSync(_BucketSync):
    """Every bucket's bytes travel from the actor's first rank to the engine, by whatever carries them."""

    def __init__(self, source: WeightSource, target: TensorTarget, *, bucket_bytes: int, check: CheckMode = "first") -> None:
        super().__init__(source, target, bucket_bytes=bucket_bytes, check=check)
        self._tensors = target

    def _send(self, bucket: Bucket) -> None:
        flat = self._source.export_bucket(bucket)
        self._tensors.load_bucket(bucket.index, flat)
        if self._check.is_due:
            self._target.check_bucket(bucket, flat)


class SharedMemorySync(_BucketSync):
    """Every rank of the engine reads the buckets from the memory of the actor's rank on the same GPU (CUDA IPC; not run)."""

    def __init__(self, source: SharingSource, target: SharingTarget, *, bucket_bytes: int, check: CheckMode = "first") -> None:
        super().__init__(source, target, bucket_bytes=bucket_bytes, check=check)
        self._sharing, self._shared = source, target

    def push(self, version: int) -> int:
        try:
            return super().push(version)
        finally:
            self._sharing.release_shared()

    def _send(self, bucket: Bucket) -> None:
        self._shared.load_shared(bucket.index, self._sharing.share_bucket(bucket))
        if self._check.is_due:
            self._target.check_bucket(bucket, self._source.export_bucket(bucket))
