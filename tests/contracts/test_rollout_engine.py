"""The rollout engine contract, for every engine in `tests.helpers.engine_harness.ENGINES`.

Log-probs and supports are held against an independent forward pass and the plain joint rule.
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

from slime_ppo.errors import RolloutError, WeightSyncError
from slime_ppo.rollout.engine import NO_VERSION, EnginePart, check_results
from slime_ppo.types.sample import FinishReason, GenerateRequest, GenerateResult, SamplingParams, one_version
from slime_ppo.weight_sync.disk import FolderSync
from tests.helpers.engine_harness import (
    BOUNDARY,
    BUCKET_BYTES,
    ENGINES,
    EngineHarness,
    ReferenceModel,
    check_joint_rule,
    embedded_harness,
    joint_support,
    make_requests,
    sglang_harness,
)

VERSION = 7
MARGIN = 1e-4
"""Of the draw's scores: two batch shapes may draw different tokens only where the best two are closer."""
FULL = SamplingParams(max_new_tokens=12, temperature=0.7)
RESTRICTED = SamplingParams(max_new_tokens=12, temperature=0.8, top_p=0.8, top_k=12)


@pytest.fixture(scope="module")
def folders(tiny_folders: tuple[Path, Path]) -> tuple[Path, Path]:
    """Two models of one shape."""
    return tiny_folders


@pytest.fixture(scope="module", params=ENGINES)
def started(request: pytest.FixtureRequest, folders: tuple[Path, Path]) -> EngineHarness:
    if request.param == "sglang":
        return sglang_harness(folders[0], request.getfixturevalue("sglang_engine"))
    return embedded_harness(folders[0])


@pytest.fixture
def harness(started: EngineHarness) -> Iterator[EngineHarness]:
    """Awake, with its own folder's weights as VERSION."""
    started.engine.wake(EnginePart.ALL)
    started.push(started.folder, VERSION)
    yield started


@pytest.fixture(scope="module")
def reference(folders: tuple[Path, Path]) -> ReferenceModel:
    return ReferenceModel(folders[0])


def _generate(harness: EngineHarness, requests: list[GenerateRequest]) -> list[GenerateResult]:
    results = harness.engine.generate(requests)
    check_results(requests, results)
    return results


def test_generate_mixed_requests_answers_each_in_order(harness: EngineHarness) -> None:
    requests = make_requests(6, FULL)[::-1]
    requests = [replace(r, sampling=replace(FULL, max_new_tokens=3 + i)) for i, r in enumerate(requests)]
    results = _generate(harness, requests)
    assert [result.sample_id for result in results] == [request.sample_id for request in requests]
    assert [len(result.response_ids) for result in results] == [3, 4, 5, 6, 7, 8]
    assert {result.finish for result in results} == {FinishReason.LENGTH}
    assert all(result.response_ids.dtype == np.int32 and result.log_probs.dtype == np.float32 for result in results)
    assert all(result.support is None for result in results)


def test_generate_sampled_stop_token_is_last_and_finishes_as_stop(harness: EngineHarness) -> None:
    free = make_requests(3, FULL)
    whole = _generate(harness, free)
    stops = (int(whole[1].response_ids[4]), 3)
    at = [np.flatnonzero(np.isin(result.response_ids, stops)) for result in whole]
    expected = [int(places[0]) + 1 if len(places) else FULL.max_new_tokens for places in at]
    results = _generate(harness, [replace(r, sampling=replace(FULL, stop_token_ids=stops)) for r in free])
    assert [len(result.response_ids) for result in results] == expected
    assert results[1].finish is FinishReason.STOP
    assert results[1].response_ids[-1] in stops
    for result, before, length in zip(results, whole, expected, strict=True):
        np.testing.assert_array_equal(result.response_ids, before.response_ids[:length])
        assert result.finish is (FinishReason.STOP if length < FULL.max_new_tokens else FinishReason.LENGTH)


