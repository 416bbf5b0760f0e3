"""One role on one rank, whoever started the process: what Ray's processes and torchrun's ranks have in common.

Torch and Megatron are imported in the methods, on the ranks; the driver of a Ray run never does.
"""

import gc
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from slime_ppo.config.correction import CorrectionConfig
from slime_ppo.config.ppo import PpoConfig
from slime_ppo.errors import CheckpointError, WeightSyncError
from slime_ppo.parallel.worker_settings import DeviceKind, WorkerSettings
from slime_ppo.types.load_report import LoadReport
from slime_ppo.types.rollout_batch import ColumnPart, RolloutBatch
from slime_ppo.types.stats import Stats
from slime_ppo.types.step_plan import StepPlan
from slime_ppo.weight_sync.base import Meeting
from slime_ppo.weight_sync.bucket import Bucket, TensorSpec, fill_bucket, pack_bucket
from slime_ppo.weight_sync.process_group import EngineGroup

if TYPE_CHECKING:
    import torch

    from slime_ppo.backends.megatron.actor import ActorRole
    from slime_ppo.backends.megatron.critic import CriticRole
    from slime_ppo.backends.megatron.export import WeightExporter
    from slime_ppo.backends.megatron.sft import SftRole


def import_megatron(device: DeviceKind) -> None:
    """Import what the roles need, the slow part of a start. What is imported stays, so that no garbage collection looks through
    it: neither those that it would cause itself nor later ones, between the steps."""
    gc.disable()
    try:
        from slime_ppo.backends.megatron.device import prepare_megatron

        prepare_megatron(device)
        from slime_ppo.backends.megatron import actor, critic, sft  # noqa: F401
    finally:
        gc.enable()
    gc.freeze()


