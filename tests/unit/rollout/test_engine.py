"""The checks that hold any engine to its contract: each broken rule has its own message, naming the sample."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from slime_ppo.errors import RolloutError
from slime_ppo.rollout.engine import check_requests, check_results
from slime_ppo.types.sample import FinishReason, GenerateRequest, GenerateResult, SamplingParams, Support, VersionSpan, one_version

SAMPLING = SamplingParams(max_new_tokens=4, stop_token_ids=(3,))
REQUEST = GenerateRequest(sample_id=41, prompt_ids=np.array([5, 6], np.int32), seed=1, sampling=SAMPLING)
RESULT = GenerateResult(
    sample_id=41,
    response_ids=np.array([7, 8, 3], np.int32),
    log_probs=np.array([-1.0, -2.0, -0.5], np.float32),
    support=None,
    finish=FinishReason.STOP,
    weight_versions=one_version(0, 3),
)
TOP_K = replace(REQUEST, sampling=replace(SAMPLING, top_k=2))
SUPPORT = Support(ids=np.array([7, 9, 8, 3, 4], np.int32), counts=np.array([2, 1, 2], np.int32))


def _ids(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def test_engine_module_import_needs_no_torch() -> None:
    code = "import sys, slime_ppo.rollout.engine, slime_ppo.weight_sync.base; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_check_requests_good_request_passes() -> None:
    check_requests([REQUEST, TOP_K], vocab_size=10, max_positions=6)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (replace(REQUEST, prompt_ids=_ids()), r"prompt_ids is int32 \[0\], expected integers \[P\] with P >= 1"),
        (replace(REQUEST, prompt_ids=np.array([1.0])), r"prompt_ids is float64 \[1\]"),
        (replace(REQUEST, prompt_ids=_ids(4, 10)), "prompt token id 10 is outside the model's vocabulary of 10"),
        (replace(REQUEST, prompt_ids=_ids(-2)), "prompt token id -2 is outside"),
        (replace(REQUEST, seed=-1), "seed is -1"),
        (
            replace(REQUEST, prompt_ids=_ids(1, 2, 3)),
            r"prompt of 3 tokens and up to 4 response tokens need 7 positions, the model has 6",
        ),
        (replace(REQUEST, sampling=replace(SAMPLING, max_new_tokens=0)), "max_new_tokens is 0"),
        (replace(REQUEST, sampling=replace(SAMPLING, temperature=-0.5)), "temperature is -0.5"),
        (replace(REQUEST, sampling=replace(SAMPLING, temperature=float("nan"))), "temperature is nan"),
        (replace(REQUEST, sampling=replace(SAMPLING, top_p=0.0)), "top_p is 0.0"),
        (replace(REQUEST, sampling=replace(SAMPLING, top_p=1.5)), "top_p is 1.5"),
        (replace(REQUEST, sampling=replace(SAMPLING, top_k=-1)), "top_k is -1"),
        (replace(REQUEST, sampling=replace(SAMPLING, min_p=1.5)), "min_p is 1.5"),
        (replace(REQUEST, sampling=replace(SAMPLING, min_p=-0.1)), "min_p is -0.1"),
        (replace(REQUEST, sampling=replace(SAMPLING, stop_token_ids=(3, 10))), r"stop_token_ids \(3, 10\) are not all inside"),
    ],
)
def test_check_requests_bad_request_raises_naming_sample(request_: GenerateRequest, message: str) -> None:
    with pytest.raises(RolloutError, match=f"^sample 41: .*{message}"):
        check_requests([request_], vocab_size=10, max_positions=6)


@pytest.mark.parametrize(
    ("request_", "result"),
    [
        (REQUEST, RESULT),
        (REQUEST, replace(RESULT, response_ids=_ids(7, 8, 9), finish=FinishReason.LENGTH)),
        (
            REQUEST,
            replace(
                RESULT,
                response_ids=_ids(),
                log_probs=np.zeros(0, np.float32),
                finish=FinishReason.ABORT,
                weight_versions=one_version(0, 0),
            ),
        ),
        (REQUEST, replace(RESULT, weight_versions=(VersionSpan(4, 0, 2), VersionSpan(5, 2, 3)))),
        (TOP_K, replace(RESULT, support=SUPPORT)),
        (replace(TOP_K, sampling=replace(SAMPLING, top_k=2, temperature=0.0)), RESULT),
    ],
)
def test_check_results_good_result_passes(request_: GenerateRequest, result: GenerateResult) -> None:
    check_results([request_], [result])


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (replace(RESULT, response_ids=np.array([7.0, 8.0, 3.0])), "response_ids float64"),
        (replace(RESULT, log_probs=RESULT.log_probs[:2]), r"\[2\] log-probs for \[3\] response tokens"),
        (replace(RESULT, response_ids=_ids(7, 8, 9, 9, 3), log_probs=np.zeros(5, np.float32)), "5 tokens, asked for at most 4"),
        (replace(RESULT, response_ids=_ids(), log_probs=np.zeros(0, np.float32)), "no token with finish"),
        (replace(RESULT, log_probs=np.array([-1, np.nan, -1], np.float32)), "log-prob nan at response token 1"),
        (replace(RESULT, log_probs=np.array([-1, -1, -np.inf], np.float32)), "log-prob -inf at response token 2"),
        (replace(RESULT, log_probs=np.array([0.5, -1, -1], np.float32)), "log-prob 0.5 at response token 0"),
        (replace(RESULT, weight_versions=one_version(-1, 3)), "weight version -1"),
        (replace(RESULT, weight_versions=()), "weight versions .* \\[\\] for 3 response tokens"),
        (
            replace(RESULT, weight_versions=(VersionSpan(0, 0, 1), VersionSpan(1, 2, 3))),
            "weight versions .* expected spans without gaps",
        ),
        (replace(RESULT, weight_versions=one_version(0, 2)), r"weight versions .* \[\(0, 0, 2\)\] for 3 response tokens"),
        (replace(RESULT, finish="stop?"), "finish 'stop\\?'"),
        (replace(RESULT, response_ids=_ids(7, 3, 8)), "tokens after the stop token 3 at response token 1 of 3"),
        (replace(RESULT, response_ids=_ids(7, 8, 9)), r"finish stop with last token \[9\]"),
        (replace(RESULT, finish=FinishReason.LENGTH), r"finish length with last token \[3\]"),
        (replace(RESULT, support=SUPPORT), "a support although the sampler is not restricted"),
    ],
)
def test_check_results_broken_result_raises_naming_sample(result: GenerateResult, message: str) -> None:
    with pytest.raises(RolloutError, match=f"^sample 41: the engine returned {message}"):
        check_results([REQUEST], [result])


@pytest.mark.parametrize(
    ("support", "message"),
    [
        (None, r"no support although the sampler is restricted \(top_p 1.0, top_k 2, min_p 0.0\)"),
        (replace(SUPPORT, counts=_ids(2, 3)), r"support counts \[2\] that add up to 5 for 3 response tokens"),
        (replace(SUPPORT, counts=_ids(2, 1, 1)), r"support counts \[3\] that add up to 4 for 3 response tokens and 5 support ids"),
        (replace(SUPPORT, counts=_ids(1, 1, 3)), "supports of 1 to 3 tokens, expected 1 to 2"),
        (replace(SUPPORT, counts=_ids(3, 0, 2)), "supports of 0 to 3 tokens"),
        (replace(SUPPORT, ids=_ids(7, 9, 6, 3, 4)), "token 8 at response token 1, which is 0 times in its support"),
        (replace(SUPPORT, ids=_ids(7, 7, 8, 3, 4)), "token 7 at response token 0, which is 2 times in its support"),
    ],
)
def test_check_results_broken_support_raises_naming_sample(support: Support | None, message: str) -> None:
    with pytest.raises(RolloutError, match=f"^sample 41: the engine returned {message}"):
        check_results([TOP_K], [replace(RESULT, support=support)])


@pytest.mark.parametrize(
    ("full", "message"),
    [
        ([-1.0, -2.0], r"\[2\] log-probs over the full vocabulary, expected \[3\]"),
        ([-1.0, np.nan, -1.0], "log-prob nan over the full vocabulary and -2.0 over the support at response token 1"),
        ([-1.0, -2.0, -0.4], "log-prob -0.4.* over the full vocabulary and -0.5 over the support at response token 2"),
    ],
)
def test_check_results_broken_full_log_probs_raise_naming_sample(full: list[float], message: str) -> None:
    good = replace(RESULT, support=SUPPORT, full_log_probs=np.array([-1.5, -2.0, -0.9], np.float32))
    check_results([TOP_K], [good])
    with pytest.raises(RolloutError, match=f"^sample 41: .*{message}"):
        check_results([TOP_K], [replace(good, full_log_probs=np.array(full, np.float32))])


def test_check_results_full_log_probs_of_an_unrestricted_sampler_are_refused() -> None:
    with pytest.raises(RolloutError, match="sample 41: .*over the full vocabulary twice: the sampler is not restricted"):
        check_results([REQUEST], [replace(RESULT, full_log_probs=RESULT.log_probs)])


def test_check_results_min_p_alone_is_a_restriction() -> None:
    request = replace(REQUEST, sampling=replace(SAMPLING, min_p=0.1))
    check_results([request], [replace(RESULT, support=SUPPORT)])
    with pytest.raises(RolloutError, match=r"no support .* min_p 0.1"):
        check_results([request], [RESULT])


def test_check_results_wrong_number_of_results_raises_with_both_numbers() -> None:
    with pytest.raises(RolloutError, match="1 results for 2 requests"):
        check_results([REQUEST, replace(REQUEST, sample_id=42)], [RESULT])


def test_check_results_wrong_order_raises_naming_both_samples() -> None:
    other = replace(REQUEST, sample_id=42)
    with pytest.raises(RolloutError, match="sample 41 at position 0, expected sample 42"):
        check_results([other, REQUEST], [RESULT, replace(RESULT, sample_id=42)])
