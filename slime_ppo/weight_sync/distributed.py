"""Weight sync by broadcast: the trainer's rank 0 and every rank of the engine's servers form one process group."""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from slime_ppo.errors import SlimePpoError, WeightSyncError
from slime_ppo.weight_sync.base import BroadcastSource, BroadcastTarget, CheckMode, Meeting, PushCheck, finish_push
from slime_ppo.weight_sync.bucket import plan_buckets

_log = logging.getLogger(__name__)


class DistributedSync:
    """`WeightSync` bucket by bucket over a process group: gloo between CPUs, NCCL between GPUs.

    The group is met anew, at a new port and under a new name, before the first push, after a push that failed, and when a server
    was started anew; the push after that is checked as a first one. A server that refuses or dies during a push ends it with a
    WeightSyncError at once, one that hangs after the group's timeout at the latest; the trainer's ranks go on.
    """

    def __init__(self, source: BroadcastSource, target: BroadcastTarget, *, bucket_bytes: int, check: CheckMode = "first") -> None:
        self._source = source
        self._target = target
        self._bucket_bytes = bucket_bytes
        self._check = PushCheck(check)
        self._joined: int | None = None

    def connect(self) -> None:
        self._manifest = self._source.manifest()
        self._buckets = plan_buckets(self._manifest, self._bucket_bytes)

    def push(self, version: int) -> int:
        self._target.begin_update(self._manifest, version, bucket_bytes=self._bucket_bytes)
        try:
            self._meet()
            return self._push(version)
        except SlimePpoError:
            self._joined = None  # whoever is left in the group is out of step
            raise

    def close(self) -> None:
        if self._joined is not None:
            self._joined = None
            self._target.leave_group()
            self._source.leave_engine()
        self._check.renew()

    def _meet(self) -> None:
        source, target = self._source, self._target
        incarnation = target.incarnation()
        if self._joined == incarnation:
            return
        self._check.renew()
        target.leave_group()
        meeting: Meeting = source.meet_engine(target.num_ranks())
        self._together(partial(source.join_engine, meeting), partial(target.join_group, meeting))
        self._joined = incarnation

    def _push(self, version: int) -> int:
        source, target = self._source, self._target
        for bucket in self._buckets:
            self._together(partial(source.broadcast_bucket, bucket), partial(target.receive_bucket, bucket.index))
            if self._check.is_due:
                target.check_bucket(bucket, source.export_bucket(bucket))
        reported = finish_push(target, version)
        self._check.passed()
        return reported

    def _together(self, at_source: Callable[[], None], at_target: Callable[[], None]) -> None:
        """Both ends of one transfer at the same time; the source is not left waiting for a target that has failed. Raises what
        went wrong: an engine's word tells more than a broken group."""

        def receive() -> None:
            try:
                at_target()
            except BaseException:
                self._source.abandon_engine()
                raise

        with ThreadPoolExecutor(1, "engine-end") as pool:
            receiving = pool.submit(receive)
            try:
                at_source()
            except WeightSyncError as error:
                failure = receiving.exception()
                if failure is None:
                    raise
                _log.info("the trainer's end: %s", error)
                raise failure from error
            receiving.result()
