"""Servers that die, hang or are lost: noticed, started anew, fed the current weights, and no sample lost or doubled."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from slime_ppo.errors import RolloutError, WeightSyncError
from slime_ppo.rollout.engine import NO_VERSION, EnginePart, check_results
from slime_ppo.rollout.sglang.engine import SGLangEngine
from slime_ppo.rollout.sglang.server import ExternalServer, LocalServer
from slime_ppo.types.sample import FinishReason, GenerateRequest, GenerateResult, SamplingParams
from tests.helpers.engine_harness import make_requests, push_folder
from tests.helpers.sglang_servers import tiny_engine, tiny_server

SHORT = SamplingParams(max_new_tokens=4, temperature=0.8)
LONG = SamplingParams(max_new_tokens=480, temperature=0.8)
NOTICED_S = 10.0
"""5 s on a machine that does nothing else."""


@pytest.fixture(scope="module")
def mortal(tiny_folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """A server to be killed; each test leaves it dead or alive as it likes."""
    server = tiny_server(tiny_folders[0], tmp_path_factory.mktemp("mortal") / "server.log")
    yield server
    server.stop()


@pytest.fixture(scope="module")
def mortal_engine(mortal: LocalServer, tiny_folders: tuple[Path, Path]) -> SGLangEngine:
    return tiny_engine([mortal], tiny_folders[0], max_restarts=100)


@pytest.fixture
def serving(mortal_engine: SGLangEngine, tiny_folders: tuple[Path, Path]) -> SGLangEngine:
    """Started anew if the test before has killed it, with version 1."""
    mortal_engine.wake(EnginePart.ALL)
    push_folder(mortal_engine, tiny_folders[0], 1)
    assert len(mortal_engine.generate(make_requests(2, SHORT))) == 2
    return mortal_engine


def test_scheduler_killed_in_mid_generation_gives_back_each_sample_once(
    serving: SGLangEngine,
    mortal: LocalServer,
    tiny_folders: tuple[Path, Path],
    record_property: Callable[[str, object], None],
) -> None:
    requests, results, noticed_s = _broken_meanwhile(serving, lambda: _kill(mortal, "scheduler"))
    _assert_finished_or_aborted(requests, results)
    assert noticed_s < NOTICED_S
    began = time.monotonic()
    _assert_serves_again(serving, tiny_folders[1], 2)
    record_property("noticed_s", round(noticed_s, 2))
    record_property("serving_again_s", round(time.monotonic() - began, 1))


def test_detokenizer_killed_in_mid_generation_gives_back_each_sample_once(serving: SGLangEngine, mortal: LocalServer) -> None:
    """SGLang itself takes 65 s to notice."""
    requests, results, noticed_s = _broken_meanwhile(serving, lambda: _kill(mortal, "detokenizer"))
    _assert_finished_or_aborted(requests, results)
    assert noticed_s < NOTICED_S
    with pytest.raises(RolloutError, match=r"all SGLang servers are lost; wake the weights part .*detokenizer .* died"):
        serving.health()


def test_group_killed_in_mid_push_fails_the_push_and_the_next_one_serves(
    serving: SGLangEngine, mortal: LocalServer, tiny_folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    load_bucket = serving.load_bucket

    def kill_after(index: int, flat: np.ndarray) -> None:
        load_bucket(index, flat)
        if index == 1:
            os.killpg(_process(mortal).pid, signal.SIGKILL)

    monkeypatch.setattr(serving, "load_bucket", kill_after)
    with pytest.raises(WeightSyncError, match="bucket 2 of"):
        push_folder(serving, tiny_folders[1], 5)
    assert serving.weight_version() == NO_VERSION
    monkeypatch.undo()
    incarnation = serving.incarnation()
    _assert_serves_again(serving, tiny_folders[1], 5)
    assert serving.incarnation() == incarnation + 1


def test_one_of_two_servers_dies_and_the_other_finishes_every_sample(
    serving: SGLangEngine,
    mortal: LocalServer,
    sglang_server: LocalServer,
    tiny_folders: tuple[Path, Path],
    caplog: pytest.LogCaptureFixture,
) -> None:
    two = tiny_engine([ExternalServer(sglang_server.start().url, None), mortal], tiny_folders[0])
    push_folder(two, tiny_folders[0], 11)
    requests, results, _ = _broken_meanwhile(two, lambda: os.killpg(_process(mortal).pid, signal.SIGKILL), num_samples=12)
    check_results(requests, results)
    assert {result.finish for result in results} == {FinishReason.LENGTH}
    assert {span.version for result in results for span in result.weight_versions} == {11}
    assert "attempt 1 of 3 failed" in caplog.text
    assert two.weight_version() == 11
    assert len(two.generate(make_requests(3, SHORT))) == 3
    assert serving.weight_version() == NO_VERSION
    two.close()


def test_hanging_scheduler_is_stopped_after_the_request_timeout(
    serving: SGLangEngine, mortal: LocalServer, tiny_folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "_dispatch", replace(serving._dispatch, request_timeout_s=3.0))
    process = _process(mortal)
    requests, results, noticed_s = _broken_meanwhile(serving, lambda: _child(mortal, "scheduler").suspend())
    _assert_finished_or_aborted(requests, results)
    assert noticed_s < 3.0 + NOTICED_S
    assert not process.is_running()
    with pytest.raises(RolloutError, match="it hangs and was stopped: .* no answer within 3 s"):
        serving.health()


def test_detokenizer_killed_while_idle_is_noticed_without_a_request(serving: SGLangEngine, mortal: LocalServer) -> None:
    _kill(mortal, "detokenizer")
    began = time.monotonic()
    while serving.weight_version() != NO_VERSION:
        assert time.monotonic() - began < NOTICED_S
        time.sleep(0.05)
    with pytest.raises(RolloutError, match=r"Lost servers: http.*sglang::detokenizer \(pid \d+\) died"):
        serving.generate(make_requests(1, SHORT))


def test_dead_server_is_started_a_bounded_number_of_times(
    mortal_engine: SGLangEngine, monkeypatch: pytest.MonkeyPatch, mortal: LocalServer
) -> None:
    mortal.stop()
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


def _assert_serves_again(engine: SGLangEngine, folder: Path, version: int) -> None:
    assert engine.weight_version() == NO_VERSION
    with pytest.raises(RolloutError, match="Lost servers: http.* died"):
        engine.generate(make_requests(1, SHORT))
    engine.wake(EnginePart.ALL)
    push_folder(engine, folder, version)
    requests = make_requests(3, SHORT)
    results = engine.generate(requests)
    check_results(requests, results)
    assert {span.version for result in results for span in result.weight_versions} == {version}


def _process(server: LocalServer) -> psutil.Process:
    assert server._process is not None
    return psutil.Process(server._process.pid)


def _child(server: LocalServer, name: str) -> psutil.Process:
    return next(child for child in _process(server).children(recursive=True) if f"sglang::{name}" in " ".join(child.cmdline()))


def _kill(server: LocalServer, name: str) -> None:
    _child(server, name).kill()
