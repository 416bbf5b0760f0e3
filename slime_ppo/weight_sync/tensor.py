"""Weight sync by bytes: buckets go from the actor's first rank to the engine, by whatever carries them."""

from slime_ppo.weight_sync.base import CheckMode, PushCheck, TensorTarget, WeightSource, finish_push
from slime_ppo.weight_sync.bucket import plan_buckets


class TensorSync:
    """`WeightSync` bucket by bucket.

    A checked push compares what the engine holds with the bytes that the trainer sent.
    """

    def __init__(self, source: WeightSource, target: TensorTarget, *, bucket_bytes: int, check: CheckMode = "first") -> None:
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
            flat = self._source.export_bucket(bucket)
            target.load_bucket(bucket.index, flat)
            if self._check.is_due:
                target.check_bucket(bucket, flat)
        reported = finish_push(target, version)
        self._check.passed()
        return reported

    def close(self) -> None:
        self._check.renew()
