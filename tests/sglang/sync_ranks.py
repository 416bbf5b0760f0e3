"""What the tests of weight sync run on the ranks of the pool: Megatron ranks commanded by rank 0, as in a run without Ray."""

import os
import resource
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
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
from slime_ppo.rollout.engine import NO_VERSION, EnginePart  # noqa: E402
from slime_ppo.rollout.sglang.server import ServerAddress  # noqa: E402
from slime_ppo.rollout.sglang.updates import ServerUpdates, UpdateSettings  # noqa: E402
from slime_ppo.weight_sync.base import Meeting, WeightSync  # noqa: E402
from slime_ppo.weight_sync.bucket import Bucket, TensorSpec, plan_buckets  # noqa: E402
from slime_ppo.weight_sync.disk import DiskSync  # noqa: E402
from slime_ppo.weight_sync.distributed import DistributedSync  # noqa: E402
from slime_ppo.weight_sync.folder import served_tensors  # noqa: E402
from slime_ppo.weight_sync.tensor import TensorSync  # noqa: E402
from tests.dist.backends.cases import Case  # noqa: E402
from tests.helpers.http_fleet import HttpFleet  # noqa: E402

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
    """ServerUpdates as an engine offers them to a sync."""

    def __init__(self, addresses: Sequence[ServerAddress], folder: str, *, timeout_s: float) -> None:
        self.fleet = HttpFleet(addresses)
        settings = UpdateSettings(served_tensors(folder, "float32"), ModelShape.from_hf_folder(folder), "cpu", timeout_s)
        self.updates = ServerUpdates(self.fleet, settings)

    def begin_update(self, manifest: tuple[TensorSpec, ...], version: int, *, bucket_bytes: int) -> None:
        self.updates.begin(manifest, version, bucket_bytes=bucket_bytes, pause_mode="retract")

    def load_bucket(self, index: int, flat: Any) -> None:
        self.updates.load_bucket(index, flat)

    def receive_bucket(self, index: int) -> None:
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
    addresses: tuple[ServerAddress, ...]
    scratch: str
    timeout_s: float = 60.0


@dataclass
class Driver:
    """Rank 0's view: the actor on all ranks, and the servers."""

    setup: Setup
    ranks: LocalRanks
    actor: LocalTrainGroup
    target: Target

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
    sync: Any = {"bucket_bytes": BUCKET_BYTES, "sync_host": "127.0.0.1", "sync_timeout_s": setup.timeout_s}
    actor = LocalTrainGroup(ranks, "actor", count(), **sync)
    target = Target(setup.addresses, setup.case.actor_folder, timeout_s=setup.timeout_s)
    try:
        return SCENARIOS[scenario](Driver(setup, ranks, actor, target), **arguments)
    finally:
        ranks.close(0)


def _paths_agree(driver: Driver) -> dict[str, Checksums]:
    """Checksums of the servers after pushes by every path, each of which is checked against our own; weights are those of the
    folder, or doubled (which loses no bit)."""
    actor, target, scratch = driver.actor, driver.target, driver.setup.scratch
    exported, versions = os.path.join(scratch, "exported"), os.path.join(scratch, "versions")
    syncs = {
        "broadcast": DistributedSync(actor, target, bucket_bytes=BUCKET_BYTES, check="always"),
        "folder": DiskSync(actor, target, folder=versions, bucket_bytes=BUCKET_BYTES, check="always"),
        "bytes": TensorSync(actor, target, bucket_bytes=BUCKET_BYTES, check="always"),
    }
    found, pushed = {"start": target.checksums()}, count()
    for name, sync in syncs.items():
        sync.connect()
        for weights, factor in (("once", 1.0), ("doubled", 2.0), ("back", 0.5)):
            driver.scale(factor)
            if (name, weights) == ("broadcast", "doubled"):
                actor.save_hf(exported)
            version = next(pushed)
            assert sync.push(version) == version
            found[f"{name}, {weights}"] = target.checksums()
            assert name != "folder" or os.listdir(versions) == [f"version_{version}"]
        sync.close()
    target.fleet.post("/update_weights_from_disk", [{"model_path": exported}] * len(target.fleet.current), timeout_s=60)
    return found | {"the exported folder, doubled": target.checksums()}


