"""Requests spread over servers, against small HTTP servers that answer as they are told."""

import json
import logging
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Barrier, Event, Lock, Thread, Timer
from typing import Any

import numpy as np
import pytest

from slime_ppo.errors import RolloutError
from slime_ppo.rollout.engine import check_results
from slime_ppo.rollout.sglang.dispatch import Dispatch, DispatchSettings
from slime_ppo.rollout.sglang.fleet import ServerFleet
from slime_ppo.rollout.sglang.router import router_member
from slime_ppo.rollout.sglang.server import ServerAddress
from slime_ppo.types.sample import FinishReason, GenerateRequest, GenerateResult, SamplingParams

SETTINGS = DispatchSettings(vocab_size=100, deterministic=False, max_concurrency=None, max_attempts=3, request_timeout_s=30.0)
SEEDED = replace(SETTINGS, deterministic=True)
Respond = Callable[[dict[str, Any]], tuple[int, Any]]


class _HttpServer(ThreadingHTTPServer):
    request_queue_size = 64

    def handle_error(self, *_: object) -> None:
        """Quiet: requests that were cancelled have no reader."""


class FakeServer:
    """`respond` answers /generate; the other calls are answered with nothing. It is a `Server`, too. `asked` are the names of the
    requests, a list of them for each message that asks for several."""

    def __init__(self, respond: Respond) -> None:
        self.asked: list[Any] = []
        self.controls: list[tuple[str, dict[str, Any]]] = []
        self.most_at_once = 0
        self.problem_text: str | None = None
        self.stopped = False
        self._running = 0
        self._lock = Lock()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path == "/generate":
                    status, answer = fake._generate(respond, body)
                else:
                    fake.controls.append((self.path, body))
                    status, answer = 200, {}
                content = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None: ...

        self._http = _HttpServer(("127.0.0.1", 0), Handler)
        Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()  # looks so often whether to end

    def start(self) -> ServerAddress:
        self.problem_text = None
        return ServerAddress(f"http://127.0.0.1:{self._http.server_address[1]}", 1, 1)

    def problem(self) -> str | None:
        return self.problem_text

    def stop(self) -> None:
        self.stopped = True

    def shut_down(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def _generate(self, respond: Respond, body: dict[str, Any]) -> tuple[int, Any]:
        with self._lock:
            self.asked.append(body["rid"])
            self._running += 1
            self.most_at_once = max(self.most_at_once, self._running)
        try:
            return respond(body)
        finally:
            with self._lock:
                self._running -= 1


@pytest.fixture
def fakes() -> Iterator[Callable[[Respond], FakeServer]]:
    made: list[FakeServer] = []

    def make(respond: Respond) -> FakeServer:
        made.append(FakeServer(respond))
        return made[-1]

    yield make
    for fake in made:
        fake.shut_down()


def _served(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """One token, the first of the prompt."""
    token = body["input_ids"][0]
    meta = {
        "finish_reason": {"type": "length", "length": 1},
        "output_token_logprobs": [[-1.0, token, None]],
        "weight_versions": [{"version": "2", "start": 0, "end": 1}],
        "cached_tokens": 0,
    }
    return 200, {"output_ids": [token], "meta_info": meta}


def _served_together(body: dict[str, Any]) -> tuple[int, Any]:
    """As `_served` for each sample of a message, or for the one of a request by itself."""
    if isinstance(body["rid"], str):
        return _served(body)
    return 200, [_served({"input_ids": ids})[1] for ids in body["input_ids"]]


def _slow(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    time.sleep(0.2)
    return _served(body)


def _requests(num_samples: int) -> list[GenerateRequest]:
    sampling = SamplingParams(max_new_tokens=1)
    return [GenerateRequest(10 + index, np.array([20 + index], np.int32), index, sampling) for index in range(num_samples)]


def _run(fleet: ServerFleet, num_samples: int, settings: DispatchSettings = SETTINGS) -> list[GenerateResult]:
    dispatch = Dispatch(fleet, fleet.members, settings, versions={2}, abort=Event())
    requests = _requests(num_samples)
    results = fleet.run(dispatch.run(requests))
    check_results(requests, results)
    return results


def test_run_all_requests_at_once_by_default_and_in_order(fakes: Callable[[Respond], FakeServer]) -> None:
    all_there = Barrier(12, timeout=30)

    def respond(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        all_there.wait()
        return _served(body)

    fleet = ServerFleet([fakes(respond)], None)
    results = _run(fleet, 12)
    fleet.close()
    assert [result.response_ids.tolist() for result in results] == [[20 + index] for index in range(12)]


def test_fleet_may_open_more_connections_than_a_shell_allows(fakes: Callable[[Respond], FakeServer]) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        ServerFleet([fakes(_served)], None).close()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 256
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_run_keeps_to_max_concurrency(fakes: Callable[[Respond], FakeServer]) -> None:
    server = fakes(_slow)
    fleet = ServerFleet([server], None)
    _run(fleet, 6, replace(SETTINGS, max_concurrency=2))
    fleet.close()
    assert server.most_at_once == 2


def test_run_takes_the_server_with_the_fewest_requests(fakes: Callable[[Respond], FakeServer]) -> None:
    quick, slow = fakes(_served), fakes(_slow)
    fleet = ServerFleet([slow, quick], None)
    _run(fleet, 16, replace(SETTINGS, max_concurrency=4))
    fleet.close()
    assert len(slow.asked) <= 4
    assert len(quick.asked) == 16 - len(slow.asked)


def test_run_tries_again_after_a_pause_and_logs_sample_server_and_attempt(
    fakes: Callable[[Respond], FakeServer], caplog: pytest.LogCaptureFixture
) -> None:
    failures = iter([True, True])
    server = fakes(lambda body: (503, {"detail": "busy"}) if next(failures, False) else _served(body))
    fleet = ServerFleet([server], None)
    began = time.monotonic()
    with caplog.at_level(logging.WARNING):
        (result,) = _run(fleet, 1)
    assert 0.3 <= time.monotonic() - began < 5, "pauses of 0.1 s and 0.2 s"
    fleet.close()
    assert result.finish is FinishReason.LENGTH
    messages = [record.getMessage() for record in caplog.records]
    url = server.start().url
    assert messages[0].startswith(f"sample 10 on {url}: attempt 1 of 3 failed: {url}/generate answered 503")
    assert messages[1].startswith(f"sample 10 on {url}: attempt 2 of 3 failed")
    assert len(messages) == 2


def test_run_after_the_last_attempt_raises_naming_the_sample(fakes: Callable[[Respond], FakeServer]) -> None:
    server = fakes(lambda body: (503, {"detail": "busy"}))
    fleet = ServerFleet([server], None)
    with pytest.raises(RolloutError, match=r"sample 10: attempt 3 of 3 failed: .*/generate answered 503: .*busy"):
        _run(fleet, 1)
    fleet.close()
    assert len(set(server.asked)) == 3


def test_run_refused_request_is_not_tried_again(fakes: Callable[[Respond], FakeServer]) -> None:
    server = fakes(lambda body: (400, {"error": "too long"}))
    fleet = ServerFleet([server], None)
    with pytest.raises(RolloutError, match=r"sample 10: .*/generate answered 400: .*too long"):
        _run(fleet, 1)
    fleet.close()
    assert len(server.asked) == 1


def test_run_hanging_server_is_stopped_and_its_requests_move_on(fakes: Callable[[Respond], FakeServer]) -> None:
    release = Event()
    hanging, well = fakes(lambda body: (200, {}) if release.wait(30) else (500, {})), fakes(_served)
    fleet = ServerFleet([hanging, well], None)
    results = _run(fleet, 8, replace(SETTINGS, request_timeout_s=0.5))
    release.set()
    assert {result.finish for result in results} == {FinishReason.LENGTH}
    assert hanging.stopped
    assert len(well.asked) == 8
    assert "it hangs: " in fleet.losses()
    fleet.close()


def test_run_without_any_server_left_brings_back_the_rest_aborted(fakes: Callable[[Respond], FakeServer]) -> None:
    """The one that answers does so; the server's death, noticed by looking at it, ends the wait for the others."""
    release = Event()
    server = fakes(lambda body: _served(body) if body["input_ids"] == [20] else (500, {"x": release.wait(30)}))
    fleet = ServerFleet([server], None)

    def die() -> None:
        time.sleep(0.3)
        server.problem_text = "its scheduler died"

    Thread(target=die).start()
    results = _run(fleet, 5)
    release.set()
    assert [result.finish for result in results] == [FinishReason.LENGTH] + [FinishReason.ABORT] * 4
    assert fleet.losses().endswith("its scheduler died")
    fleet.close()


def test_run_lost_sample_that_nobody_would_ask_again_is_an_error(fakes: Callable[[Respond], FakeServer]) -> None:
    """The other server keeps the version, so that the engine does not count as lost: no silent ABORT."""
    dying, well = fakes(lambda body: (500, {"x": release.wait(30)})), fakes(_served)
    release = Event()
    fleet = ServerFleet([dying, well], None)
    Timer(0.3, lambda: setattr(dying, "problem_text", "its scheduler died")).start()
    with pytest.raises(RolloutError, match=r"attempt 1 of 1 failed: .*its scheduler died"):
        _run(fleet, 2, replace(SETTINGS, max_attempts=1))
    release.set()
    fleet.close()


def test_run_lost_router_before_living_servers_is_an_error(fakes: Callable[[Respond], FakeServer]) -> None:
    release = Event()
    hanging = fakes(lambda body: (500, {"x": release.wait(30)})).start().url
    fleet = ServerFleet([fakes(_served)], None)
    router = router_member(hanging, fleet.client(hanging))
    settings = replace(SETTINGS, request_timeout_s=0.5)
    with pytest.raises(RolloutError, match="the router before the servers is lost: it hangs"):
        fleet.run(Dispatch(fleet, [router], settings, versions={2}, abort=Event()).run(_requests(3)))
    release.set()
    fleet.close()


def test_run_seeded_samples_go_to_each_server_in_one_message(fakes: Callable[[Respond], FakeServer]) -> None:
    first, second = servers = fakes(_served_together), fakes(_served_together)
    fleet = ServerFleet(servers, None)
    results = _run(fleet, 5, SEEDED)
    fleet.close()
    assert [result.response_ids.tolist() for result in results] == [[20 + index] for index in range(5)]
    assert [[rid.split("-")[1:] for rid in message] for message in first.asked] == [[["10", "0"], ["12", "0"], ["14", "0"]]]
    assert [[rid.split("-")[1:] for rid in message] for message in second.asked] == [[["11", "0"], ["13", "0"]]]


def test_run_seeded_share_of_a_server_that_dies_is_asked_elsewhere_and_the_others_are_kept(
    fakes: Callable[[Respond], FakeServer],
) -> None:
    release = Event()
    dying, well = fakes(lambda body: (500, {"x": release.wait(30)})), fakes(_served_together)
    fleet = ServerFleet([dying, well], None)
    Timer(0.3, lambda: setattr(dying, "problem_text", "its scheduler died")).start()
    results = _run(fleet, 5, SEEDED)
    release.set()
    fleet.close()
    assert {result.finish for result in results} == {FinishReason.LENGTH}
    assert [result.response_ids.tolist() for result in results] == [[20 + index] for index in range(5)]
    kept, *again = well.asked
    assert [rid.split("-")[1:] for rid in kept] == [["11", "0"], ["13", "0"]]
    assert sorted(rid.split("-")[1:] for rid in again) == [["10", "1"], ["12", "1"], ["14", "1"]]
    assert len(dying.asked) == 1


def test_run_seeded_share_with_a_sample_that_is_refused_names_it(fakes: Callable[[Respond], FakeServer]) -> None:
    """As a server does, the fake refuses the whole message for it."""
    servers = [fakes(lambda body: (400, {"error": "too long"}) if "22" in str(body["input_ids"]) else _served_together(body))] * 2
    fleet = ServerFleet(servers, None)
    with pytest.raises(RolloutError, match=r"sample 12: .*/generate answered 400: .*too long"):
        _run(fleet, 5, SEEDED)
    fleet.close()


@pytest.mark.parametrize("answer", [{"output_ids": [1]}, [], [{"output_ids": [1]}] * 2])
def test_run_seeded_wrong_answer_is_told_when_no_request_is_left_under_way(
    fakes: Callable[[Respond], FakeServer], answer: object
) -> None:
    release = Event()
    wrong, slow = fakes(lambda body: (200, answer)), fakes(lambda body: (500, {"x": release.wait(30)}))
    fleet = ServerFleet([wrong, slow], None)
    with pytest.raises(RolloutError, match=r"(in one message and answered|answered without meta_info)"):
        _run(fleet, 4, SEEDED)
    assert not any(member.running for member in fleet.members)
    assert len(slow.asked) == 1
    release.set()
    fleet.close()


def test_post_lets_a_server_that_refuses_leave_while_others_wait_for_it(fakes: Callable[[Respond], FakeServer]) -> None:
    left = ("/leave", {"group": "a"})

    def wait(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        deadline = time.monotonic() + 20
        while left not in refusing.controls and time.monotonic() < deadline:
            time.sleep(0.01)
        return (200, {}) if left in refusing.controls else (400, {"error": "the other one is still there"})

    refusing, waiting = fakes(lambda body: (400, {"error": "no session"})), fakes(wait)
    fleet = ServerFleet([refusing, waiting], None)
    with pytest.raises(RolloutError, match="1 of 2 SGLang servers failed: .*no session"):
        fleet.post("/generate", [{"rid": "x"}] * 2, timeout_s=30.0, on_refusal=left)
    assert left not in waiting.controls
    fleet.close()


def test_post_to_a_server_that_dies_is_an_error_unless_it_may(fakes: Callable[[Respond], FakeServer]) -> None:
    """Going to sleep and waking up: the dead one is counted as lost and started anew later, the run goes on."""
    dying, well = fakes(_served), fakes(_served)
    fleet = ServerFleet([dying, well], None)
    dying.shut_down()
    dying.problem_text = "its scheduler died"
    assert fleet.num_running(fleet.members[0], timeout_s=5.0) == 0
    assert fleet.post_to(fleet.members, "/pause_generation", {}, timeout_s=5.0, may_die=True) == [None, {}]
    assert fleet.alive() == fleet.members[1:]
    with pytest.raises(RolloutError, match="1 of 2 SGLang servers failed: .*its scheduler died"):
        fleet.post_to(fleet.members, "/pause_generation", {}, timeout_s=5.0)
    fleet.close()


def test_lost_server_is_started_a_bounded_number_of_times(fakes: Callable[[Respond], FakeServer]) -> None:
    dying, well = fakes(_served), fakes(_served)
    fleet = ServerFleet([dying, well], None)
    for _ in range(2):
        dying.problem_text = "its scheduler died"
        assert fleet.restart_lost(2) == fleet.members[:1]
        assert fleet.alive() == fleet.members
    dying.problem_text = "its scheduler died"
    with pytest.raises(RolloutError, match=r"was started anew 2 times already \(--sglang-max-restarts\): its scheduler died"):
        fleet.restart_lost(2)
    assert fleet.alive() == fleet.members[1:]
    fleet.close()
