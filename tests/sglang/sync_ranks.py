"""What the tests of weight sync run on the ranks of the pool: Megatron ranks commanded by rank 0, as in a run without Ray."""

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch.distributed as dist

from slime_ppo.backends.megatron.device import prepare_megatron

prepare_megatron("cpu")

import torch  # noqa: E402

from slime_ppo.backends.megatron import actor as _actor  # noqa: E402, F401
from slime_ppo.backends.megatron.model import converted_parameters  # noqa: E402
from slime_ppo.config.launcher import RankPlace  # noqa: E402
from slime_ppo.config.model_shape import ModelShape  # noqa: E402
from slime_ppo.errors import WeightSyncError  # noqa: E402
from slime_ppo.orchestration.local import LocalRanks, LocalTrainGroup  # noqa: E402
from slime_ppo.orchestration.local_ranks import LocalRank, RankChannel  # noqa: E402
from slime_ppo.orchestration.local_world import LocalWorld, RankStart  # noqa: E402
from slime_ppo.parallel.worker_settings import STANDING_GROUP  # noqa: E402
from slime_ppo.rollout.engine import EnginePart  # noqa: E402
from slime_ppo.rollout.sglang.updates import ServerUpdates, UpdateSettings  # noqa: E402
from slime_ppo.weight_sync.base import Meeting  # noqa: E402
from slime_ppo.weight_sync.bucket import Bucket, TensorSpec  # noqa: E402
from slime_ppo.weight_sync.disk import DiskSync  # noqa: E402
from slime_ppo.weight_sync.distributed import DistributedSync  # noqa: E402
from slime_ppo.weight_sync.folder import served_tensors  # noqa: E402
from slime_ppo.weight_sync.tensor import TensorSync  # noqa: E402
from tests.dist.backends.cases import Case  # noqa: E402
from tests.helpers.http_fleet import Address, HttpFleet  # noqa: E402

BUCKET_BYTES = 100_000
Checksums = list[list[dict[str, str]]]


class TestedRank(LocalRank):
    """A rank whose weights a test can move."""

    def scale_weights(self, factor: float) -> None:
        role = self._roles["actor"]._role
        with torch.no_grad():
            for _, parameter in converted_parameters(role.models, role.table, role.layout):
                parameter.mul_(factor)


class Target:
    """ServerUpdates as an engine offers them to a sync, and what a test does to the servers in the middle of a push."""

    def __init__(self, addresses: Sequence[Address], folder: str, *, timeout_s: float) -> None:
        self.fleet = HttpFleet(addresses)
        settings = UpdateSettings(served_tensors(folder, "float32"), ModelShape.from_hf_folder(folder), "cpu", timeout_s)
        self.updates = ServerUpdates(self.fleet, settings)
        self.before_receive: Callable[[], None] = lambda: None

    def begin_update(self, manifest: tuple[TensorSpec, ...], version: int, *, bucket_bytes: int) -> None:
        self.updates.begin(manifest, version, bucket_bytes=bucket_bytes, pause_mode="retract")

    def load_bucket(self, index: int, flat: Any) -> None:
        self.updates.load_bucket(index, flat)

    def receive_bucket(self, index: int) -> None:
        self.before_receive()
        self.updates.receive_bucket(index)

    def load_folder(self, folder: str) -> None:
        self.updates.load_folder(folder)

    def check_bucket(self, bucket: Bucket, flat: Any) -> None:
        self.updates.check_bucket(bucket, flat)

    def end_update(self) -> int:
        return self.updates.end()

    def wake(self, parts: EnginePart) -> None:
        assert parts is EnginePart.KV_CACHE

    def num_ranks(self) -> int:
        return self.updates.num_ranks()

    def incarnation(self) -> int:
        return self.updates.incarnation()

    def join_group(self, meeting: Meeting) -> None:
        self.updates.join_group(meeting)

    def leave_group(self) -> None:
        self.updates.leave_group()

    def checksums(self) -> Checksums:
        answers = self.fleet.post("/weights_checker", [{"action": "checksum"}] * len(self.fleet.current), timeout_s=60)
        return [[rank["checksums"] for rank in answer["ranks"]] for answer in answers]