def test_generate_unrestricted_log_probs_equal_independent_forward(harness: EngineHarness, reference: ReferenceModel) -> None:
    requests = make_requests(8, FULL)
    for request, result in zip(requests, _generate(harness, requests), strict=True):
        full = reference.log_probs(request.prompt_ids, result.response_ids, temperature=FULL.temperature)
        expected = full[np.arange(len(result.response_ids)), result.response_ids]
        np.testing.assert_allclose(result.log_probs, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (12, 0.8, 0.0),
        (5, 1.0, 0.0),
        (0, 0.6, 0.0),
        (0, 0.97, 0.0),
        (1, 1.0, 0.0),
        (1000, 0.9, 0.0),
        (0, 1e-6, 0.0),
        (0, 1.0, 0.4),
        (9, 0.9, 0.1),
        (0, 1.0, 1.0),
    ],
)
def test_generate_restricted_support_follows_joint_rule(
    harness: EngineHarness, reference: ReferenceModel, top_k: int, top_p: float, min_p: float
) -> None:
    if not harness.engine.returns_support:
        pytest.fail("an engine without supports must not be listed with restricted samplers")
    sampling = replace(RESTRICTED, top_k=top_k, top_p=top_p, min_p=min_p)
    requests = make_requests(6, sampling)
    if min_p > 0 and not harness.serves_min_p:
        with pytest.raises(RolloutError, match=f"sample {requests[0].sample_id}: min_p {min_p}"):
            harness.engine.generate(requests)
        return
    check_joint_rule(reference, requests, _generate(harness, requests))


def test_joint_rule_differs_from_sequential_rule_on_these_prompts(harness: EngineHarness, reference: ReferenceModel) -> None:
    """Without a position where top_p after top_k would keep other tokens, the test above could not tell the rules apart."""
    differing = 0
    requests = make_requests(6, RESTRICTED)
    for request, result in zip(requests, _generate(harness, requests), strict=True):
        full = np.exp(reference.log_probs(request.prompt_ids, result.response_ids, temperature=RESTRICTED.temperature))
        for probs in full:
            top = joint_support(probs, top_k=RESTRICTED.top_k, top_p=1.0)
            renormalised = np.zeros_like(probs)
            renormalised[top] = probs[top] / probs[top].sum()
            sequential = joint_support(renormalised, top_k=RESTRICTED.top_k, top_p=RESTRICTED.top_p)
            differing += sequential != joint_support(probs, top_k=RESTRICTED.top_k, top_p=RESTRICTED.top_p)
    assert differing > 10


def test_generate_min_p_keeps_fewer_tokens_than_without(harness: EngineHarness, reference: ReferenceModel) -> None:
    """Without a position where min_p cuts, the test above would not notice an engine that ignores it."""
    sampling = replace(FULL, min_p=0.4)
    requests = make_requests(6, sampling)
    if not harness.serves_min_p:
        with pytest.raises(RolloutError, match="min_p"):
            harness.engine.generate(requests)
        return
    sizes = []
    for request, result in zip(requests, _generate(harness, requests), strict=True):
        assert result.support is not None
        full = np.exp(reference.log_probs(request.prompt_ids, result.response_ids, temperature=FULL.temperature))
        assert (full[np.arange(len(full)), result.response_ids] >= 0.4 * full.max(-1) - BOUNDARY).all()
        sizes.extend(result.support.counts.tolist())
    assert 1 < np.mean(sizes) < 50


def test_generate_greedy_takes_most_likely_token_with_unit_temperature_log_prob(
    harness: EngineHarness, reference: ReferenceModel
) -> None:
    requests = make_requests(4, replace(FULL, temperature=0.0))
    for request, result in zip(requests, _generate(harness, requests), strict=True):
        full = reference.log_probs(request.prompt_ids, result.response_ids, temperature=1.0)
        chosen = full[np.arange(len(full)), result.response_ids]
        assert (full.max(-1) - chosen < BOUNDARY).all()
        np.testing.assert_allclose(result.log_probs, chosen, atol=1e-4, rtol=0)


