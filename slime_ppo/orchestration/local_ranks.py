"""What every rank of a run without Ray does: rank 0 commands, all ranks execute, the answers go to rank 0.

Both roles live in each process and share its process group and Megatron's groups. Commands and answers are pickled between
these ranks only, over gloo groups of their own beside those of the roles.

No torch at import: rank 0 is the driver, and reads its inputs first.
"""

import datetime
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slime_ppo.config.correction import CorrectionConfig
from slime_ppo.config.launcher import RankPlace
from slime_ppo.config.ppo import PpoConfig
from slime_ppo.config.roles import RoleName
from slime_ppo.orchestration.interrupts import ignore_interrupts
from slime_ppo.orchestration.local_world import LocalWorld, RankStart, own_device_only
from slime_ppo.orchestration.process_log import log_to_file
from slime_ppo.orchestration.rank_role import RankRole, import_megatron
from slime_ppo.parallel.worker_settings import WorkerSettings
from slime_ppo.types.load_report import LoadReport
from slime_ppo.types.rollout_batch import RolloutBatch
from slime_ppo.types.stats import Stats
from slime_ppo.types.step_plan import StepPlan
from slime_ppo.weight_sync.base import Meeting
from slime_ppo.weight_sync.bucket import Bucket, TensorSpec

# between two commands lies whatever rank 0 does alone, however long it takes; when it dies the connection breaks
_NO_LIMIT = datetime.timedelta(days=365)


@dataclass(frozen=True)
class Command:
    """A method of LocalRank and its arguments, the same for every rank."""

    method: str
    arguments: tuple[object, ...]


class RankChannel:
    """Commands from rank 0 and answers to it. Every method is called by all ranks together."""

    def __init__(self, world: LocalWorld, start: RankStart) -> None:
        """Join the process group of the roles, and two gloo groups beside it."""
        import torch.distributed as dist
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        from slime_ppo.backends.megatron.init import join_process_group

        self.place: RankPlace = world.place
        join_process_group(
            PrefixStore("ranks", world.store),
            rank=self.place.rank,
            num_ranks=self.place.world_size,
            device=start.device,
            timeout_s=start.timeout_s,
        )
        self._commands = dist.new_group(backend="gloo", timeout=_NO_LIMIT)
        self._answers = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=start.timeout_s))

    def command(self, command: Command | None) -> Command | None:
        """Rank 0's command, on every rank; None ends the run."""
        import torch.distributed as dist

        box = [command]
        dist.broadcast_object_list(box, src=0, group=self._commands)
        return box[0]

    def answers(self, value: object) -> list[Any]:
        """Every rank's value, on rank 0; an empty list elsewhere. Rank 0's own is the object itself, not a copy."""
        import torch.distributed as dist

        if self.place.rank != 0:
            dist.gather_object(value, None, dst=0, group=self._answers)
            return []
        gathered: list[Any] = [None] * self.place.world_size
        dist.gather_object(None, gathered, dst=0, group=self._answers)
        return [value, *gathered[1:]]

    def everywhere(self, value: object) -> list[Any]:
        """Every rank's value, on every rank."""
        import torch.distributed as dist

        values: list[Any] = [None] * self.place.world_size
        dist.all_gather_object(values, value, group=self._answers)
        return values

    def close(self) -> None:
        import torch.distributed as dist

        dist.destroy_process_group()


