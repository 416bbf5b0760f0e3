"""Training on a Ray cluster: one process per rank and role, one for the engine."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar

from slime_ppo.config.device_checks import check_device
from slime_ppo.config.root import Config
from slime_ppo.orchestration.engine_settings import engine_settings, external_servers, server_specs, weight_sync
from slime_ppo.orchestration.placement import NO_SHARE, ClusterSettings, RayCluster
from slime_ppo.orchestration.protocols import RunningEngine, RunningRoles
from slime_ppo.orchestration.ray_environment import cluster_address
from slime_ppo.orchestration.ray_health import Call, check_alive, gather
from slime_ppo.orchestration.ray_rollout import RayRolloutEngine, RayServers
from slime_ppo.orchestration.ray_train_group import RaySideBySide, RayTrainGroup
from slime_ppo.orchestration.worker_settings import worker_settings
from slime_ppo.parallel.worker_settings import WorkerSettings


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
        check_device(config, cluster.device)
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
                sync_timeout_s=config.rollout.weight_sync_timeout_s,
                watched=watched,
            )
            for role in config.roles
        }
        starting = _begin_engine(config, cluster, log_dir=log_dir, watched=watched)
        engine, limits = starting.engine, starting.limits
        if cluster.device == "cuda" and config.offloads:
            starting.finish()  # alone on the GPUs, before the roles take their memory
        meeting_points = gather([group.rendezvous() for group in groups.values()], phase="start-up", **limits)
        for role, point in zip(groups, meeting_points, strict=True):
            ranks = worker_settings(config, role, init_method=point, device=cluster.device)
            starting.calls += _start_role(config, groups[role], ranks)
        starting.finish()
        return RunningRoles(
            groups=groups,
            engine=_running(config, cluster, groups.get("actor"), engine),
            check_alive=lambda: check_alive(watched, where()),
            side_by_side=None if config.cluster.colocate else RaySideBySide(groups, timeout_s=timeout_s, watched=watched),
        )


@dataclass
class _Starting:
    """An engine that starts, or none: calls to wait for, and what begins when they have ended (None: nothing, or it has begun)."""

    engine: RayRolloutEngine | None
    calls: list[Call]
    then: Callable[[], Call] | None
    limits: Mapping[str, Any]

    def finish(self) -> None:
        """Wait until all has started that was begun; the engine after its servers."""
        gather(self.calls, phase="start-up", **self.limits)
        self.calls = []
        if self.then is not None:
            gather([self.then()], phase="start-up", **self.limits)
            self.then = None


def _running(
    config: Config, cluster: RayCluster, actor: RayTrainGroup | None, engine: RayRolloutEngine | None
) -> RunningEngine | None:
    return None if engine is None else RunningEngine(engine, weight_sync(config, actor, engine, device=cluster.device))


def _begin_engine(config: Config, cluster: RayCluster, *, log_dir: str, watched: list[Call]) -> _Starting:
    if not config.generates:
        limits = {"timeout_s": config.cluster.worker_start_timeout_s, "limit": "--worker-start-timeout-s", "watched": watched}
        return _Starting(None, [], None, limits)
    begin = _begin_embedded if config.rollout.engine == "embedded" else _begin_sglang
    return begin(config, cluster, log_dir=log_dir, watched=watched)


def _begin_embedded(config: Config, cluster: RayCluster, *, log_dir: str, watched: list[Call]) -> _Starting:
    engine = _engine(config, cluster, tenant="rollout", log_dir=log_dir, watched=watched)
    loading = engine.start_embedded(
        os.path.abspath(config.model.hf_checkpoint),
        dtype=config.model.dtype,
        device=cluster.device,
        trust_remote_code=config.model.trust_remote_code,
        fp32_lm_head=config.model.fp32_lm_head,
        num_threads=config.cluster.num_threads_per_rank,
        starts_offloaded=config.offloads,
    )
    limits = {"timeout_s": config.cluster.worker_start_timeout_s, "limit": "--worker-start-timeout-s", "watched": watched}
    return _Starting(engine, [loading], None, limits)


def _begin_sglang(config: Config, cluster: RayCluster, *, log_dir: str, watched: list[Call]) -> _Starting:
    """The servers' hosts, unless the servers are somebody else's, and their client in a process that needs no device."""
    engine = _engine(config, cluster, tenant=NO_SHARE, log_dir=log_dir, watched=watched)
    timeout_s = max(config.cluster.worker_start_timeout_s, config.sglang.start_timeout_s)
    limits = {"timeout_s": timeout_s, "limit": "--worker-start-timeout-s, --sglang-start-timeout-s", "watched": watched}
    specs = server_specs(config, device=cluster.device, log_dir=log_dir)
    hosts = RayServers(cluster, config.engine_bundles, specs, log_dir=log_dir, watched=watched)
    loading = hosts.start(**limits)

    def connect() -> Call:
        servers = hosts.servers() if config.engine_bundles else external_servers(config)
        return engine.start_sglang(servers, engine_settings(config, device=cluster.device), starts_offloaded=config.offloads)

    return _Starting(engine, loading, connect, limits)


def _engine(config: Config, cluster: RayCluster, *, tenant: str, log_dir: str, watched: list[Call]) -> RayRolloutEngine:
    bundle = next(iter(config.bundles["rollout"]), 0)
    timeout_s = config.cluster.call_timeout_s
    return RayRolloutEngine(cluster, tenant=tenant, bundle=bundle, log_dir=log_dir, timeout_s=timeout_s, watched=watched)


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
