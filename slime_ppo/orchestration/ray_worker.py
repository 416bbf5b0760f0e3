"""The processes of the trained roles on a Ray cluster: one per rank.

Torch and Megatron are imported in their methods, in their processes; the driver never does.
"""

from collections.abc import Sequence

import numpy as np
import ray

from slime_ppo.config.correction import CorrectionConfig
from slime_ppo.config.ppo import PpoConfig
from slime_ppo.orchestration.rank_role import RankRole, import_megatron
from slime_ppo.orchestration.ray_process import Process, logged, two_results
from slime_ppo.parallel.worker_settings import DeviceKind, WorkerSettings
from slime_ppo.types.load_report import LoadReport
from slime_ppo.types.rollout_batch import ColumnPart, RolloutBatch
from slime_ppo.types.stats import Stats
from slime_ppo.types.step_plan import StepPlan
from slime_ppo.weight_sync.base import Meeting
from slime_ppo.weight_sync.bucket import Bucket, TensorSpec


class RankProcess(Process):
    """One rank of the actor or the critic."""

    def __init__(self, name: str, log_dir: str, device: DeviceKind) -> None:
        super().__init__(name, log_dir)
        self._rank = RankRole()
        self._store: object = None
        self._import_megatron(device)

    @logged
    def _import_megatron(self, device: DeviceKind) -> None:
        """The slow part of a start; here, so that all processes do it side by side."""
        import_megatron(device)

    @logged
    def rendezvous(self) -> str:
        """The init_method by which this role's ranks meet at a store that this process serves; asked of rank 0."""
        from slime_ppo.backends.megatron.init import serve_store

        self._store, init_method = serve_store(str(ray.util.get_node_ip_address()))  # type: ignore[no-untyped-call]
        return init_method

    @logged
    def start_actor(self, settings: WorkerSettings, ppo: PpoConfig, correction: CorrectionConfig, temperature: float) -> None:
        self._rank.start_actor(settings, ppo, correction, temperature)

    @logged
    def start_critic(self, settings: WorkerSettings, ppo: PpoConfig) -> None:
        self._rank.start_critic(settings, ppo)

    @logged
    @two_results
    def compute_log_probs(self, batch: RolloutBatch, *parts: ColumnPart | None) -> tuple[ColumnPart | None, Stats]:
        return self._rank.compute_log_probs(batch.with_parts(parts))

    @logged
    @two_results
    def compute_advantages(self, kl_coef: float, batch: RolloutBatch, *parts: ColumnPart | None) -> tuple[ColumnPart | None, Stats]:
        return self._rank.compute_advantages(batch.with_parts(parts), kl_coef)

    @logged
    def train(self, plan: StepPlan, learning_rates: Sequence[float], batch: RolloutBatch, *parts: ColumnPart | None) -> list[Stats]:
        return self._rank.train(batch.with_parts(parts), plan, learning_rates)

    @logged
    def wake(self) -> None:
        self._rank.wake()

    @logged
    def offload(self) -> None:
        self._rank.offload()

    def resident_bytes(self) -> int:
        return self._rank.resident_bytes()

    def manifest(self) -> tuple[TensorSpec, ...]:
        return self._rank.manifest()

    @logged
    @two_results
    def export_bucket(self, bucket: Bucket) -> tuple[np.ndarray | None, None]:
        """The bucket's bytes on rank 0, and a small result to wait for."""
        return self._rank.export_bucket(bucket), None

    @logged
    def save_hf(self, folder: str, bucket_bytes: int) -> None:
        self._rank.save_hf(folder, bucket_bytes)

    @logged
    def publish_hf(self, folder: str, bucket_bytes: int) -> str | None:
        return self._rank.publish_hf(folder, bucket_bytes)

    @logged
    def save_checkpoint(self, folder: str, in_background: bool) -> str | None:
        return self._rank.save_checkpoint(folder, in_background)

    @logged
    def finish_save(self) -> str | None:
        return self._rank.finish_save()

    @logged
    def load_checkpoint(self, folder: str, with_optimizer: bool) -> LoadReport:
        return self._rank.load_checkpoint(folder, with_optimizer)

    @logged
    def share_bucket(self, bucket: Bucket) -> str:
        return self._rank.share_bucket(bucket)

    @logged
    def release_shared(self) -> None:
        self._rank.release_shared()

    @logged
    def meet_engine(self, num_engine_ranks: int, timeout_s: float) -> Meeting | None:
        host = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        return self._rank.meet_engine(num_engine_ranks, host=host, timeout_s=timeout_s)

    @logged
    def join_engine(self, meeting: Meeting) -> str | None:
        return self._rank.join_engine(meeting)

    @logged
    def broadcast_bucket(self, bucket: Bucket) -> str | None:
        return self._rank.broadcast_bucket(bucket)

    @ray.method(concurrency_group="health")
    def abandon_engine(self) -> None:
        self._rank.abandon_engine()

    @logged
    def leave_engine(self) -> None:
        self._rank.leave_engine()