class RankRole:
    """The actor, of PPO or of SFT, or the critic of this rank, once it was started as one. All ranks of the role are called
    together."""

    def __init__(self) -> None:
        self._started: ActorRole | CriticRole | SftRole | None = None
        self._actor: ActorRole | SftRole | None = None
        self._judge: ActorRole | CriticRole | None = None
        self._exporter: WeightExporter | None = None
        self._engine_group: EngineGroup | None = None
        self._shared: torch.Tensor | None = None

    def start_actor(self, settings: WorkerSettings, ppo: PpoConfig, correction: CorrectionConfig, temperature: float) -> None:
        """Join the other ranks and build the policy."""
        from slime_ppo.backends.megatron.actor import ActorRole

        self._started = self._actor = self._judge = ActorRole(settings, ppo, correction, temperature)
        self._build_exporter()

    def start_critic(self, settings: WorkerSettings, ppo: PpoConfig) -> None:
        """Join the other ranks and build the value function."""
        from slime_ppo.backends.megatron.critic import CriticRole

        self._started = self._judge = CriticRole(settings, ppo)
        self._build_exporter()

    def start_sft(self, settings: WorkerSettings) -> None:
        """Join the other ranks and build the language model that is fine-tuned."""
        from slime_ppo.backends.megatron.sft import SftRole

        self._started = self._actor = SftRole(settings)
        self._build_exporter()

    def compute_log_probs(self, batch: RolloutBatch) -> tuple[ColumnPart | None, Stats]:
        """As ActorRole's or SftRole's; asked of the actor alone."""
        if self._actor is None:
            raise RuntimeError("log-probs were asked of a rank that has not been started as the actor")
        return self._actor.compute_log_probs(batch)

    def compute_advantages(self, batch: RolloutBatch, kl_coef: float) -> tuple[ColumnPart | None, Stats]:
        """Of the critic, or of an actor that trains without one."""
        if self._judge is None:
            raise RuntimeError("advantages were asked of a rank that has not been started as the actor or the critic of PPO")
        return self._judge.compute_advantages(batch, kl_coef)

    def train(self, batch: RolloutBatch, plan: StepPlan, learning_rates: Sequence[float]) -> list[Stats]:
        """The planned optimizer steps."""
        return self._role.train(batch, plan, learning_rates)

    def wake(self) -> None:
        self._role.memory.wake()

    def offload(self) -> None:
        self._role.memory.offload()

    def resident_bytes(self) -> int:
        return self._role.memory.resident_bytes()

    def manifest(self) -> tuple[TensorSpec, ...]:
        """The weights as Hugging Face tensors: names, shapes, types."""
        return self._weights.specs

    def export_bucket(self, bucket: Bucket) -> np.ndarray | None:
        """The bucket's bytes on rank 0, None elsewhere."""
        tensors = self._weights.gather(bucket)
        return pack_bucket(bucket, tensors) if self._is_first else None

    def save_hf(self, folder: str, bucket_bytes: int) -> None:
        """Write a Hugging Face folder from rank 0."""
        self._write_hf(folder, bucket_bytes, durable=True)

    def _write_hf(self, folder: str, bucket_bytes: int, *, durable: bool) -> None:
        from slime_ppo.backends.megatron.export import save_hf_folder

        save_hf_folder(
            self._weights,
            folder,
            source=self._role.settings.model.hf_folder,
            bucket_bytes=bucket_bytes,
            writes=self._is_first,
            durable=durable,
        )

    def publish_hf(self, folder: str, bucket_bytes: int) -> str | None:
        """As save_hf, for the engine, which reads it at once: what went wrong on rank 0, after which all ranks go on, or None."""
        try:
            self._write_hf(folder, bucket_bytes, durable=False)
        except (CheckpointError, OSError) as error:
            return f"{type(error).__name__}: {error}"
        return None

    def save_checkpoint(self, folder: str, in_background: bool) -> str | None:
        """Write the state of the role: what went wrong, the same on every rank, after which all go on, or None."""
        from slime_ppo.backends.megatron.checkpoint import save_checkpoint

        return _checkpoint_problem(lambda: save_checkpoint(self._role, folder, in_background=in_background))

    def finish_save(self) -> str | None:
        """Wait for what the last save has left to do: what went wrong, as save_checkpoint."""
        from slime_ppo.backends.megatron.checkpoint import finish_save

        return _checkpoint_problem(lambda: finish_save(self._role))

    def load_checkpoint(self, folder: str, with_optimizer: bool) -> LoadReport:
        """Take over the state in `folder`."""
        from slime_ppo.backends.megatron.checkpoint import load_checkpoint

        return load_checkpoint(self._role, folder, with_optimizer=with_optimizer)

    def share_bucket(self, bucket: Bucket) -> str:
        """The bucket's bytes in this rank's GPU memory, as a server on the same GPU is told of them."""
        from slime_ppo.rollout.sglang.payload import ipc_payload

        self._shared = _flat(bucket, self._weights.gather(bucket))
        return ipc_payload(bucket, self._shared)

    def release_shared(self) -> None:
        """Free what share_bucket holds."""
        self._shared = None

    def meet_engine(self, num_engine_ranks: int, *, host: str, timeout_s: float) -> Meeting | None:
        """Where rank 0 and the servers can form a group; `host` is how they reach this node. None on other ranks."""
        if not self._is_first:
            return None
        if self._engine_group is not None:
            self._engine_group.leave()
        self._engine_group = EngineGroup(host=host, device=self._role.settings.rank.device, timeout_s=timeout_s)
        return self._engine_group.meet(num_engine_ranks)

    def join_engine(self, meeting: Meeting) -> str | None:
        """Form the group on rank 0: what went wrong, or None."""
        group = self._engine_group
        return _problem(lambda: group.join(meeting)) if group is not None else None

    def broadcast_bucket(self, bucket: Bucket) -> str | None:
        """Gather the bucket on all ranks and broadcast it from rank 0: what went wrong with the servers, or None."""
        tensors = self._weights.gather(bucket)
        group = self._engine_group
        return _problem(lambda: group.broadcast(_flat(bucket, tensors))) if group is not None else None

    def abandon_engine(self) -> None:
        """Called beside join_engine or broadcast_bucket, whose wait it ends on rank 0."""
        if self._engine_group is not None:
            self._engine_group.abandon()

    def leave_engine(self) -> None:
        """Leave the group of rank 0 and the servers, if there is one."""
        if self._engine_group is not None:
            self._engine_group.leave()
            self._engine_group = None

    @property
    def _role(self) -> "ActorRole | CriticRole | SftRole":
        if self._started is None:
            raise RuntimeError("this rank has not been started as the actor or the critic")
        return self._started

    @property
    def _weights(self) -> "WeightExporter":
        if self._exporter is None:
            raise RuntimeError("this rank has not been started as the actor or the critic")
        return self._exporter

    @property
    def _is_first(self) -> bool:
        return self._role.settings.rank.rank == 0

    def _build_exporter(self) -> None:
        from slime_ppo.backends.megatron.export import WeightExporter

        self._exporter = WeightExporter(self._role.models, self._role.table, self._role.layout)


def _flat(bucket: Bucket, tensors: "Mapping[str, torch.Tensor]") -> "torch.Tensor":
    """The bucket's bytes, uint8 [num_bytes], where the tensors are."""
    import torch

    flat = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=next(iter(tensors.values())).device)
    fill_bucket(bucket, tensors, flat)
    return flat


def _checkpoint_problem(action: Callable[[], None]) -> str | None:
    """The text of a failed save, which must not end this rank; None when the action succeeded."""
    try:
        action()
    except CheckpointError as error:
        return str(error)
    return None


def _problem(action: Callable[[], None]) -> str | None:
    """The text of a failed weight sync, which must not end this rank; None when the action succeeded."""
    try:
        action()
    except WeightSyncError as error:
        return str(error)
    return None