@pytest.mark.parametrize("sampling", [FULL, RESTRICTED])
def test_generate_same_requests_twice_is_bit_equal(harness: EngineHarness, sampling: SamplingParams) -> None:
    requests = make_requests(7, sampling)
    for first, second in zip(_generate(harness, requests), _generate(harness, requests), strict=True):
        np.testing.assert_array_equal(first.response_ids, second.response_ids)
        np.testing.assert_array_equal(first.log_probs, second.log_probs)


def test_generate_tokens_depend_on_own_seed_and_not_on_batch(harness: EngineHarness, reference: ReferenceModel) -> None:
    requests = make_requests(16, FULL)
    together = _generate(harness, requests)
    equal = 0
    for request, batched in zip(requests, together, strict=True):
        (alone,) = _generate(harness, [request])
        differing = np.flatnonzero(alone.response_ids != batched.response_ids)
        equal += len(differing) == 0
        if len(differing) > 0:
            at = int(differing[0])
            full = reference.log_probs(request.prompt_ids, alone.response_ids, temperature=FULL.temperature)
            assert harness.draw_margin(request, np.exp(full[at]), at) < MARGIN
    assert equal >= 14


def test_generate_other_seed_draws_other_tokens(harness: EngineHarness) -> None:
    (request,) = make_requests(1, FULL)
    results = [_generate(harness, [replace(request, seed=seed)])[0] for seed in range(8)]
    assert len({tuple(result.response_ids.tolist()) for result in results}) == 8


def test_push_new_weights_are_the_ones_generated_with(harness: EngineHarness, folders: tuple[Path, Path]) -> None:
    assert harness.push(folders[1], VERSION + 1) == VERSION + 1
    (request,) = make_requests(1, FULL)
    (result,) = _generate(harness, [request])
    full = ReferenceModel(folders[1]).log_probs(request.prompt_ids, result.response_ids, temperature=FULL.temperature)
    np.testing.assert_allclose(result.log_probs, full[np.arange(len(full)), result.response_ids], atol=1e-4, rtol=0)
    assert result.weight_versions == one_version(VERSION + 1, len(result.response_ids))
    assert harness.engine.weight_version() == harness.engine.health().weight_version == VERSION + 1


def test_generate_after_weights_woke_without_push_raises(harness: EngineHarness) -> None:
    requests = make_requests(1, FULL)
    before = _generate(harness, requests)
    harness.engine.offload(EnginePart.ALL)
    harness.engine.wake(EnginePart.ALL)
    assert harness.engine.weight_version() == NO_VERSION
    with pytest.raises(RolloutError, match="before a weight version was pushed"):
        harness.engine.generate(requests)
    harness.push(harness.folder, VERSION)
    np.testing.assert_array_equal(_generate(harness, requests)[0].log_probs, before[0].log_probs)


@pytest.mark.parametrize("part", [EnginePart.WEIGHTS, EnginePart.KV_CACHE])
def test_generate_while_part_offloaded_raises_naming_it(harness: EngineHarness, part: EnginePart) -> None:
    harness.engine.offload(part)
    assert harness.engine.health().awake == EnginePart.ALL & ~part
    with pytest.raises(RolloutError, match=str(part.name)):
        harness.engine.generate(make_requests(1, FULL))


def test_kv_cache_sleep_keeps_weight_version(harness: EngineHarness) -> None:
    harness.engine.offload(EnginePart.KV_CACHE)
    harness.engine.wake(EnginePart.KV_CACHE)
    assert harness.engine.weight_version() == VERSION
    _generate(harness, make_requests(1, FULL))


def test_wake_of_awake_part_keeps_weight_version(harness: EngineHarness) -> None:
    harness.engine.wake(EnginePart.ALL)
    assert harness.engine.weight_version() == VERSION


def test_offload_frees_bytes_and_wake_takes_them_again(harness: EngineHarness) -> None:
    awake = harness.engine.health().bytes_resident
    harness.engine.offload(EnginePart.ALL)
    asleep = harness.engine.health().bytes_resident
    harness.engine.offload(EnginePart.ALL)
    assert harness.engine.health().bytes_resident == asleep
    # SGLang on a CPU frees nothing, and must not say so.
    assert asleep < awake / 100 if harness.frees_memory else asleep == awake > 0
    harness.engine.wake(EnginePart.WEIGHTS)
    assert harness.engine.health().bytes_resident == awake


