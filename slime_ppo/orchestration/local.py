"""Training without Ray: the ranks that torchrun has started, or one rank alone. Rank 0 is the driver, too.

The loop, the roles, the weight sync and the engine are the same as under Ray, and so are the numbers.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from slime_ppo.config.device_checks import check_device
from slime_ppo.config.launcher import launcher_text
from slime_ppo.config.roles import RoleName
from slime_ppo.config.root import Config
from slime_ppo.errors import ConfigError, EchoedError, ParallelError
from slime_ppo.orchestration.engine_settings import engine_settings, external_servers, meeting_host, server_specs, weight_sync
from slime_ppo.orchestration.interrupts import Interrupted, ignore_interrupts
from slime_ppo.orchestration.local_engine import LocalRolloutEngine
from slime_ppo.orchestration.local_ranks import Command, LocalRank, RankChannel, quiet_libraries
from slime_ppo.orchestration.local_world import FailureWatch, LocalWorld, RankStart, own_device_only
from slime_ppo.orchestration.process_log import libraries_to_file
from slime_ppo.orchestration.protocols import BatchHandle, RunningEngine, RunningRoles, check_saved
from slime_ppo.orchestration.rank_role import RankRole, import_megatron
from slime_ppo.orchestration.worker_settings import role_start, worker_settings
from slime_ppo.parallel.worker_settings import STANDING_GROUP, DeviceKind
from slime_ppo.rollout.engine import EnginePart
from slime_ppo.rollout.sglang.server_args import ServerSpec
from slime_ppo.types.load_report import LoadReport
from slime_ppo.types.rollout_batch import RolloutBatch
from slime_ppo.types.stats import Stats, merge_stats
from slime_ppo.types.step_plan import StepPlan
from slime_ppo.weight_sync.base import Meeting, check_first
from slime_ppo.weight_sync.bucket import Bucket, TensorSpec

if TYPE_CHECKING:
    from slime_ppo.rollout.sglang.engine import SGLangEngine

_log = logging.getLogger(__name__)


class LocalRanks:
    """All ranks, commanded from rank 0. A failure anywhere ends the run: what is left of the ranks is out of step."""

    def __init__(self, world: LocalWorld, start: RankStart) -> None:
        self._world = world
        self._in_step = False
        self._channel = RankChannel(world, start)
        self._own = LocalRank(self._channel)
        self._watch = FailureWatch(world)
        self._in_step = True

    def call(self, phase: str, method: str, *arguments: object) -> list[Any]:
        """Run a method of LocalRank on every rank: the results in rank order. Raises the most telling of the ranks' errors."""
        command = Command(method, arguments)
        self._in_step = False
        try:
            self._channel.command(command)
            results = self._channel.answers(self._own.run(command))
        except Interrupted as interrupt:
            self._watch.stop()
            # torchrun ends the other ranks with a signal when one has failed
            if not self._world.failures():
                raise
            raise self._world.most_telling(EchoedError(f"stopped by {interrupt}"), phase) from interrupt
        except Exception as error:
            self._watch.stop()
            ignore_interrupts()  # torchrun's, on the way out: they would hide the cause
            raise self._world.most_telling(error, phase) from error
        self._in_step = True
        return results

    def check_in_step(self) -> None:
        """Raise ParallelError when an earlier call has failed or was interrupted: ranks that answer may answer that one."""
        if not self._in_step:
            raise ParallelError("the ranks are out of step since a call that did not come to its end")

    def beside(self, role: RoleName) -> RankRole:
        """Rank 0's part of a role, for a call while a command runs."""
        return self._own.role(role)

    def batch(self, number: int) -> RolloutBatch:
        """A rollout as far as it has come."""
        return self._own.batches[number]

    def close(self, exit_code: int) -> None:
        """Let the other ranks go. Those that are left in a command notice when this process ends."""
        self._watch.stop()
        self._world.end(exit_code)
        if not self._in_step:
            return
        try:
            self._channel.command(None)
            self._channel.close()
        except RuntimeError:
            _log.exception("a rank had left before the run ended")


