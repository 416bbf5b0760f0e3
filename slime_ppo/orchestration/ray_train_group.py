"""All ranks of one role as Ray processes, behind the TrainGroup protocol."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from slime_ppo.config.roles import RoleName
from slime_ppo.orchestration.placement import RayCluster
from slime_ppo.orchestration.protocols import BatchHandle, check_saved
from slime_ppo.orchestration.ray_health import Call, gather
from slime_ppo.orchestration.ray_worker import RankProcess
from slime_ppo.types.load_report import LoadReport
from slime_ppo.types.rollout_batch import RolloutBatch
from slime_ppo.types.stats import Stats, merge_stats
from slime_ppo.types.step_plan import StepPlan
from slime_ppo.weight_sync.base import Meeting, check_first
from slime_ppo.weight_sync.bucket import Bucket, TensorSpec


class RayTrainGroup:
    """One process per rank, each in a bundle of its own. Every call goes to all ranks and waits for all of them.

    `watched` are calls that fail when any process of the run dies, so that no wait outlives a dead rank.
    """

    def __init__(
        self,
        cluster: RayCluster,
        role: str,
        *,
        bundles: Sequence[int],
        log_dir: str,
        timeout_s: float,
        bucket_bytes: int,
        watched: list[Call],
        sync_timeout_s: float,
    ) -> None:
        """`sync_timeout_s` bounds one step of a weight sync with the engine's servers."""
        self.role = role
        self._sync_timeout_s = sync_timeout_s
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        self._watched = watched
        self.ranks = [
            cluster.spawn(RankProcess, tenant=role, bundle=bundle, arguments=(f"{role}-{rank}", log_dir, cluster.device))
            for rank, bundle in enumerate(bundles)
        ]
        watched.extend(self._calls([rank.outlive.remote() for rank in self.ranks]))

    def rendezvous(self) -> Call:
        """Begin serving a store where the role's process group meets; the result is its init_method."""
        return self._calls([self.ranks[0].rendezvous.remote()])[0]

    def start(self, method: str, arguments: Sequence[Sequence[object]]) -> list[Call]:
        """Begin building the role, one tuple of arguments per rank; wait for the calls together with the other roles'."""
        return self._calls([getattr(rank, method).remote(*given) for rank, given in zip(self.ranks, arguments, strict=True)])

    def put(self, batch: RolloutBatch) -> BatchHandle:
        return BatchHandle(ray.put(batch))

    def fetch(self, handle: BatchHandle) -> RolloutBatch:
        refs: list[Any] = [handle.batch, *handle.parts]
        batch, *parts = self._gather(refs, "columns to the driver")
        merged: RolloutBatch = batch.with_parts(parts)
        return merged

    def compute_log_probs(self, handle: BatchHandle) -> tuple[BatchHandle, Stats]:
        return self._columns(
            handle, [rank.compute_log_probs.remote(handle.batch, *handle.parts) for rank in self.ranks], "log-probs"
        )

    def compute_advantages(self, handle: BatchHandle, kl_coef: float) -> tuple[BatchHandle, Stats]:
        answers = [rank.compute_advantages.remote(kl_coef, handle.batch, *handle.parts) for rank in self.ranks]
        return self._columns(handle, answers, "advantages")

    def train(self, handle: BatchHandle, plan: StepPlan, learning_rates: Sequence[float]) -> list[Stats]:
        calls = self.begin_train(handle, plan, learning_rates)
        per_rank = gather(calls, phase=f"{self.role} training", timeout_s=self._timeout_s, watched=self._watched)
        return merge_steps(per_rank)

    def begin_train(self, handle: BatchHandle, plan: StepPlan, learning_rates: Sequence[float]) -> list[Call]:
        """Begin the planned steps, a call per rank; their results are for `merge_steps`."""
        rates = tuple(learning_rates)
        return self._calls([rank.train.remote(plan, rates, handle.batch, *handle.parts) for rank in self.ranks])

    def wake(self) -> None:
        self._gather([rank.wake.remote() for rank in self.ranks], "wake")

    def offload(self) -> None:
        self._gather([rank.offload.remote() for rank in self.ranks], "offload")

    def resident_bytes(self) -> int:
        return sum(self._gather([rank.resident_bytes.remote() for rank in self.ranks], "memory report"))

    def manifest(self) -> tuple[TensorSpec, ...]:
        """The weights as Hugging Face tensors."""
        [specs] = self._gather([self.ranks[0].manifest.remote()], "manifest")
        return tuple(specs)

    def export_bucket(self, bucket: Bucket) -> "ray.ObjectRef[Any]":
        """A reference to the bucket's bytes, gathered over the ranks; they go from rank 0 to the reader, not through here."""
        answers = [rank.export_bucket.remote(bucket) for rank in self.ranks]
        self._gather([done for _, done in answers], "weight export")
        held: ray.ObjectRef[Any] = answers[0][0]
        return held

    def save_hf(self, folder: str) -> None:
        target = os.path.abspath(folder)  # a rank's current directory is another one on a joined cluster
        self._gather([rank.save_hf.remote(target, self._bucket_bytes) for rank in self.ranks], "saving weights")

    def publish_hf(self, folder: str) -> None:
        target = os.path.abspath(folder)
        answers = [rank.publish_hf.remote(target, self._bucket_bytes) for rank in self.ranks]
        check_first(self._gather(answers, "weights to a folder"))

    def save_checkpoint(self, folder: str, *, in_background: bool) -> None:
        target = os.path.abspath(folder)
        answers = [rank.save_checkpoint.remote(target, in_background) for rank in self.ranks]
        check_saved(self._gather(answers, "saving a checkpoint"))

    def finish_save(self) -> None:
        check_saved(self._gather([rank.finish_save.remote() for rank in self.ranks], "saving a checkpoint"))

    def load_checkpoint(self, folder: str, *, with_optimizer: bool) -> LoadReport:
        target = os.path.abspath(folder)
        answers = [rank.load_checkpoint.remote(target, with_optimizer) for rank in self.ranks]
        report: LoadReport = self._gather(answers, "loading a checkpoint")[0]
        return report

    def share_bucket(self, bucket: Bucket) -> list[str]:
        return self._gather([rank.share_bucket.remote(bucket) for rank in self.ranks], "weights in shared memory")

    def release_shared(self) -> None:
        self._gather([rank.release_shared.remote() for rank in self.ranks], "shared memory")

    def meet_engine(self, num_engine_ranks: int) -> Meeting:
        answers = [rank.meet_engine.remote(num_engine_ranks, self._sync_timeout_s) for rank in self.ranks]
        meeting: Meeting = self._gather(answers, "meeting the engine")[0]
        return meeting

    def join_engine(self, meeting: Meeting) -> None:
        check_first(self._gather([rank.join_engine.remote(meeting) for rank in self.ranks], "joining the engine"))

    def broadcast_bucket(self, bucket: Bucket) -> None:
        check_first(self._gather([rank.broadcast_bucket.remote(bucket) for rank in self.ranks], "weight broadcast"))

    def abandon_engine(self) -> None:
        self._gather([self.ranks[0].abandon_engine.remote()], "weight sync")

    def leave_engine(self) -> None:
        self._gather([rank.leave_engine.remote() for rank in self.ranks], "leaving the engine")

    def _columns(self, handle: BatchHandle, answers: list[list["ray.ObjectRef[Any]"]], phase: str) -> tuple[BatchHandle, Stats]:
        stats = self._gather([report for _, report in answers], phase)
        return handle.with_parts([part for part, _ in answers]), merge_stats(stats)

    def _gather(self, refs: Sequence["ray.ObjectRef[Any]"], phase: str) -> list[Any]:
        return gather(self._calls(refs), phase=f"{self.role} {phase}", timeout_s=self._timeout_s, watched=self._watched)

    def _calls(self, refs: Sequence["ray.ObjectRef[Any]"]) -> list[Call]:
        return [Call(ref, f"{self.role} rank {rank}") for rank, ref in enumerate(refs)]