class FaultySource:
    """The actor, to which something happens between a request to the servers and its broadcast."""

    def __init__(self, actor: LocalTrainGroup) -> None:
        self._actor = actor
        self.before_broadcast: Callable[[], None] | None = None

    def broadcast_bucket(self, bucket: Bucket) -> None:
        if self.before_broadcast is not None and bucket.index == 1:
            time.sleep(0.3)  # the servers have been asked to receive, and wait
            self.before_broadcast()
        self._actor.broadcast_bucket(bucket)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._actor, name)


def _faults(driver: Driver, group_pid: int, scheduler_pid: int) -> dict[str, Any]:
    """What a push says when a server hangs or dies in its middle, and how it goes on; `restarted` in the scratch folder is written
    by the test, with the address of the new server."""
    source, target = FaultySource(driver.actor), driver.target
    sync = DistributedSync(source, target, bucket_bytes=BUCKET_BYTES)
    sync.connect()
    told: dict[str, Any] = {"versions": [sync.push(0)]}
    source.before_broadcast = partial(os.kill, scheduler_pid, signal.SIGSTOP)
    told["hung"] = _failed_push(driver, sync, 1)
    source.before_broadcast = None
    os.kill(scheduler_pid, signal.SIGCONT)
    told["versions"].append(sync.push(2))
    source.before_broadcast = partial(os.killpg, group_pid, signal.SIGKILL)
    told["killed"] = _failed_push(driver, sync, 3)
    source.before_broadcast = None
    told["still dead"] = _failed_push(driver, sync, 4)
    target.fleet.current = [_restarted(driver)]
    driver.scale(2.0)
    told["versions"].append(sync.push(5))
    sync.close()
    return told | {"disk": _full_disk(driver)}


def _failed_push(driver: Driver, sync: WeightSync, version: int) -> tuple[str, float]:
    """What was raised, and after how many seconds. The engine has no version then, and all ranks of the trainer go on."""
    began = time.monotonic()
    with pytest.raises(WeightSyncError) as failure:
        sync.push(version)
    seconds = time.monotonic() - began
    assert driver.target.updates.version == NO_VERSION
    bucket = plan_buckets(driver.actor.manifest(), BUCKET_BYTES)[0]
    assert len(driver.actor.export_bucket(bucket)) == bucket.num_bytes
    return str(failure.value), seconds


def _restarted(driver: Driver) -> ServerAddress:
    Path(driver.setup.scratch, "killed").touch()
    word = Path(driver.setup.scratch, "restarted")
    deadline = time.monotonic() + 300
    while not word.exists():
        assert time.monotonic() < deadline, "no new server"
        time.sleep(0.1)
    return replace(driver.setup.addresses[0], url=word.read_text(), incarnation=2)


def _full_disk(driver: Driver) -> dict[str, Any]:
    """A push into a folder without room, and the next, after room was made."""
    folder = os.path.join(driver.setup.scratch, "versions")
    sync = DiskSync(driver.actor, driver.target, folder=folder, bucket_bytes=BUCKET_BYTES)
    sync.connect()
    told: dict[str, Any] = {"versions": [sync.push(6)]}
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (BUCKET_BYTES // 2, before[1]))  # a longer file is refused as by a full disk
    try:
        told["full"], _ = _failed_push(driver, sync, 7)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    told["left"] = os.listdir(folder)
    told["versions"].append(sync.push(8))
    sync.close()
    return told


SCENARIOS: Mapping[str, Callable[..., Any]] = {"paths_agree": _paths_agree, "faults": _faults}