class LocalRank:
    """Both roles on this rank, and the rollout as far as it has come. The public methods are the commands."""

    def __init__(self, channel: RankChannel) -> None:
        self._channel = channel
        self._roles: dict[RoleName, RankRole] = {}
        self.batches: dict[int, RolloutBatch] = {}

    def run(self, command: Command) -> object:
        """What the command returns on this rank."""
        result: object = getattr(self, command.method)(*command.arguments)
        return result

    def role(self, name: RoleName) -> RankRole:
        return self._roles[name]

    def start_actor(
        self, ranks: Sequence[WorkerSettings], ppo: PpoConfig, correction: CorrectionConfig, temperature: float
    ) -> None:
        self._roles["actor"] = RankRole()
        self._roles["actor"].start_actor(ranks[self._channel.place.rank], ppo, correction, temperature)

    def start_critic(self, ranks: Sequence[WorkerSettings], ppo: PpoConfig) -> None:
        self._roles["critic"] = RankRole()
        self._roles["critic"].start_critic(ranks[self._channel.place.rank], ppo)

    def start_sft(self, ranks: Sequence[WorkerSettings]) -> None:
        self._roles["actor"] = RankRole()
        self._roles["actor"].start_sft(ranks[self._channel.place.rank])

    def put(self, number: int, batch: RolloutBatch) -> None:
        """Keep a rollout as `number`; those of before are not needed any more."""
        self.batches = {number: batch}

    def compute_log_probs(self, number: int, after: int) -> Stats:
        """The new columns go to every rank: batch `number` with all of them is batch `after`."""
        part, stats = self._roles["actor"].compute_log_probs(self.batches[number])
        self.batches[after] = self.batches[number].with_parts(self._channel.everywhere(part))
        return stats

    def compute_advantages(self, role: RoleName, number: int, after: int, kl_coef: float) -> Stats:
        """As compute_log_probs."""
        part, stats = self._roles[role].compute_advantages(self.batches[number], kl_coef)
        self.batches[after] = self.batches[number].with_parts(self._channel.everywhere(part))
        return stats

    def train(self, role: RoleName, number: int, plan: StepPlan, learning_rates: Sequence[float]) -> list[Stats]:
        return self._roles[role].train(self.batches[number], plan, learning_rates)

    def wake(self, role: RoleName) -> None:
        self._roles[role].wake()

    def offload(self, role: RoleName) -> None:
        self._roles[role].offload()

    def resident_bytes(self, role: RoleName) -> int:
        return self._roles[role].resident_bytes()

    def manifest(self, role: RoleName) -> tuple[TensorSpec, ...]:
        return self._roles[role].manifest()

    def export_bucket(self, role: RoleName, bucket: Bucket) -> np.ndarray | None:
        return self._roles[role].export_bucket(bucket)

    def save_hf(self, role: RoleName, folder: str, bucket_bytes: int) -> None:
        self._roles[role].save_hf(folder, bucket_bytes)

    def publish_hf(self, role: RoleName, folder: str, bucket_bytes: int) -> str | None:
        return self._roles[role].publish_hf(folder, bucket_bytes)

    def save_checkpoint(self, role: RoleName, folder: str, in_background: bool) -> str | None:
        return self._roles[role].save_checkpoint(folder, in_background)

    def finish_save(self, role: RoleName) -> str | None:
        return self._roles[role].finish_save()

    def load_checkpoint(self, role: RoleName, folder: str, with_optimizer: bool) -> LoadReport:
        return self._roles[role].load_checkpoint(folder, with_optimizer)

    def share_bucket(self, role: RoleName, bucket: Bucket) -> str:
        return self._roles[role].share_bucket(bucket)

    def release_shared(self, role: RoleName) -> None:
        self._roles[role].release_shared()

    def meet_engine(self, role: RoleName, num_engine_ranks: int, host: str, timeout_s: float) -> Meeting | None:
        return self._roles[role].meet_engine(num_engine_ranks, host=host, timeout_s=timeout_s)

    def join_engine(self, role: RoleName, meeting: Meeting) -> str | None:
        return self._roles[role].join_engine(meeting)

    def broadcast_bucket(self, role: RoleName, bucket: Bucket) -> str | None:
        return self._roles[role].broadcast_bucket(bucket)

    def leave_engine(self, role: RoleName) -> None:
        self._roles[role].leave_engine()


def serve_rank(place: RankPlace) -> int:
    """The life of every rank but the first: wait for rank 0, execute its commands. Returns the exit code, 0 when rank 0 let it go:
    how the run went is rank 0's to say.

    It prints nothing: what it has to say is in the log of the run folder, and an error goes to rank 0. From the start of the
    run on it leaves signals to rank 0, whose end ends it too.
    """
    own_device_only(place)
    world = LocalWorld(place)
    start = world.wait_for_start()
    if start is None:
        return world.exit_code() or 0
    ignore_interrupts()
    log_to_file(Path(start.log_dir) / f"rank-{place.rank}.log")
    quiet_libraries()
    try:
        import_megatron(start.device)
        world.ready()
        channel = RankChannel(world, start)
        rank = LocalRank(channel)
        while (command := channel.command(None)) is not None:
            channel.answers(rank.run(command))
        channel.close()
    except BaseException as error:
        code = world.exit_code()
        if code is None:
            traceback.print_exc()
            world.report(error)
            code = 1
        sys.stderr.flush()
        os._exit(code)  # a rank that is left in a collective would wait for threads that never end
    return 0


def quiet_libraries() -> None:
    """Warnings and log lines of libraries go to the log of this process, not to the console."""
    logging.captureWarnings(True)
    warnings.filterwarnings("ignore", module=r"(megatron|torch|transformers)\.")