class RaySideBySide:
    """`SideBySide`: one wait for the ranks of all roles, which a failure of any rank ends."""

    def __init__(self, groups: Mapping[RoleName, RayTrainGroup], *, timeout_s: float, watched: Sequence[Call]) -> None:
        self._groups = groups
        self._timeout_s = timeout_s
        self._watched = watched

    def train(
        self,
        handle: BatchHandle,
        plan: StepPlan,
        learning_rates: Mapping[RoleName, Sequence[float]],
        on_end: Callable[[RoleName], None],
    ) -> dict[RoleName, list[Stats]]:
        calls = {role: self._groups[role].begin_train(handle, plan, rates) for role, rates in learning_rates.items()}
        running = {role: len(begun) for role, begun in calls.items()}
        role_of = {call.ref: role for role, begun in calls.items() for call in begun}

        def count_down(call: Call) -> None:
            role = role_of[call.ref]
            running[role] -= 1
            if not running[role]:
                on_end(role)

        results = iter(
            gather(
                [call for begun in calls.values() for call in begun],
                phase=f"{' and '.join(calls)} training side by side",
                timeout_s=self._timeout_s,
                watched=self._watched,
                on_done=count_down,
            )
        )
        return {role: merge_steps([next(results) for _ in begun]) for role, begun in calls.items()}


def merge_steps(per_rank: Sequence[Sequence[Stats]]) -> list[Stats]:
    """One Stats per step from those of every rank."""
    return [merge_stats(step) for step in zip(*per_rank, strict=True)]