class LocalTrainGroup:
    """One role on all ranks, behind the TrainGroup protocol. A handle's batch is the number under which the ranks keep it."""

    def __init__(
        self,
        ranks: LocalRanks,
        role: RoleName,
        numbers: Iterator[int],
        *,
        bucket_bytes: int,
        sync_host: str,
        sync_timeout_s: float,
    ) -> None:
        """`sync_host` is how the engine's servers reach rank 0; `sync_timeout_s` bounds one step of a weight sync with them."""
        self.role = role
        self._ranks = ranks
        self._numbers = numbers
        self._bucket_bytes = bucket_bytes
        self._sync_host = sync_host
        self._sync_timeout_s = sync_timeout_s

    def put(self, batch: RolloutBatch) -> BatchHandle:
        number = next(self._numbers)
        self._call("rollout to the ranks", "put", number, batch)
        return BatchHandle(number)

    def fetch(self, handle: BatchHandle) -> RolloutBatch:
        return self._ranks.batch(_number(handle))

    def compute_log_probs(self, handle: BatchHandle) -> tuple[BatchHandle, Stats]:
        after = next(self._numbers)
        stats = self._call("log-probs", "compute_log_probs", _number(handle), after)
        return BatchHandle(after), merge_stats(stats)

    def compute_advantages(self, handle: BatchHandle, kl_coef: float) -> tuple[BatchHandle, Stats]:
        after = next(self._numbers)
        stats = self._call("advantages", "compute_advantages", self.role, _number(handle), after, kl_coef)
        return BatchHandle(after), merge_stats(stats)

    def train(self, handle: BatchHandle, plan: StepPlan, learning_rates: Sequence[float]) -> list[Stats]:
        per_rank = self._call("training", "train", self.role, _number(handle), plan, tuple(learning_rates))
        return [merge_stats(step) for step in zip(*per_rank, strict=True)]

    def wake(self) -> None:
        self._call("wake", "wake", self.role)

    def offload(self) -> None:
        self._call("offload", "offload", self.role)

    def resident_bytes(self) -> int:
        return sum(self._call("memory report", "resident_bytes", self.role))

    def manifest(self) -> tuple[TensorSpec, ...]:
        """The weights as Hugging Face tensors."""
        specs: tuple[TensorSpec, ...] = self._call("manifest", "manifest", self.role)[0]
        return specs

    def export_bucket(self, bucket: Bucket) -> np.ndarray:
        """The bucket's bytes, gathered over the ranks."""
        flat: np.ndarray = self._call("weight export", "export_bucket", self.role, bucket)[0]
        return flat

    def save_hf(self, folder: str) -> None:
        self._call("saving weights", "save_hf", self.role, os.path.abspath(folder), self._bucket_bytes)

    def publish_hf(self, folder: str) -> None:
        check_first(self._call("weights to a folder", "publish_hf", self.role, os.path.abspath(folder), self._bucket_bytes))

    def save_checkpoint(self, folder: str, *, in_background: bool) -> None:
        check_saved(self._call("saving a checkpoint", "save_checkpoint", self.role, os.path.abspath(folder), in_background))

    def finish_save(self) -> None:
        self._ranks.check_in_step()  # also asked for on the way out of a run that has failed
        check_saved(self._call("saving a checkpoint", "finish_save", self.role))

    def load_checkpoint(self, folder: str, *, with_optimizer: bool) -> LoadReport:
        arguments = (self.role, os.path.abspath(folder), with_optimizer)
        report: LoadReport = self._call("loading a checkpoint", "load_checkpoint", *arguments)[0]
        return report

    def share_bucket(self, bucket: Bucket) -> list[str]:
        return self._call("weights in shared memory", "share_bucket", self.role, bucket)

    def release_shared(self) -> None:
        self._call("shared memory", "release_shared", self.role)

    def meet_engine(self, num_engine_ranks: int) -> Meeting:
        arguments = (self.role, num_engine_ranks, self._sync_host, self._sync_timeout_s)
        meeting: Meeting = self._call("meeting the engine", "meet_engine", *arguments)[0]
        return meeting

    def join_engine(self, meeting: Meeting) -> None:
        check_first(self._call("joining the engine", "join_engine", self.role, meeting))

    def broadcast_bucket(self, bucket: Bucket) -> None:
        check_first(self._call("weight broadcast", "broadcast_bucket", self.role, bucket))

    def abandon_engine(self) -> None:
        self._ranks.beside(self.role).abandon_engine()

    def leave_engine(self) -> None:
        self._call("leaving the engine", "leave_engine", self.role)

    def _call(self, phase: str, method: str, *arguments: object) -> list[Any]:
        return self._ranks.call(f"{self.role} {phase}", method, *arguments)


