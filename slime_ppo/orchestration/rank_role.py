"""One role on one rank, whoever started the process: what Ray's processes and torchrun's ranks have in common.

Torch and Megatron are imported in the methods, on the ranks; the driver of a Ray run never does.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from slime_ppo.config.correction import CorrectionConfig
from slime_ppo.config.ppo import PpoConfig
from slime_ppo.parallel.worker_settings import DeviceKind, WorkerSettings
from slime_ppo.types.rollout_batch import ColumnPart, RolloutBatch
from slime_ppo.types.stats import Stats
from slime_ppo.types.step_plan import StepPlan
from slime_ppo.weight_sync.bucket import Bucket, TensorSpec, pack_bucket

if TYPE_CHECKING:
    from slime_ppo.backends.megatron.actor import ActorRole
    from slime_ppo.backends.megatron.critic import CriticRole
    from slime_ppo.backends.megatron.export import WeightExporter


def import_megatron(device: DeviceKind) -> None:
    """Import what the roles need, the slow part of a start."""
    from slime_ppo.backends.megatron.device import prepare_megatron

    prepare_megatron(device)
    from slime_ppo.backends.megatron import actor, critic  # noqa: F401


class RankRole:
    """The actor or the critic of this rank, once it was started as one. All ranks of the role are called together."""

    def __init__(self) -> None:
        self._started: ActorRole | CriticRole | None = None
        self._actor: ActorRole | None = None
        self._exporter: WeightExporter | None = None

    def start_actor(self, settings: WorkerSettings, ppo: PpoConfig, correction: CorrectionConfig, temperature: float) -> None:
        """Join the other ranks and build the policy."""
        from slime_ppo.backends.megatron.actor import ActorRole

        self._started = self._actor = ActorRole(settings, ppo, correction, temperature)
        self._build_exporter()

    def start_critic(self, settings: WorkerSettings, ppo: PpoConfig) -> None:
        """Join the other ranks and build the value function."""
        from slime_ppo.backends.megatron.critic import CriticRole

        self._started = CriticRole(settings, ppo)
        self._build_exporter()

    def compute_log_probs(self, batch: RolloutBatch) -> tuple[ColumnPart | None, Stats]:
        """As ActorRole's; asked of the actor alone."""
        if self._actor is None:
            raise RuntimeError("log-probs were asked of a rank that has not been started as the actor")
        return self._actor.compute_log_probs(batch)

    def compute_advantages(self, batch: RolloutBatch, kl_coef: float) -> tuple[ColumnPart | None, Stats]:
        """Of the critic, or of an actor that trains without one."""
        return self._role.compute_advantages(batch, kl_coef)

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
        from slime_ppo.backends.megatron.export import save_hf_folder

        save_hf_folder(
            self._weights,
            folder,
            source=self._role.settings.model.hf_folder,
            bucket_bytes=bucket_bytes,
            writes=self._is_first,
        )

    @property
    def _role(self) -> "ActorRole | CriticRole":
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
