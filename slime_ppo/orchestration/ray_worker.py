"""The processes that Ray starts: one per rank of a role, one for the rollout engine.

Torch, Megatron and transformers are imported in their methods, in their processes; the driver never does.
"""

import faulthandler
import logging
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import ray

from slime_ppo.config.correction import CorrectionConfig
from slime_ppo.config.ppo import PpoConfig
from slime_ppo.orchestration.rank_role import RankRole, import_megatron
from slime_ppo.parallel.worker_settings import DeviceKind, WorkerSettings
from slime_ppo.rollout.engine import EngineHealth, EnginePart
from slime_ppo.types.rollout_batch import ColumnPart, RolloutBatch
from slime_ppo.types.sample import GenerateRequest, GenerateResult
from slime_ppo.types.stats import Stats
from slime_ppo.types.step_plan import StepPlan
from slime_ppo.weight_sync.base import Meeting, check_bucket
from slime_ppo.weight_sync.bucket import Bucket, TensorSpec

if TYPE_CHECKING:
    from slime_ppo.rollout.embedded.engine import EmbeddedEngine

Started = TypeVar("Started")


def _logged(method: Callable[..., Any]) -> Callable[..., Any]:
    """Leave the traceback in this process's log; the driver shows one line of it. Goes outside of `ray.method`, whose
    marks Ray looks for on the innermost function."""

    @wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except BaseException:
            traceback.print_exc()
            raise

    return wrapped


# something large, which stays in the object store, and something small, which the driver waits for
_two_results = cast(Callable[[Callable[..., Any]], Callable[..., Any]], ray.method(num_returns=2))


class Process:
    """What all our processes have: a log of their own, and a call that lasts as long as they live."""

    def __init__(self, name: str, log_dir: str) -> None:
        folder = Path(log_dir)
        folder.mkdir(parents=True, exist_ok=True)
        log = os.open(folder / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        faulthandler.enable(sys.stderr)
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr, force=True)
        warnings.filterwarnings("ignore", module=r"(megatron|torch|transformers)\.")

    @ray.method(concurrency_group="health")
    def outlive(self) -> None:
        """Never returns: its reference fails when this process dies, whatever else it was doing."""
        threading.Event().wait()


