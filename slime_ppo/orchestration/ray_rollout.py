"""The rollout engine in a Ray process."""

from collections.abc import Sequence
from typing import Any, ClassVar

from slime_ppo.orchestration.placement import RayCluster
from slime_ppo.orchestration.ray_health import Call, gather
from slime_ppo.orchestration.ray_worker import EngineProcess
from slime_ppo.rollout.engine import EngineHealth, EnginePart
from slime_ppo.types.sample import GenerateRequest, GenerateResult
from slime_ppo.weight_sync.bucket import Bucket, TensorSpec


class RayRolloutEngine:
    """`RolloutEngine` by remote calls."""

    returns_support: ClassVar[bool] = True

    def __init__(self, cluster: RayCluster, *, bundle: int, log_dir: str, timeout_s: float, watched: list[Call]) -> None:
        self._timeout_s = timeout_s
        self._watched = watched
        self.process = cluster.spawn(EngineProcess, tenant="rollout", bundle=bundle, arguments=("rollout-engine", log_dir))
        watched.append(Call(self.process.outlive.remote(), "rollout engine"))

    def start(self, hf_folder: str, **settings: object) -> list[Call]:
        """Begin loading the model; wait for the call together with the roles'."""
        return [Call(self.process.start.remote(hf_folder, **settings), "rollout engine")]

    def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        results: list[GenerateResult] = self.call("generation", self.process.generate.remote(requests))
        return results

    def abort(self) -> None:
        self.call("abort", self.process.abort.remote())

    def wake(self, parts: EnginePart) -> None:
        self.call("wake", self.process.wake.remote(parts))

    def offload(self, parts: EnginePart) -> None:
        self.call("offload", self.process.offload.remote(parts))

    def weight_version(self) -> int:
        return self.health().weight_version

    def health(self) -> EngineHealth:
        found: EngineHealth = self.call("health", self.process.health.remote())
        return found

    def begin_update(self, manifest: tuple[TensorSpec, ...], version: int, *, bucket_bytes: int) -> None:
        self.call("weight sync", self.process.begin_update.remote(manifest, version, bucket_bytes))

    def load_bucket(self, index: int, flat: Any) -> None:
        """`flat` is a reference to the bucket's bytes."""
        self.call("weight sync", self.process.load_bucket.remote(index, flat))

    def check_bucket(self, bucket: Bucket, flat: Any) -> None:
        self.call("weight check", self.process.check_bucket.remote(bucket, flat))

    def end_update(self) -> int:
        reported: int = self.call("weight sync", self.process.end_update.remote())
        return reported

    def call(self, phase: str, ref: Any) -> Any:
        """The result of one remote call of the engine."""
        [result] = gather([Call(ref, "rollout engine")], phase=f"rollout {phase}", timeout_s=self._timeout_s, watched=self._watched)
        return result
