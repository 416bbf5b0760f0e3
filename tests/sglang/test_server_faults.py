"""Servers that lose a process, or hang: noticed, started anew, fed the current weights, and no sample lost or doubled.

kill -9 of the process group, of a scheduler and of the detokenizer, each while idle, in mid-generation and in mid-sync. What is not
here: the group in mid-generation is killed under a whole run (tests/e2e/test_sglang.py), the group in mid-sync under the four ranks
of a trainer (test_weight_sync.py). A test kills a process of each of two servers, since two start together in less time than one
after the other.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import psutil
import pytest

from slime_ppo.errors import RolloutError, WeightSyncError
from slime_ppo.rollout.engine import NO_VERSION, EnginePart, check_results
from slime_ppo.rollout.sglang.engine import SGLangEngine
from slime_ppo.rollout.sglang.fleet import Member
from slime_ppo.rollout.sglang.server import LocalServer
from slime_ppo.types.sample import FinishReason, GenerateRequest, GenerateResult, SamplingParams
from slime_ppo.weight_sync.bucket import Bucket
from slime_ppo.weight_sync.distributed import DistributedSync
from tests.helpers.engine_harness import BUCKET_BYTES, ReferenceModel, make_requests
from tests.helpers.folder_trainer import FolderTrainer
from tests.helpers.sglang_servers import NOTICED_S, SERVING_AGAIN_S, load, tiny_engine

SHORT = SamplingParams(max_new_tokens=4, temperature=0.8)
LONG = SamplingParams(max_new_tokens=480, temperature=0.8)
Part = Literal["group", "scheduler", "detokenizer"]


class DyingTrainer(FolderTrainer):
    """Something happens between the servers' word that they receive a bucket and its broadcast."""

    before_broadcast: Callable[[], None] | None = None

    def broadcast_bucket(self, bucket: Bucket) -> None:
        if self.before_broadcast is not None and bucket.index == 1:
            time.sleep(0.1)
            self.before_broadcast()
        super().broadcast_bucket(bucket)


@dataclass
class Service:
    """An engine on two servers, and the trainer whose weights it must serve; `version` of the last push."""

    servers: tuple[LocalServer, LocalServer]
    engine: SGLangEngine
    trainer: DyingTrainer
    sync: DistributedSync
    reference: ReferenceModel
    version: int = 0

    @property
    def members(self) -> Sequence[Member]:
        return self.engine._fleet.members

    def push(self) -> None:
        self.version += 1
        assert self.sync.push(self.version) == self.version

    def check_serves(self) -> None:
        """Answers on all servers are of the trainer's weights."""
        requests = make_requests(4, SHORT)
        results = self.engine.generate(requests)
        check_results(requests, results)
        assert {result.finish for result in results} == {FinishReason.LENGTH}
        self.check_tokens(requests, results)

    def check_tokens(self, requests: Sequence[GenerateRequest], results: Sequence[GenerateResult]) -> None:
        """All are of the last version, by its name and by its log-probs."""
        for request, result in zip(requests, results, strict=True):
            assert {span.version for span in result.weight_versions} == {self.version}
            full = self.reference.log_probs(request.prompt_ids, result.response_ids, temperature=request.sampling.temperature)
            expected = full[np.arange(len(full)), result.response_ids]
            np.testing.assert_allclose(result.log_probs, expected, atol=1e-4, rtol=0)

    def comes_back(self, record: Callable[[str, object], None], *, died_at: float) -> None:
        """Start what was lost, push the current weights, serve; tell how long it took from the first death on."""
        before, num_lost, busy = self.engine.incarnation(), sum(member.lost is not None for member in self.members), load()
        self.engine.wake(EnginePart.ALL)
        assert self.engine.incarnation() == before + num_lost
        assert self.engine.weight_version() == NO_VERSION
        with pytest.raises(RolloutError, match="before a weight version was pushed"):
            self.engine.generate(make_requests(1, SHORT))
        self.push()
        self.check_serves()
        took_s, allowed_s = time.monotonic() - died_at, SERVING_AGAIN_S * num_lost * max(busy, load())
        record("serving_again_s", f"{took_s:.1f} of {allowed_s:.0f} allowed")
        assert took_s < allowed_s


@pytest.fixture(scope="module")
def service_of_two(
    sglang_server: LocalServer,
    sglang_server_of_two_ranks: LocalServer,
    tiny_folders: tuple[Path, Path],
    references: tuple[ReferenceModel, ReferenceModel],
) -> Iterator[Service]:
    servers = (sglang_server, sglang_server_of_two_ranks)
    engine = tiny_engine(servers, tiny_folders[0], max_restarts=100)
    trainer = DyingTrainer(tiny_folders[1], timeout_s=20.0)
    sync = DistributedSync(trainer, engine, bucket_bytes=BUCKET_BYTES)
    sync.connect()
    yield Service(servers, engine, trainer, sync, references[1])
    sync.close()
    for member in engine._fleet.members:  # the servers are not the engine's to end
        engine._fleet.run(member.client.close())


@pytest.fixture
def service(service_of_two: Service) -> Service:
    """Serves, also after a test that has failed."""
    service_of_two.engine.wake(EnginePart.ALL)
    service_of_two.push()
    service_of_two.check_serves()
    return service_of_two


def test_idle_servers_lose_the_group_and_a_scheduler(service: Service, record_property: Callable[[str, object], None]) -> None:
    killed = {service.servers[0]: kill(service.servers[0], "group"), service.servers[1]: kill(service.servers[1], "scheduler")}
    died_at = time.monotonic()
    check_noticed(killed, since=died_at)
    assert service.engine.weight_version() == NO_VERSION
    with pytest.raises(RolloutError, match=r"Lost servers: http.*: its (.|\n)*; http.*: its process sglang::scheduler_TP\d \(pid"):
        service.engine.generate(make_requests(1, SHORT))
    service.comes_back(record_property, died_at=died_at)


