"""Requests as a server takes them, and its answers as results. Answers are those of SGLang 0.5.23, shortened."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from slime_ppo.errors import RolloutError
from slime_ppo.rollout.engine import check_results
from slime_ppo.rollout.sglang.answers import aborted_result, check_servable, read_answer, request_body
from slime_ppo.types.sample import FinishReason, GenerateRequest, SamplingParams, VersionSpan

FULL = SamplingParams(max_new_tokens=3, temperature=0.7)
RESTRICTED = replace(FULL, top_p=0.9, stop_token_ids=(3, 9))


def _request(sampling: SamplingParams, seed: int = 5) -> GenerateRequest:
    return GenerateRequest(17, np.array([4, 8], np.int32), seed, sampling)


def _answer(**meta: Any) -> dict[str, Any]:
    """Three tokens, with and without support, of which the last one is a stop token."""
    return {
        "output_ids": [6, 7, 9],
        "meta_info": {
            "finish_reason": {"type": "stop", "matched": 9},
            "output_token_logprobs": [[-0.5, 6, None], [-1.5, 7, None], [-2.5, 9, None]],
            "output_token_sampling_mask": [[7, 6], [7], [5, 4, 9]],
            "output_token_sampling_logprobs": [-0.25, 0.0, -1.25],
            "weight_versions": [{"version": "4", "start": 0, "end": 3}],
            "cached_tokens": 1,
        }
        | meta,
    }


def _without(name: str) -> dict[str, Any]:
    answer = deepcopy(_answer())
    del answer["meta_info"][name]
    return answer


def test_request_body_unrestricted_asks_for_log_probs_and_ignores_models_end_tokens() -> None:
    assert request_body(_request(FULL), "r", vocab_size=100, deterministic=False) == {
        "rid": "r",
        "input_ids": [4, 8],
        "sampling_params": {"max_new_tokens": 3, "temperature": 0.7, "ignore_eos": True},
        "return_logprob": True,
    }


def test_request_body_restricted_asks_for_support_with_finite_top_k() -> None:
    body = request_body(_request(RESTRICTED), "r", vocab_size=100, deterministic=False)
    assert body["sampling_params"] == {
        "max_new_tokens": 3,
        "temperature": 0.7,
        "stop_token_ids": [3, 9],
        "top_p": 0.9,
        "top_k": 100,
        "min_p": 0.0,
    }
    assert body["return_sampling_mask"] is True


@pytest.mark.parametrize(("top_k", "sent"), [(5, 5), (1, 1), (1000, 100)])
def test_request_body_top_k_is_at_most_the_vocabulary(top_k: int, sent: int) -> None:
    body = request_body(_request(replace(FULL, top_k=top_k)), "r", vocab_size=100, deterministic=False)
    assert body["sampling_params"]["top_k"] == sent


def test_request_body_greedy_asks_for_no_support() -> None:
    body = request_body(_request(replace(RESTRICTED, temperature=0.0)), "r", vocab_size=100, deterministic=False)
    assert "return_sampling_mask" not in body
    assert body["return_logprob"] is True


@pytest.mark.parametrize(("seed", "sent"), [(5, 5), (2**63, 0), (2**64 + 7, 7)])
def test_request_body_seed_is_sent_to_deterministic_servers_alone(seed: int, sent: int) -> None:
    request = _request(FULL, seed)
    assert request_body(request, "r", vocab_size=100, deterministic=True)["sampling_params"]["sampling_seed"] == sent
    assert "sampling_seed" not in request_body(request, "r", vocab_size=100, deterministic=False)["sampling_params"]


def test_check_servable_min_p_with_seeds_raises() -> None:
    requests = [_request(replace(FULL, min_p=0.1))]
    check_servable(requests, vocab_size=100, deterministic=False)
    check_servable([_request(replace(FULL, min_p=0.1, temperature=0.0))], vocab_size=100, deterministic=True)
    with pytest.raises(RolloutError, match=r"sample 17: min_p 0.1 with --sglang-deterministic"):
        check_servable(requests, vocab_size=100, deterministic=True)


@pytest.mark.parametrize(("top_k", "served"), [(0, False), (4096, True), (4097, False)])
def test_check_servable_support_beyond_servers_limit_raises(top_k: int, served: bool) -> None:
    requests = [_request(replace(RESTRICTED, top_k=top_k))]
    check_servable(requests, vocab_size=4096, deterministic=False)
    check_servable([_request(FULL)], vocab_size=100_000, deterministic=False)
    if served:
        check_servable(requests, vocab_size=100_000, deterministic=False)
    else:
        with pytest.raises(RolloutError, match=rf"sample 17: top_k {top_k} on a vocabulary of 100000: .* at most 4096 tokens"):
            check_servable(requests, vocab_size=100_000, deterministic=False)


def test_read_answer_restricted_takes_log_probs_of_the_support() -> None:
    request = _request(RESTRICTED)
    result = read_answer(request, _answer(), versions={4})
    check_results([request], [result])
    assert result.finish is FinishReason.STOP
    assert result.log_probs.tolist() == [-0.25, 0.0, -1.25]
    assert result.support is not None
    assert result.support.ids.tolist() == [7, 6, 7, 5, 4, 9]
    assert result.support.counts.tolist() == [2, 1, 3]
    assert (result.support.ids.dtype, result.support.counts.dtype, result.log_probs.dtype) == (np.int32, np.int32, np.float32)
    assert result.num_cached_tokens == 1


def test_read_answer_unrestricted_takes_log_probs_of_the_vocabulary() -> None:
    request = _request(replace(FULL, stop_token_ids=(9,)))
    result = read_answer(request, _answer(), versions={4})
    check_results([request], [result])
    assert result.log_probs.tolist() == [-0.5, -1.5, -2.5]
    assert result.support is None


def test_read_answer_versions_come_as_spans() -> None:
    spans = [{"version": "4", "start": 0, "end": 1}, {"version": "12", "start": 1, "end": 3}]
    result = read_answer(_request(RESTRICTED), _answer(weight_versions=spans), versions={4, 12})
    assert result.weight_versions == (VersionSpan(4, 0, 1), VersionSpan(12, 1, 3))


@pytest.mark.parametrize("version", ["default", "5", "04"])
def test_read_answer_version_that_was_never_pushed_raises(version: str) -> None:
    spans = [{"version": version, "start": 0, "end": 3}]
    with pytest.raises(RolloutError, match=f"sample 17: .* version '{version}', which were never pushed"):
        read_answer(_request(RESTRICTED), _answer(weight_versions=spans), versions={4})


@pytest.mark.parametrize("name", ["output_token_sampling_mask", "output_token_sampling_logprobs", "weight_versions"])
def test_read_answer_without_a_field_raises_naming_it_and_the_router(name: str) -> None:
    with pytest.raises(RolloutError, match=f"sample 17: .* without {name}.*sglang-router 0.3.2"):
        read_answer(_request(RESTRICTED), _without(name), versions={4})


def test_read_answer_length_with_fewer_tokens_than_asked_raises() -> None:
    answer = _answer(finish_reason={"type": "length", "length": 3})
    with pytest.raises(RolloutError, match="sample 17: .* ended after 3 of 5 tokens without a stop token; its --context-length"):
        read_answer(_request(replace(RESTRICTED, max_new_tokens=5)), answer, versions={4})


def test_read_answer_length_whose_last_token_is_a_stop_is_a_stop() -> None:
    answer = _answer(finish_reason={"type": "length", "length": 3})
    assert read_answer(_request(RESTRICTED), answer, versions={4}).finish is FinishReason.STOP
    free = replace(RESTRICTED, stop_token_ids=())
    assert read_answer(_request(free), answer, versions={4}).finish is FinishReason.LENGTH


def test_read_answer_stop_at_a_token_that_is_no_stop_raises() -> None:
    with pytest.raises(RolloutError, match=r"sample 17: .* expected one of the stop tokens \[3\] as the last one"):
        read_answer(_request(replace(RESTRICTED, stop_token_ids=(3,))), _answer(), versions={4})


def test_read_answer_log_probs_of_other_tokens_raises() -> None:
    answer = _answer(output_token_logprobs=[[-0.5, 6, None], [-1.5, 8, None], [-2.5, 9, None]])
    with pytest.raises(RolloutError, match="sample 17: .* log-probs of 3 other tokens"):
        read_answer(_request(replace(FULL, stop_token_ids=(9,))), answer, versions={4})


def test_read_answer_supports_of_another_length_raises() -> None:
    answer = _answer(output_token_sampling_mask=[[7, 6], [7]])
    with pytest.raises(RolloutError, match="sample 17: .* 2 supports and 3 log-probs for 3 output_ids"):
        read_answer(_request(RESTRICTED), answer, versions={4})


def test_read_answer_aborted_keeps_whole_partial_output() -> None:
    request = _request(replace(RESTRICTED, max_new_tokens=9, stop_token_ids=()))
    result = read_answer(request, _answer(finish_reason={"type": "abort", "message": "Aborted"}), versions={4})
    check_results([request], [result])
    assert result.finish is FinishReason.ABORT
    assert result.response_ids.tolist() == [6, 7, 9]


@pytest.mark.parametrize("name", ["output_token_sampling_mask", "weight_versions", "cached_tokens"])
def test_read_answer_aborted_with_less_than_its_tokens_need_comes_back_empty(name: str) -> None:
    request = _request(replace(RESTRICTED, max_new_tokens=9))
    answer = _without(name)
    answer["meta_info"]["finish_reason"] = {"type": "abort", "message": "Abort in waiting queue"}
    result = read_answer(request, answer, versions={3, 4})
    check_results([request], [result])
    assert len(result.response_ids) == 0
    assert result.weight_versions == (VersionSpan(4, 0, 0),)


@pytest.mark.parametrize("sampling", [FULL, RESTRICTED, replace(RESTRICTED, temperature=0.0)])
def test_aborted_result_keeps_the_engine_contract(sampling: SamplingParams) -> None:
    request = _request(sampling)
    check_results([request], [aborted_result(request, 4)])
