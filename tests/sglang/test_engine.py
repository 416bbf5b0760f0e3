"""What SGLangEngine adds to the engine contract: turns, routers, several servers, servers with a prefix cache."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import pytest

from slime_ppo.errors import RolloutError, WeightSyncError
from slime_ppo.rollout.engine import NO_VERSION, EnginePart, check_results
from slime_ppo.rollout.sglang.engine import SGLangEngine
from slime_ppo.rollout.sglang.server import LocalServer
from slime_ppo.types.sample import GenerateRequest, GenerateResult, SamplingParams
from tests.helpers.engine_harness import (
    ReferenceModel,
    check_joint_rule,
    hashed_scores,
    make_requests,
    push_folder,
    push_folder_partly,
)
from tests.helpers.sglang_servers import external, tiny_engine

FULL = SamplingParams(max_new_tokens=12, temperature=0.7)
RESTRICTED = SamplingParams(max_new_tokens=12, temperature=0.8, top_p=0.8, top_k=12)
Body = dict[str, Any]


def _generate(engine: SGLangEngine, requests: list[GenerateRequest]) -> list[GenerateResult]:
    results = engine.generate(requests)
    check_results(requests, results)
    return results


def test_turn_on_shared_devices_sends_calls_in_the_order_that_servers_survive(
    engine: SGLangEngine, tiny_folders: tuple[Path, Path]
) -> None:
    already = len(engine.calls())
    engine.offload(EnginePart.ALL)
    engine.wake(EnginePart.WEIGHTS)
    push_folder(engine, tiny_folders[1], 8)
    engine.wake(EnginePart.KV_CACHE)
    calls = [call for call in engine.calls()[already:] if call != "/update_weights_from_tensor"]
    assert calls == [
        "/pause_generation abort",
        "/release_memory_occupation kv_cache",
        "/release_memory_occupation weights",
        "/resume_memory_occupation weights",
        "/begin_weight_update",
        "/end_weight_update",
        "/resume_memory_occupation kv_cache",
        "/flush_cache",
        "/continue_generation",
    ]
    assert {span.version for result in _generate(engine, make_requests(2, FULL)) for span in result.weight_versions} == {8}


def test_offload_while_requests_run_brings_them_back_aborted(engine: SGLangEngine, tiny_folders: tuple[Path, Path]) -> None:
    requests = make_requests(4, replace(FULL, max_new_tokens=480))
    results: list[GenerateResult] = []
    thread = Thread(target=lambda: results.extend(engine.generate(requests)))
    thread.start()
    while not any(member.running for member in engine._fleet.members):
        pass
    engine.offload(EnginePart.ALL)
    thread.join(60)
    check_results(requests, results)
    assert {result.finish.value for result in results} == {"abort"}
    engine.wake(EnginePart.ALL)
    push_folder(engine, tiny_folders[0], 9)
    assert len(_generate(engine, make_requests(3, FULL))) == 3


def test_generate_mixed_samplers_draw_what_each_draws_alone(engine: SGLangEngine) -> None:
    """A seeded server numbers tokens by rank as soon as one sampler of its batch is restricted."""
    requests = make_requests(6, FULL)
    mixed = [replace(request, sampling=RESTRICTED) if place % 2 else request for place, request in enumerate(requests)]
    together = _generate(engine, mixed)
    for request, result in zip(mixed, together, strict=True):
        np.testing.assert_array_equal(_generate(engine, [request])[0].response_ids, result.response_ids)


def test_seeded_draw_is_the_best_of_the_hashed_race(
    engine: SGLangEngine, references: tuple[ReferenceModel, ReferenceModel]
) -> None:
    """The contract tests take the margin of a draw from these scores."""
    for request, result in zip(requests := make_requests(6, FULL), _generate(engine, requests), strict=True):
        full = references[0].log_probs(request.prompt_ids, result.response_ids, temperature=FULL.temperature)
        for position, token in enumerate(result.response_ids):
            scores = hashed_scores(request, np.exp(full[position]), position)
            assert scores[token] > scores.max() - 1e-4


def test_generate_refused_request_raises_naming_sample_and_leaves_others_served(engine: SGLangEngine) -> None:
    """The engine's own checks are made to pass what the server refuses."""
    engine_with_more_positions = replace(engine._settings.shape, max_position_embeddings=4096)
    real = engine._settings
    engine._settings = replace(real, shape=engine_with_more_positions)
    try:
        requests = make_requests(3, FULL)
        long = replace(requests[1], prompt_ids=np.full(600, 5, np.int32))
        with pytest.raises(RolloutError, match=rf"sample {long.sample_id}: .*/generate answered 400: .*longer"):
            engine.generate([requests[0], long, requests[2]])
    finally:
        engine._settings = real
    assert len(_generate(engine, requests)) == 3