class LocalLauncher:
    """Brings the ranks up on entry of `start`; on exit lets them go with the exit code that the run's error means."""

    returns_support: ClassVar[bool] = LocalRolloutEngine.returns_support

    def __init__(self, config: Config, world: LocalWorld) -> None:
        self._config = config
        self._world = world
        self._ranks: LocalRanks | None = None
        self._servers: SGLangEngine | None = None
        self._visible_gpus = os.environ.get("CUDA_VISIBLE_DEVICES")  # before this process keeps one of them

    @property
    def description(self) -> str:
        return launcher_text("local", self._world.place)

    def __enter__(self) -> "LocalLauncher":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        code = 0 if error is None else error.exit_code if isinstance(error, Interrupted) else 1
        try:
            if self._servers is not None:
                self._servers.close()
        finally:  # the other ranks wait for it
            if self._ranks is None:
                self._world.end(code)
            else:
                self._ranks.close(code)

    def start(self, where: Callable[[], str]) -> RunningRoles:
        """Build both roles on all ranks, one after the other, and the engine on rank 0."""
        config = self._config
        log_dir = os.path.abspath(os.path.join(config.run.save, "logs"))
        device = self._prepare_process(log_dir)
        check_device(config, device)
        specs = self._server_specs(device, log_dir)
        groups = self._start_roles(device, log_dir) if config.trains else {}
        return RunningRoles(
            groups=groups,
            engine=self._start_engine(groups, device, specs) if config.generates else None,
            check_alive=self._world.check_alive,
            side_by_side=None,
        )

    def _start_roles(self, device: DeviceKind, log_dir: str) -> dict[RoleName, LocalTrainGroup]:
        config = self._config
        settings = {role: worker_settings(config, role, init_method=STANDING_GROUP, device=device) for role in config.roles}
        ranks = self._ranks = LocalRanks(self._world, self._announced(log_dir, device))
        for role, of_ranks in settings.items():
            method, arguments = role_start(config, role)
            ranks.call(f"{role} start-up", method, of_ranks, *arguments)
        numbers = count()
        common: dict[str, Any] = {
            "bucket_bytes": config.rollout.weight_bucket_bytes,
            "sync_host": meeting_host(config),
            "sync_timeout_s": config.rollout.weight_sync_timeout_s,
        }
        return {role: LocalTrainGroup(ranks, role, numbers, **common) for role in config.roles}

    def _start_engine(
        self, groups: Mapping[RoleName, LocalTrainGroup], device: DeviceKind, specs: list[ServerSpec]
    ) -> RunningEngine:
        embedded = self._config.rollout.engine == "embedded"
        engine = self._start_embedded(device) if embedded else self._start_sglang(device, specs)
        return RunningEngine(engine, weight_sync(self._config, groups.get("actor"), engine, device=device))

    def _prepare_process(self, log_dir: str) -> DeviceKind:
        """This process becomes a rank: library noise to a log, the device chosen, Megatron imported."""
        libraries_to_file(Path(log_dir) / "rank-0.log")
        quiet_libraries()
        own_device_only(self._world.place)
        asked = self._config.cluster.device
        import torch

        device: DeviceKind = asked if asked != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
        return device

    def _announced(self, log_dir: str, device: DeviceKind) -> RankStart:
        """Let the other ranks begin, and do the slow part of a start beside them."""
        start = RankStart(log_dir, device, timeout_s=self._config.cluster.call_timeout_s)
        self._world.start(start)
        import_megatron(device)
        self._world.wait_for_ranks(self._config.cluster.worker_start_timeout_s)
        return start

    def _server_specs(self, device: DeviceKind, log_dir: str) -> list[ServerSpec]:
        """The servers of the run with their GPUs. Raises ConfigError when there are too few of these."""
        if self._config.rollout.engine == "embedded" or not self._config.generates:
            return []
        specs = server_specs(self._config, device=device, log_dir=log_dir)
        if device == "cpu":
            return specs
        placed = zip(specs, self._config.engine_bundles, strict=True)
        return [replace(spec, gpu_ids=server_gpus(self._visible_gpus, bundles)) for spec, bundles in placed]

    def _start_sglang(self, device: DeviceKind, specs: Sequence[ServerSpec]) -> "SGLangEngine":
        """Servers of this process, on its node; they end with it."""
        from slime_ppo.rollout.sglang.engine import SGLangEngine
        from slime_ppo.rollout.sglang.server import LocalServer

        config = self._config
        servers = [LocalServer(spec) for spec in specs] or external_servers(config)
        engine = self._servers = SGLangEngine(servers, engine_settings(config, device=device))
        if config.offloads:
            engine.offload(EnginePart.ALL)
        return engine

    def _start_embedded(self, device: DeviceKind) -> LocalRolloutEngine:
        from slime_ppo.rollout.embedded.engine import EmbeddedEngine

        config = self._config
        engine = EmbeddedEngine(
            os.path.abspath(config.model.hf_checkpoint),
            dtype=config.model.dtype,
            device=device,
            trust_remote_code=config.model.trust_remote_code,
            fp32_lm_head=config.model.fp32_lm_head,
            num_threads=config.cluster.num_threads_per_rank,
        )
        if config.offloads:
            engine.offload(EnginePart.ALL)
        return LocalRolloutEngine(engine)


def server_gpus(visible: str | None, bundles: range) -> tuple[int | str, ...]:
    """The GPUs of a server, by number or name, out of those that CUDA_VISIBLE_DEVICES gave to the run. Raises ConfigError."""
    if visible is None:
        return tuple(bundles)
    given = visible.split(",")
    if len(given) < bundles.stop:
        raise ConfigError(
            f"SGLang's servers need {bundles.stop} GPUs (--rollout-num-gpus), CUDA_VISIBLE_DEVICES names {len(given)}: {visible}. "
            "Make the two agree"
        )
    return tuple(given[bundle].strip() for bundle in bundles)


def _number(handle: BatchHandle) -> int:
    if not isinstance(handle.batch, int):
        raise TypeError(f"a handle of another group: its batch is {type(handle.batch).__name__}, expected a number")
    return handle.batch
