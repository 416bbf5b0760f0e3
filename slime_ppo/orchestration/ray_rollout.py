"""The rollout engine in a Ray process, and the hosts of SGLang's servers."""

from collections.abc import Sequence
from typing import Any, ClassVar

from slime_ppo.orchestration.placement import RayCluster
from slime_ppo.orchestration.ray_engine import EngineProcess
from slime_ppo.orchestration.ray_health import Call, gather
from slime_ppo.orchestration.ray_server import RayServer, ServerHostProcess, placed_specs
from slime_ppo.rollout.engine import EngineHealth, EnginePart
from slime_ppo.rollout.sglang.server_args import ServerSpec
from slime_ppo.types.sample import GenerateRequest, GenerateResult
from slime_ppo.weight_sync.base import Meeting
from slime_ppo.weight_sync.bucket import Bucket, TensorSpec


class RayRolloutEngine:
    """`RolloutEngine` and the target of every weight sync, by remote calls.

    Those that the engine in the process does not have are not called: the embedded engine takes bytes alone.
    """

    returns_support: ClassVar[bool] = True

    def __init__(
        self, cluster: RayCluster, *, tenant: str, bundle: int, log_dir: str, timeout_s: float, watched: list[Call]
    ) -> None:
        self._timeout_s = timeout_s
        self._watched = watched
        self.process = cluster.spawn(EngineProcess, tenant=tenant, bundle=bundle, arguments=("rollout-engine", log_dir))
        watched.append(Call(self.process.outlive.remote(), "rollout engine"))

    def start_embedded(self, hf_folder: str, **settings: object) -> Call:
        """Begin loading the model; wait for the call together with the roles'."""
        return Call(self.process.start_embedded.remote(hf_folder, **settings), "rollout engine")

    def start_sglang(self, servers: Sequence[object], settings: object, *, starts_offloaded: bool) -> Call:
        """Begin connecting to the servers."""
        begun = self.process.start_sglang.remote(servers, settings, starts_offloaded=starts_offloaded)
        return Call(begun, "rollout engine")

    def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        results: list[GenerateResult] = self._call("generation", "generate", requests)
        return results

    def abort(self) -> None:
        self._wait("abort", self.process.abort.remote())

    def wake(self, parts: EnginePart) -> None:
        self._call("wake", "wake", parts)

    def offload(self, parts: EnginePart) -> None:
        self._call("offload", "offload", parts)

    def weight_version(self) -> int:
        version: int = self._call("health", "weight_version")
        return version

    def health(self) -> EngineHealth:
        found: EngineHealth = self._call("health", "health")
        return found

    def begin_update(self, manifest: tuple[TensorSpec, ...], version: int, *, bucket_bytes: int) -> None:
        self._call("weight sync", "begin_update", manifest, version, bucket_bytes=bucket_bytes)

    def load_bucket(self, index: int, flat: Any) -> None:
        """`flat` is a reference to the bucket's bytes."""
        self._call("weight sync", "load_bucket", index, flat)

    def load_shared(self, index: int, payloads: Sequence[str]) -> None:
        self._call("weight sync", "load_shared", index, payloads)

    def receive_bucket(self, index: int) -> None:
        self._call("weight sync", "receive_bucket", index)

    def manifest(self) -> tuple[TensorSpec, ...]:
        specs: tuple[TensorSpec, ...] = self._call("weight sync", "manifest")
        return specs

    def load_folder(self, folder: str) -> None:
        self._call("weight sync", "load_folder", folder)

    def check_bucket(self, bucket: Bucket, flat: Any) -> None:
        self._call("weight check", "check_bucket", bucket, flat)

    def end_update(self) -> int:
        reported: int = self._call("weight sync", "end_update")
        return reported

    def join_group(self, meeting: Meeting) -> None:
        self._call("weight sync", "join_group", meeting)

    def leave_group(self) -> None:
        self._call("weight sync", "leave_group")

    def num_ranks(self) -> int:
        count: int = self._call("weight sync", "num_ranks")
        return count

    def incarnation(self) -> int:
        number: int = self._call("weight sync", "incarnation")
        return number

    def _call(self, phase: str, method: str, *arguments: object, **named: object) -> Any:
        return self._wait(phase, self.process.call.remote(method, *arguments, **named))

    def _wait(self, phase: str, ref: Any) -> Any:
        [result] = gather([Call(ref, "rollout engine")], phase=f"rollout {phase}", timeout_s=self._timeout_s, watched=self._watched)
        return result


class RayServers:
    """The hosts of all servers that the run starts: a process on every device, the first of an engine's owns its server."""

    def __init__(
        self,
        cluster: RayCluster,
        engine_bundles: Sequence[range],
        specs: Sequence[ServerSpec],
        *,
        log_dir: str,
        watched: list[Call],
    ) -> None:
        self._specs = specs
        self._hosts = [
            [
                cluster.spawn(
                    ServerHostProcess, tenant="rollout", bundle=bundle, arguments=(f"sglang-host-{engine}-{rank}", log_dir)
                )
                for rank, bundle in enumerate(bundles)
            ]
            for engine, bundles in enumerate(engine_bundles)
        ]
        watched.extend(
            Call(host.outlive.remote(), f"host of SGLang server {engine}")
            for engine, hosts in enumerate(self._hosts)
            for host in hosts
        )

    def start(self, **limits: Any) -> list[Call]:
        """Begin starting every server on the devices of its hosts."""
        places = []
        for engine, hosts in enumerate(self._hosts):
            asked = [Call(host.place.remote(), f"host of SGLang server {engine}") for host in hosts]
            places.append(gather(asked, phase="start-up", **limits))
        self._specs = placed_specs(self._specs, places)
        return [
            Call(hosts[0].start.remote(spec), f"SGLang server {engine}")
            for engine, (hosts, spec) in enumerate(zip(self._hosts, self._specs, strict=True))
        ]

    def servers(self) -> list[RayServer]:
        """For the engine's process."""
        return [RayServer(hosts[0], spec) for hosts, spec in zip(self._hosts, self._specs, strict=True)]
