"""SGLang's servers on a Ray cluster: a host process on every device of an engine, the first of which owns the server."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from slime_ppo.errors import RolloutError, SlimePpoError
from slime_ppo.orchestration.ray_process import Process, logged
from slime_ppo.rollout.sglang.server import LocalServer, ServerAddress
from slime_ppo.rollout.sglang.server_args import LOOPBACK, ServerSpec

_log = logging.getLogger(__name__)

_HOST_TIMEOUT_S = 60.0
"""A host ends a server within 40 s, and answers at once otherwise; a node that is frozen must not hold up the engine."""


@dataclass(frozen=True)
class HostPlace:
    """A host's node, the address under which other nodes reach it, and the GPUs of it that Ray gave the host (none on a CPU)."""

    node: str
    address: str
    gpus: tuple[int, ...] = ()


class ServerHostProcess(Process):
    """Holds one device for an engine. The first host of an engine starts, watches and ends its server."""

    def __init__(self, name: str, log_dir: str) -> None:
        super().__init__(name, log_dir)
        self._server: LocalServer | None = None

    def place(self) -> HostPlace:
        address = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        gpus = tuple(int(one) for one in ray.get_gpu_ids())
        return HostPlace(str(ray.get_runtime_context().get_node_id()), address, gpus)

    @logged
    def start(self, spec: ServerSpec) -> ServerAddress:
        """Start the server, again after it has died; returns when it is ready."""
        if self._server is None:
            self._server = LocalServer(spec)
        return self._server.start()

    @ray.method(concurrency_group="health")
    def problem(self) -> str | None:
        return "it has not been started" if self._server is None else self._server.problem()

    @ray.method(concurrency_group="health")
    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()


class RayServer:
    """`Server` by remote calls of its host; lives in the process of the engine's client."""

    def __init__(self, host: Any, spec: ServerSpec) -> None:
        self._host = host
        self._spec = spec

    def start(self) -> ServerAddress:
        address: ServerAddress = self._call(self._host.start.remote(self._spec))
        return address

    def problem(self) -> str | None:
        try:
            found: str | None = self._call(self._host.problem.remote(), _HOST_TIMEOUT_S)
        except RolloutError as error:
            return str(error)
        return found

    def stop(self) -> None:
        self._call(self._host.stop.remote(), _HOST_TIMEOUT_S)

    def _call(self, ref: Any, timeout_s: float | None = None) -> Any:
        try:
            return ray.get(ref, timeout=timeout_s)
        except RayTaskError as error:
            if isinstance(error.cause, SlimePpoError):
                raise type(error.cause)(str(error.cause)) from error
            raise RolloutError(f"the host of an SGLang server failed: {error.cause}") from error
        except GetTimeoutError as error:
            raise RolloutError(f"the host process of an SGLang server has not answered for {timeout_s:g} s") from error
        except RayError as error:
            raise RolloutError(
                f"the host process of an SGLang server has died, and the server with it: {type(error).__name__}"
            ) from error


def placed_specs(specs: Sequence[ServerSpec], places: Sequence[Sequence[HostPlace]]) -> list[ServerSpec]:
    """The specs with the GPUs that the hosts of each engine hold, `places` by engine.

    The engines' client is on the first one's node. Servers elsewhere listen on their own node's address, if any host but loopback
    was given. Raises RolloutError for an engine on several nodes, and for servers that the client could not reach.
    """
    placed = []
    for spec, of_engine in zip(specs, places, strict=True):
        nodes = {place.node for place in of_engine}
        if len(nodes) > 1:
            raise RolloutError(
                f"the {len(of_engine)} devices of an SGLang engine are on {len(nodes)} nodes; an engine lives on one node. Lower "
                "--rollout-num-gpus-per-engine, or give the nodes whole engines"
            )
        host = spec.host
        if of_engine[0].node != places[0][0].node:
            if host in LOOPBACK:
                raise RolloutError(
                    f"SGLang's servers are on several nodes and listen on {host}, where nobody on another node reaches them. Give "
                    "--sglang-host the first node's address, with --sglang-api-key-file (the others listen on their own nodes' "
                    "addresses), or run all engines on one node"
                )
            host = of_engine[0].address
        placed.append(replace(spec, host=host, gpu_ids=tuple(gpu for place in of_engine for gpu in place.gpus)))
    return placed
