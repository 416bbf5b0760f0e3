"""The decode loop: left padding, rows that end at different steps, abort, and how many forward passes it takes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from slime_ppo.rollout.embedded.decode import decode
from slime_ppo.rollout.embedded.model import load_causal_lm
from slime_ppo.rollout.engine import check_results
from slime_ppo.types.sample import FinishReason, GenerateRequest, GenerateResult, SamplingParams, one_version
from tests.helpers.engine_harness import ReferenceModel, joint_support, make_requests, race_scores
from tests.helpers.tiny_llama import make_tiny_llama

SAMPLING = SamplingParams(max_new_tokens=10)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    folder = make_tiny_llama(tmp_path_factory.mktemp("tiny"), max_position=24)
    return load_causal_lm(folder, dtype="float32", device="cpu", trust_remote_code=False)


@contextmanager
def _counted(model: PreTrainedModel) -> Iterator[list[tuple[int, ...]]]:
    """Shapes of the token ids of every forward pass."""
    shapes: list[tuple[int, ...]] = []
    handle = model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    yield shapes
    handle.remove()


def _decode(model: PreTrainedModel, requests: list[GenerateRequest]) -> list[GenerateResult]:
    results = decode(model, requests, weight_version=3, aborted=lambda: False)
    check_results(requests, results)
    return results


def test_decode_padded_batch_log_probs_equal_single_rows(model: PreTrainedModel) -> None:
    requests = make_requests(6, SAMPLING)
    for request, together in zip(requests, _decode(model, requests), strict=True):
        (alone,) = _decode(model, [request])
        np.testing.assert_array_equal(alone.response_ids, together.response_ids)
        np.testing.assert_allclose(alone.log_probs, together.log_probs, atol=2e-5, rtol=0)


@pytest.mark.parametrize("top_k", [0, 20])
def test_decode_tokens_win_the_race_of_their_seed_under_an_independent_forward(tmp_path: Path, top_k: int) -> None:
    folder = make_tiny_llama(tmp_path, max_position=24)
    sampling = replace(SAMPLING, top_k=top_k)
    requests = make_requests(6, sampling)
    requests = [
        replace(r, sampling=replace(sampling, max_new_tokens=limit)) for r, limit in zip(requests, range(5, 11), strict=True)
    ]
    served = load_causal_lm(folder, dtype="float32", device="cpu", trust_remote_code=False)
    reference = ReferenceModel(folder)
    for request, result in zip(requests, _decode(served, requests), strict=True):
        full = np.exp(reference.log_probs(request.prompt_ids, result.response_ids, temperature=1.0))
        for position, (token, probs) in enumerate(zip(result.response_ids, full, strict=True)):
            scores = race_scores(request, probs, position)
            support = joint_support(probs, top_k=top_k, top_p=1.0)
            assert scores[token] >= scores[support].max() - 1e-4


def test_decode_runs_one_prefill_and_one_step_per_further_token(model: PreTrainedModel) -> None:
    with _counted(model) as shapes:
        _decode(model, make_requests(3, SAMPLING))
    assert shapes == [(3, 9), *[(3, 1)] * 9]


def test_decode_stops_when_every_row_is_done(model: PreTrainedModel) -> None:
    requests = make_requests(3, SAMPLING)
    stops = tuple({int(result.response_ids[2]) for result in _decode(model, requests)})
    limited = [replace(r, sampling=replace(SAMPLING, stop_token_ids=stops)) for r in requests]
    with _counted(model) as shapes:
        results = _decode(model, limited)
    assert {result.finish for result in results} == {FinishReason.STOP}
    assert len(shapes) == max(len(result.response_ids) for result in results) <= 3


def test_decode_rows_that_are_done_do_not_change_the_others(model: PreTrainedModel) -> None:
    requests = make_requests(4, SAMPLING)
    whole = _decode(model, requests)
    cut = [replace(r, sampling=replace(SAMPLING, max_new_tokens=limit)) for r, limit in zip(requests, (1, 10, 4, 7), strict=True)]
    for result, before, limit in zip(_decode(model, cut), whole, (1, 10, 4, 7), strict=True):
        np.testing.assert_array_equal(result.response_ids, before.response_ids[:limit])
        np.testing.assert_array_equal(result.log_probs, before.log_probs[:limit])


def test_decode_stop_token_drawn_after_the_limit_is_ignored(model: PreTrainedModel) -> None:
    """The batch goes on for other rows; what a row that reached its limit draws there must not turn LENGTH into STOP."""
    requests = make_requests(2, SAMPLING)
    tokens = _decode(model, requests)[0].response_ids
    late = next(int(token) for token in tokens[3:] if token not in tokens[:3])
    requests[0] = replace(requests[0], sampling=replace(SAMPLING, max_new_tokens=3, stop_token_ids=(late,)))
    result = _decode(model, requests)[0]
    assert result.finish is FinishReason.LENGTH
    np.testing.assert_array_equal(result.response_ids, tokens[:3])


def test_decode_position_ids_count_real_tokens_only(model: PreTrainedModel) -> None:
    """Rotary positions are relative, so that a constant offset by the padding would not show in any log-prob."""
    positions: list[list[list[int]]] = []
    handle = model.register_forward_pre_hook(
        lambda module, args, kwargs: positions.append(kwargs["position_ids"].tolist()), with_kwargs=True
    )
    first, second = make_requests(2, replace(SAMPLING, max_new_tokens=2))
    prompts = (np.array([9, 8, 7, 6], np.int32), np.array([5], np.int32))
    _decode(model, [replace(r, prompt_ids=ids) for r, ids in zip((first, second), prompts, strict=True)])
    handle.remove()
    assert positions == [[[0, 1, 2, 3], [0, 0, 0, 0]], [[4], [1]]]


def test_decode_supports_of_rows_of_different_length_stay_with_their_row(model: PreTrainedModel) -> None:
    sampling = replace(SAMPLING, top_p=0.7)
    requests = make_requests(4, sampling)
    limits = (2, 10, 1, 6)
    cut = [replace(r, sampling=replace(sampling, max_new_tokens=limit)) for r, limit in zip(requests, limits, strict=True)]
    for request, result in zip(cut, _decode(model, cut), strict=True):
        (alone,) = _decode(model, [request])
        assert result.support is not None and alone.support is not None
        np.testing.assert_array_equal(result.support.counts, alone.support.counts)
        np.testing.assert_array_equal(result.support.ids, alone.support.ids)
        assert result.support.ids.dtype == result.support.counts.dtype == np.int32


def test_decode_row_beyond_positions_of_a_longer_batch_is_served(model: PreTrainedModel) -> None:
    """A row with a long prompt and few tokens goes on past the model's 24 positions while a short one finishes."""
    long, short = make_requests(2, SAMPLING)
    long = replace(long, prompt_ids=np.arange(4, 26, dtype=np.int32), sampling=replace(SAMPLING, max_new_tokens=2))
    short = replace(short, prompt_ids=np.array([5], np.int32), sampling=replace(SAMPLING, max_new_tokens=23))
    results = _decode(model, [long, short])
    assert [len(result.response_ids) for result in results] == [2, 23]
    np.testing.assert_array_equal(results[0].response_ids, _decode(model, [long])[0].response_ids)