def test_generating_servers_lose_the_detokenizer_then_the_scheduler(
    service: Service, record_property: Callable[[str, object], None], caplog: pytest.LogCaptureFixture
) -> None:
    """What the first one had goes to the second; what that one has not finished comes back without a token, to be asked again."""
    (second, first), (survivor, lost) = service.servers, service.members
    requests, running = generation_under_way(service, num_samples=8)
    moved = len(lost.running)
    check_noticed({first: kill(first, "detokenizer")}, since=(died_at := time.monotonic()))
    wait_for(lambda: lost.lost is not None and len(survivor.running) == 7, NOTICED_S)
    assert caplog.text.count("attempt 1 of 3 failed") == moved > 0
    assert service.engine.health().num_lost == 1
    assert service.engine.weight_version() == service.version
    check_noticed({second: kill(second, "scheduler")}, since=time.monotonic())
    results = running.result(NOTICED_S)
    check_results(requests, results)
    assert [result.finish for result in results] == [FinishReason.LENGTH] + [FinishReason.ABORT] * 7
    assert all(len(result.response_ids) == 0 for result in results[1:])
    service.check_tokens(requests[:1], results[:1])
    service.comes_back(record_property, died_at=died_at)


def test_servers_that_are_pushed_to_lose_the_detokenizer_and_a_scheduler(
    service: Service, record_property: Callable[[str, object], None]
) -> None:
    """Between a bucket and the next: the push fails as a whole, nothing is served until another one has succeeded."""
    killed: dict[LocalServer, str] = {}
    times: list[float] = []

    def break_both() -> None:
        killed.update(
            {server: kill(server, part) for server, part in zip(service.servers, ("detokenizer", "scheduler"), strict=True)}
        )
        times.append(time.monotonic())
        check_noticed(killed, since=times[0])

    service.trainer.before_broadcast = break_both
    try:
        with pytest.raises(WeightSyncError, match=rf"of version {service.version + 1} failed: 2 of 2 SGLang servers failed"):
            service.sync.push(service.version + 1)
    finally:
        service.trainer.before_broadcast = None
    assert time.monotonic() - times[0] < NOTICED_S
    assert service.engine.weight_version() == NO_VERSION
    service.comes_back(record_property, died_at=times[0])


def test_one_of_two_idle_servers_loses_its_detokenizer_and_the_other_serves_on(
    service: Service, record_property: Callable[[str, object], None]
) -> None:
    check_noticed({service.servers[0]: kill(service.servers[0], "detokenizer")}, since=(died_at := time.monotonic()))
    assert service.engine.health().num_lost == 1
    service.check_serves()
    service.comes_back(record_property, died_at=died_at)


def test_hanging_scheduler_is_stopped_after_the_request_timeout_and_the_other_server_finishes(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last test of this server, which is not started again unless somebody asks for it."""
    server = service.servers[0]
    process = psutil.Process(main_pid(server))
    monkeypatch.setattr(service.engine, "_dispatch", replace(service.engine._dispatch, request_timeout_s=10.0))
    requests, running = generation_under_way(service, num_samples=4, longest=100)
    child(server, "scheduler").suspend()
    results = running.result(60)
    assert {result.finish for result in results} == {FinishReason.LENGTH}
    check_results(requests, results)
    service.check_tokens(requests, results)
    assert not process.is_running()
    assert "it hangs: " in service.engine._fleet.losses()
    assert "no answer within 10 s" in service.engine._fleet.losses()


def generation_under_way(
    service: Service, *, num_samples: int, longest: int = LONG.max_new_tokens
) -> tuple[list[GenerateRequest], "Future[list[GenerateResult]]"]:
    """Requests of which the first, a short one, has been answered, and the others run on both servers."""
    requests = make_requests(num_samples, replace(LONG, max_new_tokens=longest))
    requests[0] = replace(requests[0], sampling=SHORT)
    pool = ThreadPoolExecutor(1)
    running = pool.submit(service.engine.generate, requests)
    pool.shutdown(wait=False)
    wait_for(lambda: sum(len(member.running) for member in service.members) == num_samples, 10)
    wait_for(lambda: sum(len(member.running) for member in service.members) == num_samples - 1, 60)
    assert all(member.running for member in service.members)
    assert not running.done()
    return requests, running


def check_noticed(killed: Mapping[LocalServer, str], *, since: float) -> None:
    """Each server is known to be dead within NOTICED_S, for the reason that it died of, and nothing of it is left."""
    for server, how in killed.items():
        wait_for(lambda server=server: server.problem() is not None, since + NOTICED_S - time.monotonic())  # type: ignore[misc]
        assert how in str(server.problem())


def wait_for(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:.1f} s"
        time.sleep(0.01)


def kill(server: LocalServer, part: Part) -> str:
    """Kill -9; the words that tell of it."""
    if part == "group":
        os.killpg(main_pid(server), signal.SIGKILL)
        return "its "  # whichever of its processes is seen to have died first
    process = child(server, part)
    process.kill()
    return f"(pid {process.pid}) died"


def child(server: LocalServer, name: str) -> psutil.Process:
    children = psutil.Process(main_pid(server)).children(recursive=True)
    return next(one for one in reversed(children) if f"sglang::{name}" in " ".join(one.cmdline()))


def main_pid(server: LocalServer) -> int:
    assert server._process is not None
    return server._process.pid
