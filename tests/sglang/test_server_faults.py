"""Servers that die, hang or are lost: noticed, started anew, fed the current weights, and no sample lost or doubled."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from slime_ppo.errors import RolloutError
from slime_ppo.rollout.engine import NO_VERSION, EnginePart, check_results
from slime_ppo.rollout.sglang.engine import SGLangEngine
from slime_ppo.rollout.sglang.server import ExternalServer, LocalServer
from slime_ppo.types.sample import FinishReason, GenerateRequest, GenerateResult, SamplingParams
from tests.helpers.engine_harness import make_requests, push_folder
from tests.helpers.sglang_servers import tiny_engine
from tests.sglang.conftest import Mortal

SHORT = SamplingParams(max_new_tokens=4, temperature=0.8)
LONG = SamplingParams(max_new_tokens=480, temperature=0.8)
NOTICED_S = 10.0
"""5 s on a machine that does nothing else."""


@pytest.fixture(scope="module")
def mortal_engine(mortal: Mortal, tiny_folders: tuple[Path, Path]) -> SGLangEngine:
    return tiny_engine([mortal.server], tiny_folders[0], max_restarts=100, api_key=mortal.spec.api_key)


@pytest.fixture
def serving(
    mortal_engine: SGLangEngine, tiny_folders: tuple[Path, Path], record_property: Callable[[str, object], None]
) -> SGLangEngine:
    """Started anew if the test before has killed it, which must bring it back to service, with version 1."""
    lost = mortal_engine.weight_version() == NO_VERSION and mortal_engine.incarnation() > 0
    began = time.monotonic()
    mortal_engine.wake(EnginePart.ALL)
    push_folder(mortal_engine, tiny_folders[0], 1)
    requests = make_requests(3, SHORT)
    results = mortal_engine.generate(requests)
    check_results(requests, results)
    assert {span.version for result in results for span in result.weight_versions} == {1}
    if lost:
        record_property("serving_again_s", round(time.monotonic() - began, 1))
    return mortal_engine


def test_one_of_two_servers_loses_its_scheduler_and_the_other_finishes_every_sample(
    mortal: Mortal,
    sglang_server: LocalServer,
    tiny_folders: tuple[Path, Path],
    caplog: pytest.LogCaptureFixture,
) -> None:
    two = tiny_engine(
        [ExternalServer(sglang_server.start().url, None), mortal.server], tiny_folders[0], api_key=mortal.spec.api_key
    )
    push_folder(two, tiny_folders[0], 11)
    requests, results, _ = _broken_meanwhile(two, lambda: _kill(mortal.server, "scheduler"), num_samples=12)
    check_results(requests, results)
    assert {result.finish for result in results} == {FinishReason.LENGTH}
    assert {span.version for result in results for span in result.weight_versions} == {11}
    assert "attempt 1 of 3 failed" in caplog.text
    assert two.weight_version() == 11
    assert len(two.generate(make_requests(3, SHORT))) == 3


def test_hanging_scheduler_is_stopped_after_the_request_timeout(
    serving: SGLangEngine, mortal: Mortal, tiny_folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "_dispatch", replace(serving._dispatch, request_timeout_s=3.0))
    process = _process(mortal.server)
    requests, results, noticed_s = _broken_meanwhile(serving, lambda: _child(mortal.server, "scheduler").suspend())
    _assert_finished_or_aborted(requests, results)
    assert noticed_s < 3.0 + NOTICED_S
    assert not process.is_running()
    with pytest.raises(RolloutError, match="it hangs: .* no answer within 3 s"):
        serving.health()


def test_detokenizer_killed_while_idle_is_noticed_without_a_request(serving: SGLangEngine, mortal: Mortal) -> None:
    _kill(mortal.server, "detokenizer")
    began = time.monotonic()
    while serving.weight_version() != NO_VERSION:
        assert time.monotonic() - began < NOTICED_S
        time.sleep(0.05)
    with pytest.raises(RolloutError, match=r"Lost servers: http.*sglang::detokenizer \(pid \d+\) died"):
        serving.generate(make_requests(1, SHORT))


def test_dead_server_is_started_a_bounded_number_of_times(
    mortal_engine: SGLangEngine, monkeypatch: pytest.MonkeyPatch, mortal: Mortal
) -> None:
    mortal.server.stop()
    monkeypatch.setattr(mortal_engine, "_settings", replace(mortal_engine._settings, max_restarts=1))
    with pytest.raises(RolloutError, match=r"is lost and was started anew \d+ times already \(--sglang-max-restarts\)"):
        mortal_engine.wake(EnginePart.WEIGHTS)


def _broken_meanwhile(
    engine: SGLangEngine, break_it: Callable[[], object], *, num_samples: int = 8
) -> tuple[list[GenerateRequest], list[GenerateResult], float]:
    """The results of requests of which some had ended when `break_it` was called, and the seconds from then to the results."""
    requests = make_requests(num_samples, LONG)
    requests[0] = replace(requests[0], sampling=SHORT)
    with ThreadPoolExecutor(1) as pool:
        running: Future[list[GenerateResult]] = pool.submit(engine.generate, requests)
        members = engine._fleet.members
        while sum(len(member.running) for member in members) < num_samples:
            time.sleep(0.005)
        while sum(len(member.running) for member in members) == num_samples:
            time.sleep(0.005)
        assert not running.done()
        break_it()
        began = time.monotonic()
        return requests, running.result(120), time.monotonic() - began


def _assert_finished_or_aborted(requests: list[GenerateRequest], results: list[GenerateResult]) -> None:
    check_results(requests, results)
    finishes = [result.finish for result in results]
    assert finishes[0] is FinishReason.LENGTH
    assert set(finishes[1:]) == {FinishReason.ABORT}
    assert all(len(result.response_ids) == 0 for result in results[1:])


def _process(server: LocalServer) -> psutil.Process:
    assert server._process is not None
    return psutil.Process(server._process.pid)


def _child(server: LocalServer, name: str) -> psutil.Process:
    return next(child for child in _process(server).children(recursive=True) if f"sglang::{name}" in " ".join(child.cmdline()))


def _kill(server: LocalServer, name: str) -> None:
    _child(server, name).kill()