class RankProcess(Process):
    """One rank of the actor or the critic."""

    def __init__(self, name: str, log_dir: str, device: DeviceKind) -> None:
        super().__init__(name, log_dir)
        self._rank = RankRole()
        self._store: object = None
        self._import_megatron(device)

    @_logged
    def _import_megatron(self, device: DeviceKind) -> None:
        """The slow part of a start; here, so that all processes do it side by side."""
        import_megatron(device)

    @_logged
    def rendezvous(self) -> str:
        """The init_method by which this role's ranks meet at a store that this process serves; asked of rank 0."""
        from slime_ppo.backends.megatron.init import serve_store

        self._store, init_method = serve_store(str(ray.util.get_node_ip_address()))  # type: ignore[no-untyped-call]
        return init_method

    @_logged
    def start_actor(self, settings: WorkerSettings, ppo: PpoConfig, correction: CorrectionConfig, temperature: float) -> None:
        self._rank.start_actor(settings, ppo, correction, temperature)

    @_logged
    def start_critic(self, settings: WorkerSettings, ppo: PpoConfig) -> None:
        self._rank.start_critic(settings, ppo)

    @_logged
    @_two_results
    def compute_log_probs(self, batch: RolloutBatch, *parts: ColumnPart | None) -> tuple[ColumnPart | None, Stats]:
        return self._rank.compute_log_probs(batch.with_parts(parts))

    @_logged
    @_two_results
    def compute_advantages(self, kl_coef: float, batch: RolloutBatch, *parts: ColumnPart | None) -> tuple[ColumnPart | None, Stats]:
        return self._rank.compute_advantages(batch.with_parts(parts), kl_coef)

    @_logged
    def train(self, plan: StepPlan, learning_rates: Sequence[float], batch: RolloutBatch, *parts: ColumnPart | None) -> list[Stats]:
        return self._rank.train(batch.with_parts(parts), plan, learning_rates)

    @_logged
    def wake(self) -> None:
        self._rank.wake()

    @_logged
    def offload(self) -> None:
        self._rank.offload()

    def resident_bytes(self) -> int:
        return self._rank.resident_bytes()

    def manifest(self) -> tuple[TensorSpec, ...]:
        return self._rank.manifest()

    @_logged
    @_two_results
    def export_bucket(self, bucket: Bucket) -> tuple[np.ndarray | None, None]:
        """The bucket's bytes on rank 0, and a small result to wait for."""
        return self._rank.export_bucket(bucket), None

    @_logged
    def save_hf(self, folder: str, bucket_bytes: int) -> None:
        self._rank.save_hf(folder, bucket_bytes)

    @_logged
    def publish_hf(self, folder: str, bucket_bytes: int) -> str | None:
        return self._rank.publish_hf(folder, bucket_bytes)

    @_logged
    def share_bucket(self, bucket: Bucket) -> str:
        return self._rank.share_bucket(bucket)

    @_logged
    def release_shared(self) -> None:
        self._rank.release_shared()

    @_logged
    def meet_engine(self, num_engine_ranks: int, timeout_s: float) -> Meeting | None:
        host = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        return self._rank.meet_engine(num_engine_ranks, host=host, timeout_s=timeout_s)

    @_logged
    def join_engine(self, meeting: Meeting) -> str | None:
        return self._rank.join_engine(meeting)

    @_logged
    def broadcast_bucket(self, bucket: Bucket) -> str | None:
        return self._rank.broadcast_bucket(bucket)

    @_logged
    def leave_engine(self) -> None:
        self._rank.leave_engine()


class EngineProcess(Process):
    """The embedded rollout engine in a process of its own."""

    def __init__(self, name: str, log_dir: str) -> None:
        super().__init__(name, log_dir)
        self._engine: EmbeddedEngine | None = None

    @_logged
    def start(
        self,
        hf_folder: str,
        *,
        dtype: str,
        device: str,
        trust_remote_code: bool,
        fp32_lm_head: bool,
        num_threads: int,
        starts_offloaded: bool,
    ) -> None:
        from slime_ppo.rollout.embedded.engine import EmbeddedEngine

        self._engine = EmbeddedEngine(
            hf_folder,
            dtype=dtype,
            device=device,
            trust_remote_code=trust_remote_code,
            fp32_lm_head=fp32_lm_head,
            num_threads=num_threads,
        )
        if starts_offloaded:
            self._engine.offload(EnginePart.ALL)

    @_logged
    def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        return _present(self._engine).generate(requests)

    @ray.method(concurrency_group="health")
    def abort(self) -> None:
        _present(self._engine).abort()

    @_logged
    def wake(self, parts: EnginePart) -> None:
        _present(self._engine).wake(parts)

    @_logged
    def offload(self, parts: EnginePart) -> None:
        _present(self._engine).offload(parts)

    def health(self) -> EngineHealth:
        return _present(self._engine).health()

    @_logged
    def begin_update(self, manifest: tuple[TensorSpec, ...], version: int, bucket_bytes: int) -> None:
        _present(self._engine).begin_update(manifest, version, bucket_bytes=bucket_bytes)

    @_logged
    def load_bucket(self, index: int, flat: np.ndarray) -> None:
        _present(self._engine).load_bucket(index, flat)

    @_logged
    def end_update(self) -> int:
        return _present(self._engine).end_update()

    @_logged
    def check_bucket(self, bucket: Bucket, flat: np.ndarray) -> None:
        """Compare the engine's parameters with what the trainer sent. Raises WeightSyncError naming the tensors."""
        check_bucket(_present(self._engine), bucket, flat)


def _present(started: Started | None) -> Started:
    if started is None:
        raise RuntimeError("this process has not been started as what it is asked for")
    return started
