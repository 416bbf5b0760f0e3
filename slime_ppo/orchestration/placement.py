"""A Ray cluster, joined or local, and the placement group with the devices of actor, critic and rollout engine."""

import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from slime_ppo.errors import ConfigError
from slime_ppo.orchestration.interrupts import handlers_kept
from slime_ppo.orchestration.ray_console import quiet_ray
from slime_ppo.parallel.worker_settings import DeviceKind

_log = logging.getLogger(__name__)

_REACH_TIMEOUT_S = 5.0

# shares of a bundle whose device three tenants share; otherwise a bundle is one tenant's alone
TENANT_SHARE: Mapping[str, float] = {"actor": 0.4, "critic": 0.4, "rollout": 0.2}
# a process that computes nothing, beside those of its bundle
NO_SHARE = "client"


@dataclass(frozen=True)
class ClusterSettings:
    """`address` None starts a cluster on this machine; `num_bundles` devices (or CPU slots) are asked for.

    `device` auto takes GPUs when the cluster has any. `colocate`: actor, critic and rollout engine live on the same ones.
    """

    address: str | None
    num_bundles: int
    colocate: bool
    device: Literal["cpu", "cuda", "auto"]
    placement_timeout_s: float
    object_store_bytes: int


class RayCluster:
    """Connects on entry; on exit removes the placement group and disconnects, ending a local cluster."""

    def __init__(self, settings: ClusterSettings) -> None:
        self._settings = settings
        self._group: PlacementGroup | None = None
        self._order: Sequence[int] = ()
        self._actors: list[Any] = []
        self.device: DeviceKind = "cpu"

    def __enter__(self) -> "RayCluster":
        with handlers_kept():  # Ray's SIGTERM handler aborts the process and leaves agents behind
            self._connect()
        try:
            has_gpus = "GPU" in _resources(ray.cluster_resources)
            self.device = self._settings.device if self._settings.device != "auto" else "cuda" if has_gpus else "cpu"
            self._group = self._placement_group()
            self._order = node_by_node(placement_group_table(self._group)["bundles_to_node_id"])
        except BaseException:
            ray.shutdown()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for actor in self._actors:
            ray.kill(actor)
        if self._group is not None:
            remove_placement_group(self._group)
        ray.shutdown()

    def spawn(self, process: type, *, tenant: str, bundle: int, arguments: Sequence[object]) -> Any:
        """Start an actor process in a bundle with the tenant's share of its device; bundles count node by node."""
        share = 0.0 if tenant == NO_SHARE else TENANT_SHARE[tenant] if self._settings.colocate else 1.0
        if self._group is None:
            raise RuntimeError("the cluster has not been entered")
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=self._group,
            placement_group_bundle_index=self._order[bundle],
            placement_group_capture_child_tasks=False,
        )
        declared: Any = ray.remote
        remote = declared(concurrency_groups={"health": 2})(process).options(
            num_cpus=share,
            num_gpus=share if self.device == "cuda" else 0,
            scheduling_strategy=strategy,
            max_restarts=0,
        )
        actor = remote.remote(*arguments)
        self._actors.append(actor)
        return actor

    @property
    def description(self) -> str:
        """Where the run is, for the start of its output."""
        if self._settings.address is not None:
            return f"joined the Ray cluster at {self._settings.address}, {self._settings.num_bundles} bundles on {self.device}"
        locked = os.environ.get("RAY_AUTH_MODE") == "token"
        return (
            f"local Ray cluster, {self._settings.num_bundles} bundles on {self.device}. Ray listens on all network interfaces; "
            + ("a token locks it" if locked else "its token lock is off (RAY_AUTH_MODE)")
        )

    def _connect(self) -> None:
        quiet_ray()
        common: dict[str, Any] = {"logging_level": logging.CRITICAL, "log_to_driver": False}
        if self._settings.address is not None:
            _check_reachable(self._settings.address)
            try:
                ray.init(address=self._settings.address, **common)
            except Exception as error:
                raise ConfigError(
                    f"cannot join the Ray cluster at {self._settings.address}: {type(error).__name__}: {error}. Is it running, and "
                    "do RAY_AUTH_MODE and the token agree on both sides?"
                ) from error
            return
        cores = os.cpu_count() or 1
        ray.init(
            address="local",  # without it Ray joins a cluster that `ray start` has left on this machine
            num_cpus=max(cores, self._settings.num_bundles),
            include_dashboard=False,
            object_store_memory=self._settings.object_store_bytes,
            **common,
        )

    def _placement_group(self) -> PlacementGroup:
        kinds = {"CPU": 1.0, "GPU": 1.0} if self.device == "cuda" else {"CPU": 1.0}
        asked = {kind: amount * self._settings.num_bundles for kind, amount in kinds.items()}
        present = _resources(ray.cluster_resources)
        for kind, amount in asked.items():
            found = present.get(kind, 0.0)
            if found < amount:
                whose = (
                    "rank of the larger role, or device of the rollout engine if it has more"
                    if self._settings.colocate
                    else "rank of each role and device of the rollout engine"
                )
                raise ConfigError(
                    f"the run asks for {amount:g} {kind}s (one per {whose}), the cluster has {found:g}: lower "
                    "--actor-num-nodes, --actor-num-gpus-per-node, the critic's or --rollout-num-gpus, "
                    f"{'' if self._settings.colocate else 'let all share their devices (--colocate), '}or add nodes"
                )
        group: PlacementGroup = placement_group([kinds] * self._settings.num_bundles, strategy="PACK")
        try:
            ray.get(group.ready(), timeout=self._settings.placement_timeout_s)
        except GetTimeoutError as error:
            free = _resources(ray.available_resources)
            table = ", ".join(f"{kind}: {asked[kind]:g} asked, {free.get(kind, 0):g} free" for kind in asked)
            remove_placement_group(group)
            raise ConfigError(
                f"no placement within {self._settings.placement_timeout_s:g} s (--placement-timeout-s): {table}. Other jobs hold "
                "the rest: wait for them, or ask for less"
            ) from error
        return group


def node_by_node(node_of_bundle: Mapping[int, str]) -> list[int]:
    """The bundles ordered so that those of one node stand together, nodes by their first bundle: neighbouring ranks, which talk
    most, are neighbours. Ray numbers bundles across nodes as it likes."""
    first: dict[str, int] = {}
    for bundle in sorted(node_of_bundle):
        first.setdefault(node_of_bundle[bundle], bundle)
    return sorted(node_of_bundle, key=lambda bundle: (first[node_of_bundle[bundle]], bundle))


def _check_reachable(address: str) -> None:
    """Ray retries an address where nobody listens for minutes, deaf to signals. Other forms than host:port are Ray's to judge."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=_REACH_TIMEOUT_S).close()
    except OSError as error:
        raise ConfigError(
            f"no Ray cluster answers at {address} (--ray-address, or RAY_ADDRESS): {error}. Start one there, or leave the "
            "address out to start a local one"
        ) from error


def _resources(query: Callable[[], Any]) -> dict[str, float]:
    """Resource -> amount, over all nodes."""
    found: dict[str, float] = query()
    return found