def test_generate_bounded_concurrency_answers_all_in_order(
    engine: SGLangEngine, sglang_server: LocalServer, tiny_folders: tuple[Path, Path]
) -> None:
    bounded = tiny_engine([external(sglang_server)], tiny_folders[0], deterministic=True, max_concurrency=2)
    push_folder(bounded, tiny_folders[0], 3)
    requests = make_requests(7, FULL)
    for one, all_at_once in zip(_generate(bounded, requests), _again(engine, tiny_folders[0], requests), strict=True):
        np.testing.assert_array_equal(one.response_ids, all_at_once.response_ids)
    bounded.close()


def test_two_servers_share_the_requests_and_keep_their_order(
    engine: SGLangEngine,
    sglang_server: LocalServer,
    sglang_server_of_two_ranks: LocalServer,
    tiny_folders: tuple[Path, Path],
    references: tuple[ReferenceModel, ReferenceModel],
) -> None:
    two = tiny_engine([external(sglang_server), external(sglang_server_of_two_ranks)], tiny_folders[0])
    assert two.num_ranks() == 3
    push_folder(two, tiny_folders[1], 21)
    requests = make_requests(16, RESTRICTED)
    served = [0, 0]
    for place, member in enumerate(two._fleet.members):
        member.client.generate = _counted(member.client.generate, served, place)  # type: ignore[method-assign]
    results = _generate(two, requests)
    assert served == [8, 8]
    check_joint_rule(references[1], requests, results)
    assert {span.version for result in results for span in result.weight_versions} == {21}
    two.close()


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(0, 1.0, 0.4), (9, 0.9, 0.1), (0, 1.0, 1.0)])
def test_generate_min_p_on_unseeded_server_follows_joint_rule(
    sglang_server_of_two_ranks: LocalServer,
    tiny_folders: tuple[Path, Path],
    references: tuple[ReferenceModel, ReferenceModel],
    top_k: int,
    top_p: float,
    min_p: float,
) -> None:
    unseeded = tiny_engine([external(sglang_server_of_two_ranks)], tiny_folders[0])
    push_folder(unseeded, tiny_folders[0], 5)
    requests = make_requests(6, replace(RESTRICTED, top_k=top_k, top_p=top_p, min_p=min_p))
    check_joint_rule(references[0], requests, _generate(unseeded, requests))
    unseeded.close()


def test_prefix_cache_is_used_and_flushed_by_every_push(
    sglang_server_of_two_ranks: LocalServer, tiny_folders: tuple[Path, Path], references: tuple[ReferenceModel, ReferenceModel]
) -> None:
    unseeded = tiny_engine([external(sglang_server_of_two_ranks)], tiny_folders[0])
    push_folder(unseeded, tiny_folders[0], 5)
    request = GenerateRequest(1, np.arange(4, 60, dtype=np.int32), 0, FULL)
    assert _generate(unseeded, [request])[0].num_cached_tokens == 0
    assert _generate(unseeded, [request])[0].num_cached_tokens > 40
    push_folder(unseeded, tiny_folders[1], 6)
    (result,) = _generate(unseeded, [request])
    assert result.num_cached_tokens == 0
    full = references[1].log_probs(request.prompt_ids, result.response_ids, temperature=FULL.temperature)
    np.testing.assert_allclose(result.log_probs, full[np.arange(len(full)), result.response_ids], atol=1e-4, rtol=0)
    unseeded.close()


