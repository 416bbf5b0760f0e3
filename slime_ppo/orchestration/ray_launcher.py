"""Training on a Ray cluster: one process per rank and role, one for the engine."""

import os
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, ClassVar

from slime_ppo.config.root import Config
from slime_ppo.config.transformer_impl import chosen_transformer_impl
from slime_ppo.orchestration.placement import ClusterSettings, RayCluster
from slime_ppo.orchestration.protocols import RunningRoles
from slime_ppo.orchestration.ray_environment import cluster_address
from slime_ppo.orchestration.ray_health import Call, check_alive, gather
from slime_ppo.orchestration.ray_rollout import RayRolloutEngine
from slime_ppo.orchestration.ray_train_group import RaySideBySide, RayTrainGroup
from slime_ppo.orchestration.worker_settings import worker_settings
from slime_ppo.parallel.worker_settings import WorkerSettings
from slime_ppo.weight_sync.tensor import TensorSync


class RayLauncher:
    """Connects to the cluster on entry; on exit ends all processes it has started."""

    returns_support: ClassVar[bool] = RayRolloutEngine.returns_support

    def __init__(self, config: Config) -> None:
        self._config = config
        self._cluster = RayCluster(_cluster_settings(config))

    def __enter__(self) -> "RayLauncher":
        self._cluster.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._cluster.__exit__(kind, error, trace)

    @property
    def description(self) -> str:
        return self._cluster.description

    def start(self, where: Callable[[], str]) -> RunningRoles:
        """Start all processes side by side and wait until every one is up."""
        config, cluster = self._config, self._cluster
        chosen_transformer_impl(config.model, cluster.device)  # refused, if it is, before any process is started
        log_dir = os.path.abspath(os.path.join(config.run.save, "logs"))
        timeout_s, bucket_bytes = config.cluster.call_timeout_s, config.rollout.weight_bucket_bytes
        bundles, watched = config.bundles, list[Call]()
        groups = {
            role: RayTrainGroup(
                cluster,
                role,
                bundles=bundles[role],
                log_dir=log_dir,
                timeout_s=timeout_s,
                bucket_bytes=bucket_bytes,
                watched=watched,
            )
            for role in config.roles
        }
        [place] = bundles["rollout"]
        engine = RayRolloutEngine(cluster, bundle=place, log_dir=log_dir, timeout_s=timeout_s, watched=watched)
        starting = engine.start(
            os.path.abspath(config.model.hf_checkpoint),
            dtype=config.model.dtype,
            device=cluster.device,
            trust_remote_code=config.model.trust_remote_code,
            fp32_lm_head=config.model.fp32_lm_head,
            num_threads=config.cluster.num_threads_per_rank,
            starts_offloaded=config.offloads,
        )
        limits: Any = {"timeout_s": config.cluster.worker_start_timeout_s, "limit": "--worker-start-timeout-s", "watched": watched}
        meeting_points = gather([group.rendezvous() for group in groups.values()], phase="start-up", **limits)
        for role, point in zip(groups, meeting_points, strict=True):
            starting += _start_role(config, groups[role], worker_settings(config, role, init_method=point, device=cluster.device))
        gather(starting, phase="start-up", **limits)
        return RunningRoles(
            groups=groups,
            engine=engine,
            sync=TensorSync(groups["actor"], engine, bucket_bytes=bucket_bytes),
            check_alive=lambda: check_alive(watched, where()),
            side_by_side=None if config.cluster.colocate else RaySideBySide(groups, timeout_s=timeout_s, watched=watched),
        )


def _cluster_settings(config: Config) -> ClusterSettings:
    return ClusterSettings(
        address=cluster_address(config.cluster),
        num_bundles=config.num_bundles,
        colocate=config.cluster.colocate,
        device=config.cluster.device,
        placement_timeout_s=config.cluster.placement_timeout_s,
        object_store_bytes=config.cluster.object_store_bytes,
    )


def _start_role(config: Config, group: RayTrainGroup, ranks: Sequence[WorkerSettings]) -> list[Call]:
    """Begin building one role on all its ranks."""
    if group.role == "critic":
        return group.start("start_critic", [(rank, config.ppo) for rank in ranks])
    temperature = config.rollout.rollout_temperature
    return group.start("start_actor", [(rank, config.ppo, config.correction, temperature) for rank in ranks])