@pytest.mark.parametrize("num_steps", [0, 3])
def test_decode_aborted_after_n_steps_returns_n_tokens(model: PreTrainedModel, num_steps: int) -> None:
    asked = iter([False] * num_steps + [True])
    requests = make_requests(2, replace(SAMPLING, top_k=5))
    requests[1] = replace(requests[1], sampling=replace(requests[1].sampling, max_new_tokens=2))
    results = decode(model, requests, weight_version=3, aborted=lambda: next(asked))
    check_results(requests, results)
    assert [len(result.response_ids) for result in results] == [num_steps, min(num_steps, 2)]
    assert results[0].finish is FinishReason.ABORT
    assert results[1].finish is (FinishReason.LENGTH if num_steps else FinishReason.ABORT)


def test_decode_weights_updated_in_place_are_seen(model: PreTrainedModel) -> None:
    """Results of inference mode must not freeze the parameters against later pushes."""
    (request,) = make_requests(1, SAMPLING)
    before = _decode(model, [request])[0]
    with torch.no_grad():
        model.model.norm.weight.mul_(2.0)
    after = _decode(model, [request])[0]
    with torch.no_grad():
        model.model.norm.weight.div_(2.0)
    assert not np.array_equal(before.log_probs, after.log_probs)
    np.testing.assert_array_equal(_decode(model, [request])[0].log_probs, before.log_probs)


def test_decode_reports_given_weight_version(model: PreTrainedModel) -> None:
    results = _decode(model, make_requests(2, SAMPLING))
    assert [result.weight_versions for result in results] == [one_version(3, len(result.response_ids)) for result in results]