def test_push_while_kv_cache_sleeps_succeeds(harness: EngineHarness) -> None:
    harness.engine.offload(EnginePart.ALL)
    harness.engine.wake(EnginePart.WEIGHTS)
    assert harness.push(harness.folder, VERSION + 3) == VERSION + 3
    harness.engine.wake(EnginePart.KV_CACHE)
    assert _generate(harness, make_requests(1, FULL))[0].weight_versions[0].version == VERSION + 3


def test_push_to_offloaded_weights_raises(harness: EngineHarness) -> None:
    harness.engine.offload(EnginePart.WEIGHTS)
    with pytest.raises(WeightSyncError, match="offloaded"):
        harness.push(harness.folder, VERSION)


def test_push_that_failed_leaves_no_valid_version_until_a_whole_push(harness: EngineHarness) -> None:
    with pytest.raises(WeightSyncError):
        harness.push_partly(harness.folder, VERSION + 1)
    assert harness.engine.weight_version() == NO_VERSION
    with pytest.raises(RolloutError, match="push"):
        harness.engine.generate(make_requests(1, FULL))
    harness.push(harness.folder, VERSION + 1)
    _generate(harness, make_requests(1, FULL))


def test_folder_sync_serves_the_weights_of_the_folder_as_a_push_does(harness: EngineHarness, folders: tuple[Path, Path]) -> None:
    requests = make_requests(3, FULL)
    harness.push(folders[1], VERSION)
    pushed = _generate(harness, requests)
    harness.push(folders[0], VERSION + 1)
    target: Any = harness.engine
    sync = FolderSync(target, str(folders[1]), bucket_bytes=BUCKET_BYTES)
    sync.connect()
    assert sync.push(VERSION + 2) == VERSION + 2
    for read, other in zip(_generate(harness, requests), pushed, strict=True):
        assert read.response_ids.tolist() == other.response_ids.tolist()
        np.testing.assert_allclose(read.log_probs, other.log_probs, atol=1e-6, rtol=0)
        assert read.weight_versions == one_version(VERSION + 2, 12)
    sync.close()


def test_abort_ends_running_generate_and_idle_abort_does_nothing(harness: EngineHarness) -> None:
    harness.engine.abort()
    (idle,) = _generate(harness, make_requests(1, FULL))
    assert idle.finish is FinishReason.LENGTH
    requests = make_requests(2, replace(FULL, max_new_tokens=480))
    results: list[GenerateResult] = []
    thread = Thread(target=lambda: results.extend(harness.engine.generate(requests)))
    thread.start()
    while thread.is_alive():
        harness.engine.abort()
        time.sleep(0.01)
    check_results(requests, results)
    assert {result.finish for result in results} == {FinishReason.ABORT}
    assert max(len(result.response_ids) for result in results) < 480


@pytest.mark.parametrize("bad_id", [-1, 100])
def test_generate_prompt_id_outside_vocabulary_raises_naming_sample(harness: EngineHarness, bad_id: int) -> None:
    good, bad = make_requests(2, FULL)
    with pytest.raises(RolloutError, match=f"sample {bad.sample_id}: prompt token id {bad_id} is outside .* vocabulary of 100"):
        harness.engine.generate([good, replace(bad, prompt_ids=np.array([5, bad_id], np.int32))])


def test_generate_longer_than_positions_raises_naming_sample_and_numbers(harness: EngineHarness) -> None:
    (request,) = make_requests(1, replace(FULL, max_new_tokens=512))
    with pytest.raises(RolloutError, match=f"sample {request.sample_id}: .* 513 positions, the model has 512"):
        harness.engine.generate([request])


def test_generate_without_requests_returns_nothing(harness: EngineHarness) -> None:
    assert harness.engine.generate([]) == []
