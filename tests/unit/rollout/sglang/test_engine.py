"""The engine and servers of somebody else, who starts one anew without a word: its answers are of weights that nobody pushed."""

import json
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

from slime_ppo.errors import RolloutError
from slime_ppo.rollout.engine import NO_VERSION, EnginePart
from slime_ppo.rollout.sglang.engine import SGLangEngine
from slime_ppo.rollout.sglang.server import ExternalServer
from slime_ppo.types.sample import FinishReason, GenerateRequest, GenerateResult, SamplingParams
from tests.helpers.engine_harness import push_folder
from tests.helpers.sglang_servers import tiny_engine
from tests.helpers.tiny_llama import make_tiny_llama


class Served:
    """Has weights of `version`, and generates one token with them. `version` "default" is a server that was just started."""

    def __init__(self) -> None:
        self.version = self.answered_version = "default"
        served = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer({"weight_version": served.version, "tp_size": 1})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path == "/generate":
                    self._answer(served.generate(body))
                    return
                served.version = served.answered_version = body.get("weight_version", served.version)
                self._answer({})

            def _answer(self, answer: Any) -> None:
                content = json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None: ...

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        Thread(target=self._http.serve_forever, daemon=True).start()

    @property
    def server(self) -> ExternalServer:
        return ExternalServer(f"http://127.0.0.1:{self._http.server_address[1]}", None, start_timeout_s=5.0)

    def generate(self, body: dict[str, Any]) -> Any:
        meta = {
            "finish_reason": {"type": "length", "length": 1},
            "output_token_logprobs": [[-1.0, 5, None]],
            "weight_versions": [{"version": self.answered_version, "start": 0, "end": 1}],
            "cached_tokens": 0,
        }
        one = {"output_ids": [5], "meta_info": meta}
        return [one] * len(body["rid"]) if isinstance(body["rid"], list) else one

    def restart(self) -> None:
        self.version = self.answered_version = "default"

    def shut_down(self) -> None:
        self._http.shutdown()
        self._http.server_close()


Make = Callable[..., tuple[SGLangEngine, list[Served]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model") / "a", seed=0)


@pytest.fixture
def pushed(folder: Path) -> Iterator[Make]:
    """An engine on as many servers, with version 3 in all."""
    engines: list[SGLangEngine] = []
    all_served: list[Served] = []

    def make(num_servers: int, **options: Any) -> tuple[SGLangEngine, list[Served]]:
        served = [Served() for _ in range(num_servers)]
        all_served.extend(served)
        engines.append(tiny_engine([one.server for one in served], folder, **options))
        push_folder(engines[-1], folder, 3)
        return engines[-1], served

    yield make
    for engine in engines:
        engine.close()
    for one in all_served:
        one.shut_down()


def _generated(engine: SGLangEngine, num_samples: int = 4) -> list[GenerateResult]:
    sampling = SamplingParams(max_new_tokens=1)
    return engine.generate([GenerateRequest(place, np.ones(1, np.int32), 0, sampling) for place in range(num_samples)])


@pytest.mark.parametrize("deterministic", [True, False])
def test_generate_after_a_server_of_others_was_started_anew_is_as_after_a_death(
    pushed: Make, folder: Path, deterministic: bool
) -> None:
    engine, [served] = pushed(1, deterministic=deterministic)
    before = engine.incarnation()
    served.restart()
    assert {result.finish for result in _generated(engine)} == {FinishReason.ABORT}
    assert engine.weight_version() == NO_VERSION
    engine.wake(EnginePart.WEIGHTS)
    assert engine.incarnation() != before, "it has left every process group"
    push_folder(engine, folder, 3)
    results = _generated(engine)
    assert {result.finish for result in results} == {FinishReason.LENGTH}
    assert {span.version for result in results for span in result.weight_versions} == {3}


def test_generate_with_one_of_two_servers_started_anew_asks_the_other(pushed: Make) -> None:
    engine, [served, _] = pushed(2)
    served.restart()
    results = _generated(engine)
    assert {result.finish for result in results} == {FinishReason.LENGTH}
    assert (engine.health().num_lost, engine.weight_version()) == (1, 3)


def test_generate_on_a_server_that_is_started_anew_without_end_is_an_error(pushed: Make, folder: Path) -> None:
    engine, [served] = pushed(1, max_restarts=1)
    served.restart()
    _generated(engine)
    engine.wake(EnginePart.WEIGHTS)
    push_folder(engine, folder, 3)
    served.version = served.answered_version = "77"
    _generated(engine)
    with pytest.raises(RolloutError, match=r"started anew 1 times already .*of version '77', which were never pushed to it"):
        engine.wake(EnginePart.WEIGHTS)


def test_generate_of_an_unknown_version_that_no_server_has_is_an_error(pushed: Make) -> None:
    engine, [served] = pushed(1)
    served.answered_version = "77"
    with pytest.raises(RolloutError, match="weights of version '77', which were never pushed to it"):
        _generated(engine)
