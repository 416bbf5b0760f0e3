"""Weights pushed while requests run: every token's log-prob is of the version that its span names."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from slime_ppo.errors import WeightSyncError
from slime_ppo.rollout.engine import check_results
from slime_ppo.rollout.sglang.engine import SGLangEngine
from slime_ppo.rollout.sglang.server import LocalServer
from slime_ppo.rollout.sglang.updates import PauseMode
from slime_ppo.types.sample import FinishReason, GenerateRequest, GenerateResult, SamplingParams, Support
from tests.helpers.engine_harness import ReferenceModel, make_requests, push_folder, push_folder_partly
from tests.helpers.sglang_servers import external, tiny_engine

OLD, NEW = 60, 61
LONG = SamplingParams(max_new_tokens=300, temperature=0.8)
NUM_SAMPLES = 4


@pytest.fixture
def two_engines(sglang_server: LocalServer, tiny_folders: tuple[Path, Path]) -> Iterator[dict[PauseMode, SGLangEngine]]:
    modes: tuple[PauseMode, ...] = ("abort", "retract")
    engines = {mode: tiny_engine([external(sglang_server)], tiny_folders[0], deterministic=True, pause_mode=mode) for mode in modes}
    yield engines
    for engine in engines.values():
        engine.close()


@pytest.mark.parametrize("sampling", [LONG, replace(LONG, top_p=0.8, top_k=12)])
@pytest.mark.parametrize("mode", ["abort", "retract"])
def test_push_in_mid_generation_keeps_log_probs_of_each_span(
    two_engines: dict[PauseMode, SGLangEngine],
    tiny_folders: tuple[Path, Path],
    references: tuple[ReferenceModel, ReferenceModel],
    mode: PauseMode,
    sampling: SamplingParams,
) -> None:
    engine = two_engines[mode]
    push_folder(engine, tiny_folders[0], OLD)
    requests = make_requests(NUM_SAMPLES, sampling)
    results = _pushed_meanwhile(engine, tiny_folders[1], requests)
    check_results(requests, results)
    cut = [result for result in results if len(result.response_ids) > 0]
    assert len(cut) == NUM_SAMPLES
    for request, result in zip(requests, results, strict=True):
        versions = [span.version for span in result.weight_versions]
        if mode == "abort":
            assert (result.finish, versions) == (FinishReason.ABORT, [OLD])
            assert len(result.response_ids) < LONG.max_new_tokens
        else:
            assert (result.finish, versions) == (FinishReason.LENGTH, [OLD, NEW])
        gaps = _gaps(request, result, {OLD: references[0], NEW: references[1]})
        assert gaps.max() < 1e-4
        wrong = _gaps(request, result, {OLD: references[1], NEW: references[0]})
        assert wrong.max() > 0.1


def test_request_after_a_push_in_flight_is_of_the_new_version_alone(
    two_engines: dict[PauseMode, SGLangEngine], tiny_folders: tuple[Path, Path], references: tuple[ReferenceModel, ReferenceModel]
) -> None:
    engine = two_engines["retract"]
    push_folder(engine, tiny_folders[0], OLD)
    requests = make_requests(NUM_SAMPLES, LONG)
    _pushed_meanwhile(engine, tiny_folders[1], requests)
    later = [replace(request, sampling=replace(LONG, max_new_tokens=8)) for request in requests]
    for request, result in zip(later, engine.generate(later), strict=True):
        assert [span.version for span in result.weight_versions] == [NEW]
        assert _gaps(request, result, {NEW: references[1]}).max() < 1e-4


def test_push_that_fails_in_mid_generation_brings_the_running_requests_back(
    two_engines: dict[PauseMode, SGLangEngine], tiny_folders: tuple[Path, Path]
) -> None:
    engine = two_engines["retract"]
    push_folder(engine, tiny_folders[0], OLD)
    requests = make_requests(NUM_SAMPLES, LONG)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(engine.generate, requests)
        while not engine._fleet.members[0].running:
            time.sleep(0.01)
        time.sleep(0.4)
        with pytest.raises(WeightSyncError, match="missing"):
            push_folder_partly(engine, tiny_folders[1], NEW)
        results = running.result(60)
    check_results(requests, results)
    assert {result.finish for result in results} == {FinishReason.ABORT}
    assert {span.version for result in results for span in result.weight_versions if span.end > 0} <= {OLD}
    push_folder(engine, tiny_folders[1], NEW)
    assert [span.version for span in engine.generate(requests[:1])[0].weight_versions] == [NEW]


def _pushed_meanwhile(engine: SGLangEngine, folder: Path, requests: list[GenerateRequest]) -> list[GenerateResult]:
    """The results of requests, a push of NEW having come when their first tokens were there."""
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(engine.generate, requests)
        member = engine._fleet.members[0]
        while not member.running:
            time.sleep(0.01)
        time.sleep(0.4)
        push_folder(engine, folder, NEW)
        return running.result(120)


def _gaps(request: GenerateRequest, result: GenerateResult, models: dict[int, ReferenceModel]) -> np.ndarray:
    """|log-prob - the one of the span's model| of each response token."""
    expected = np.zeros(len(result.response_ids))
    for span in result.weight_versions:
        full = models[span.version].log_probs(request.prompt_ids, result.response_ids, temperature=request.sampling.temperature)
        for place in range(span.start, span.end):
            row = full[place]
            mass = 0.0 if result.support is None else float(np.log(np.exp(row[_row(result.support, place)]).sum()))
            expected[place] = row[result.response_ids[place]] - mass
    return np.abs(result.log_probs - expected)


def _row(support: Support, place: int) -> np.ndarray:
    start = int(support.counts[:place].sum())
    return support.ids[start : start + support.counts[place]]