def test_failed_push_to_one_of_two_servers_stops_traffic_to_both(
    engine: SGLangEngine, sglang_server: LocalServer, sglang_server_of_two_ranks: LocalServer, tiny_folders: tuple[Path, Path]
) -> None:
    two = tiny_engine([external(sglang_server), external(sglang_server_of_two_ranks)], tiny_folders[0])
    push_folder(two, tiny_folders[0], 30)
    with pytest.raises(WeightSyncError):
        push_folder_partly(two, tiny_folders[1], 31)
    assert two.weight_version() == NO_VERSION
    with pytest.raises(RolloutError, match="push"):
        two.generate(make_requests(1, FULL))
    push_folder(two, tiny_folders[1], 32)
    assert {span.version for result in _generate(two, make_requests(4, FULL)) for span in result.weight_versions} == {32}
    two.close()


def test_router_that_passes_everything_is_used_for_requests_alone(
    engine: SGLangEngine, sglang_server: LocalServer, tiny_folders: tuple[Path, Path]
) -> None:
    requests = make_requests(3, RESTRICTED)
    expected = _generate(engine, requests)
    with _router(sglang_server.start().url, lambda body: body) as (url, paths):
        routed = tiny_engine([external(sglang_server)], tiny_folders[0], deterministic=True, router_url=url)
        push_folder(routed, tiny_folders[0], 40)
        for through, direct in zip(_generate(routed, requests), expected, strict=True):
            np.testing.assert_array_equal(through.response_ids, direct.response_ids)
        assert paths == ["/generate"] * 5
        routed.close()


def test_router_that_drops_fields_is_refused_before_the_first_request(
    engine: SGLangEngine, sglang_server: LocalServer, tiny_folders: tuple[Path, Path]
) -> None:
    known = ("rid", "input_ids", "sampling_params", "return_logprob")
    with _router(sglang_server.start().url, lambda body: {name: body[name] for name in known if name in body}) as (url, paths):
        routed = tiny_engine([external(sglang_server)], tiny_folders[0], deterministic=True, router_url=url)
        push_folder(routed, tiny_folders[0], 41)
        with pytest.raises(RolloutError, match=r"router at .* use smg, .*output_token_sampling_mask.*sglang-router 0.3.2"):
            routed.generate(make_requests(3, FULL))
        assert paths == ["/generate"] * 2
        routed.close()


def _again(engine: SGLangEngine, folder: Path, requests: list[GenerateRequest]) -> list[GenerateResult]:
    """The results of an engine whose server another one has pushed to."""
    push_folder(engine, folder, 50)
    return _generate(engine, requests)


def _counted(generate: Callable[..., Any], served: list[int], place: int) -> Callable[..., Any]:
    def counting(body: Mapping[str, Any], timeout_s: float) -> Any:
        served[place] += 1
        return generate(body, timeout_s)

    return counting


@contextmanager
def _router(server_url: str, passed_on: Callable[[Body], Body]) -> Iterator[tuple[str, list[str]]]:
    """A proxy for POST, and the paths that it was asked for."""
    paths: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            paths.append(self.path)
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            headers = {name: self.headers[name] for name in ("Content-Type", "Authorization")}
            request = Request(server_url + self.path, json.dumps(passed_on(body)).encode(), headers)
            try:
                with urlopen(request, timeout=60) as answer:
                    status, content = answer.status, answer.read()
            except HTTPError as error:
                status, content = error.code, error.read()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as proxy:
        Thread(target=proxy.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{proxy.server_address[1]}", paths
        proxy.shutdown()