@dataclass(frozen=True)
class Setup:
    """Ranks of `case`, and the servers that they push to, which serve `case.actor_folder`'s shape."""

    case: Case
    addresses: tuple[Address, ...]
    scratch: str
    timeout_s: float = 60.0


@dataclass
class Driver:
    """Rank 0's view: the actor on all ranks, and the servers."""

    setup: Setup
    ranks: LocalRanks
    actor: LocalTrainGroup
    target: Target
    seconds: dict[str, float] = field(default_factory=dict)

    def scale(self, factor: float) -> None:
        self.ranks.call("test", "scale_weights", factor)


def run(setup: Setup, scenario: str, **arguments: Any) -> Any:
    """Every rank of the pool: rank 0 plays the scenario, the others obey. Rank 0's result."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    settings = [setup.case.settings(rank, "actor") for rank in range(setup.case.layout.num_ranks)]
    settings = [replace(one, rank=replace(one.rank, init_method=STANDING_GROUP)) for one in settings]
    world = LocalWorld(RankPlace(rank, len(settings)))
    world._store = dist.FileStore(os.path.join(setup.scratch, "store"), len(settings))
    start = RankStart(setup.scratch, "cpu", timeout_s=120.0)
    if rank:
        channel = RankChannel(world, start)
        obeying = TestedRank(channel)
        while (command := channel.command(None)) is not None:
            channel.answers(obeying.run(command))
        channel.close()
        return None
    ranks = LocalRanks(world, start)
    ranks._own = TestedRank(ranks._channel)
    ranks.call("start", "start_actor", settings, setup.case.ppo, setup.case.correction, setup.case.temperature)
    actor = LocalTrainGroup(ranks, "actor", count(), bucket_bytes=BUCKET_BYTES, sync_timeout_s=setup.timeout_s)
    target = Target(setup.addresses, setup.case.actor_folder, timeout_s=setup.timeout_s)
    try:
        return SCENARIOS[scenario](Driver(setup, ranks, actor, target), **arguments)
    finally:
        ranks.close(0)


def _paths_agree(driver: Driver) -> dict[str, Checksums]:
    """Checksums of the servers after pushes by every path; each push is checked against our own."""
    actor, target = driver.actor, driver.target
    found = {"start": target.checksums()}
    broadcast = DistributedSync(actor, target, bucket_bytes=BUCKET_BYTES, check="always")
    broadcast.connect()
    assert broadcast.push(0) == 0
    found["broadcast"] = target.checksums()
    folder = os.path.join(driver.setup.scratch, "exported")
    driver.scale(1.25)
    actor.save_hf(folder)
    assert broadcast.push(1) == 1
    found["broadcast, scaled"] = target.checksums()
    driver.scale(0.8)  # back, without a rounding error in most numbers only
    assert broadcast.push(2) == 2
    broadcast.close()
    target.fleet.post("/update_weights_from_disk", [{"model_path": folder}] * len(target.fleet.current), timeout_s=60)
    found["the scaled folder"] = target.checksums()
    driver.scale(1.25)
    disk = DiskSync(actor, target, folder=os.path.join(driver.setup.scratch, "sync"), bucket_bytes=BUCKET_BYTES, check="always")
    disk.connect()
    for version in (3, 4):
        assert disk.push(version) == version
        assert os.listdir(os.path.join(driver.setup.scratch, "sync")) == [f"version_{version}"]
    found["disk, scaled"] = target.checksums()
    disk.close()
    tensor = TensorSync(actor, target, bucket_bytes=BUCKET_BYTES, check="always")
    tensor.connect()
    driver.scale(2.0)
    assert tensor.push(5) == 5
    found["tensor, doubled"] = target.checksums()
    driver.scale(0.5)
    assert tensor.push(6) == 6
    found["tensor, scaled"] = target.checksums()
    return found


SCENARIOS: Mapping[str, Callable[..., Any]] = {"paths_agree": _paths_agree}
