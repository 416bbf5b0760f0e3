"""The rollout engine in a Ray process, and the push of the actor's weights into it."""

from collections.abc import Sequence
from typing import Any, ClassVar

from slime_ppo.errors import WeightSyncError
from slime_ppo.orchestration.placement import RayCluster
from slime_ppo.orchestration.ray_health import Call, gather
from slime_ppo.orchestration.ray_train_group import RayTrainGroup
from slime_ppo.orchestration.ray_worker import EngineProcess
from slime_ppo.rollout.engine import EngineHealth, EnginePart
from slime_ppo.types.sample import GenerateRequest, GenerateResult
from slime_ppo.weight_sync.bucket import plan_buckets


class RayRolloutEngine:
    """`RolloutEngine` by remote calls."""

    returns_support: ClassVar[bool] = True

    def __init__(self, cluster: RayCluster, *, log_dir: str, timeout_s: float, watched: list[Call]) -> None:
        self._timeout_s = timeout_s
        self._watched = watched
        self.process = cluster.spawn(EngineProcess, tenant="rollout", bundle=0, arguments=("rollout-engine", log_dir))
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

    def call(self, phase: str, ref: Any) -> Any:
        """The result of one remote call of the engine."""
        [result] = gather([Call(ref, "rollout engine")], phase=f"rollout {phase}", timeout_s=self._timeout_s, watched=self._watched)
        return result


class RolloutTenant:
    """The engine as one of the tenants that take turns. Its weights wake first; the KV cache after the weight sync."""

    def __init__(self, engine: RayRolloutEngine) -> None:
        self._engine = engine

    def wake(self) -> None:
        self._engine.wake(EnginePart.WEIGHTS)

    def offload(self) -> None:
        self._engine.offload(EnginePart.ALL)

    def resident_bytes(self) -> int:
        return self._engine.health().bytes_resident


class ObjectStoreSync:
    """`WeightSync` on shared devices: buckets go from the actor's first rank to the engine through Ray's object store.

    The first push is checked: the engine's checksums must equal those of the bytes that the trainer sent.
    """

    def __init__(self, actor: RayTrainGroup, engine: RayRolloutEngine, *, bucket_bytes: int) -> None:
        self._actor = actor
        self._engine = engine
        self._bucket_bytes = bucket_bytes
        self._checked = False

    def connect(self) -> None:
        self._manifest = self._actor.manifest()
        self._buckets = plan_buckets(self._manifest, self._bucket_bytes)

    def push(self, version: int) -> int:
        engine = self._engine
        engine.call("weight sync", engine.process.begin_update.remote(self._manifest, version, self._bucket_bytes))
        for bucket in self._buckets:
            flat = self._actor.export_bucket(bucket)
            engine.call("weight sync", engine.process.load_bucket.remote(bucket.index, flat))
            if not self._checked:
                engine.call("weight check", engine.process.check_bucket.remote(bucket, flat))
        self._checked = True
        reported: int = engine.call("weight sync", engine.process.end_update.remote())
        if reported != version:
            raise WeightSyncError(f"version {version} was pushed, the engine reports {reported}")
        engine.wake(EnginePart.KV_CACHE)
        return reported

    def close(self) -> None:
        self._checked = False
