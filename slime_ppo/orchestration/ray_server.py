"""SGLang's servers on a Ray cluster: a host process on every device of an engine, the first of which owns the server."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from slime_ppo.errors import RolloutError, SlimePpoError
from slime_ppo.orchestration.ray_process import Process, logged
from slime_ppo.rollout.sglang.server import LocalServer, ServerAddress
from slime_ppo.rollout.sglang.server_args import ServerSpec

_log = logging.getLogger(__name__)


class ServerHostProcess(Process):
    """Holds one device for an engine. The first host of an engine starts, watches and ends its server."""

    def __init__(self, name: str, log_dir: str) -> None:
        super().__init__(name, log_dir)
        self._server: LocalServer | None = None

    def device(self) -> tuple[str, tuple[int, ...]]:
        """This host's node, and the GPUs of the node that Ray gave it (none on a CPU)."""
        return str(ray.get_runtime_context().get_node_id()), tuple(int(one) for one in ray.get_gpu_ids())

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
            found: str | None = self._call(self._host.problem.remote())
        except RolloutError as error:
            return str(error)
        return found

    def stop(self) -> None:
        self._call(self._host.stop.remote())

    def _call(self, ref: Any) -> Any:
        try:
            return ray.get(ref)
        except RayTaskError as error:
            if isinstance(error.cause, SlimePpoError):
                raise type(error.cause)(str(error.cause)) from error
            raise RolloutError(f"the host of an SGLang server failed: {error.cause}") from error
        except RayActorError as error:
            raise RolloutError("the host process of an SGLang server has died, and the server with it") from error


def spec_on_devices(spec: ServerSpec, devices: Sequence[tuple[str, tuple[int, ...]]]) -> ServerSpec:
    """The spec with the GPUs that the hosts of its engine hold. Raises RolloutError when they are on several nodes."""
    nodes = {node for node, _ in devices}
    if len(nodes) > 1:
        raise RolloutError(
            f"the {len(devices)} devices of an SGLang engine are on {len(nodes)} nodes; an engine lives on one node. Lower "
            "--rollout-num-gpus-per-engine, or give the nodes whole engines"
        )
    return replace(spec, gpu_ids=tuple(gpu for _, gpus in devices for gpu in gpus))
