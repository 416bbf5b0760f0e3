"""Evaluation of several data sets: who is asked what, which random numbers and ids, which metrics and records."""

from typing import Any

import pytest

from slime_ppo.errors import RolloutError
from slime_ppo.rewards.runner import RewardOutcome
from slime_ppo.types.sample import FinishReason, GenerateRequest, Sample
from tests.helpers.configs import make_config
from tests.helpers.trainer_parts import Parts

SAMPLED: dict[str, Any] = {
    "eval__eval_temperature": 0.6, "eval__eval_top_p": 0.9, "eval__eval_top_k": 7, "eval__eval_min_p": 0.01,
    "eval__eval_n_samples_per_prompt": 2, "eval__eval_max_response_len": 9,
}  # fmt: skip


def make_parts(eval_sets: dict[str, int], **values: Any) -> Parts:
    parts = Parts(make_config(**values), eval_sets=eval_sets)
    parts.engine.version = 4
    return parts


def evaluate(parts: Parts, rollout_id: int = 0) -> dict[str, float]:
    return parts.trainer_parts().evaluation.run(rollout_id, 4)


def requests_of(parts: Parts) -> list[GenerateRequest]:
    return [request for requests in parts.engine.requests for request in requests]


def test_run_asks_every_data_set_with_the_sampler_of_section_eval_alone() -> None:
    parts = make_parts(
        {"math": 2, "code": 3},
        **SAMPLED,
        rollout__rollout_temperature=0.9, rollout__rollout_top_p=0.5, rollout__rollout_top_k=3, rollout__rollout_min_p=0.2,
        rollout__n_samples_per_prompt=5, rollout__rollout_max_response_len=3,
    )  # fmt: skip
    evaluate(parts)
    assert [len(requests) for requests in parts.engine.requests] == [4, 6]
    [sampling] = {request.sampling for request in requests_of(parts)}
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.6, 0.9, 7, 0.01)
    assert (sampling.max_new_tokens, sampling.stop_token_ids) == (9, (3,))


def test_run_is_greedy_and_unrestricted_by_default_whatever_the_rollouts_are() -> None:
    parts = make_parts({"math": 1}, rollout__rollout_top_p=0.5, rollout__rollout_top_k=3, rollout__rollout_min_p=0.2)
    evaluate(parts)
    [request] = requests_of(parts)
    assert request.sampling.greedy and not request.sampling.restricted


def test_run_top_k_of_minus_one_is_off() -> None:
    parts = make_parts({"math": 1}, eval__eval_temperature=1.0, eval__eval_top_k=-1)
    evaluate(parts)
    assert requests_of(parts)[0].sampling.top_k == 0


def test_run_sample_ids_are_unique_over_data_sets_and_rollouts() -> None:
    parts = make_parts({"math": 2, "code": 3}, **SAMPLED)
    evaluate(parts, 0)
    evaluate(parts, 1)
    assert [request.sample_id for request in requests_of(parts)] == list(range(20))


def test_run_seeds_differ_between_data_sets_and_do_not_depend_on_the_others() -> None:
    def seeds(eval_sets: dict[str, int]) -> list[list[int]]:
        parts = make_parts(eval_sets, **SAMPLED)
        evaluate(parts, 3)
        return [[request.seed for request in requests] for requests in parts.engine.requests]

    math, code = seeds({"math": 2, "code": 2})
    assert len({*math, *code}) == 8
    assert seeds({"more": 5, "code": 2})[1] == code


def test_run_metrics_of_each_data_set_have_their_values_by_hand() -> None:
    """math: two prompts of two answers with rewards 1, 0 and 0, 0; code: one prompt with 1, 1 of which one is cut."""
    parts = make_parts({"math": 2, "code": 1}, **SAMPLED)
    answers = {1: ([7, 8, 7, 8], FinishReason.LENGTH), 4: ([7] * 9, FinishReason.LENGTH)}
    parts.engine.answer = lambda request: answers.get(request.sample_id, ([7, 3], FinishReason.STOP))
    rewards = [1.0, 0.0, 0.0, 0.0, 1.0, 1.0]
    parts.rewards._rewarded = lambda sample: sample.with_reward(rewards[sample.sample_id])  # type: ignore[method-assign]
    assert evaluate(parts) == pytest.approx(
        {
            "eval/math": 0.25,
            "eval/math_response_len": 2.5,
            "eval/math_truncated_ratio": 0.25,
            "eval/math_pass@1": 0.25,
            "eval/math_pass@2": 0.5,
            "eval/code": 1.0,
            "eval/code_response_len": 5.5,
            "eval/code_truncated_ratio": 0.5,
            "eval/code_pass@1": 1.0,
            "eval/code_pass@2": 1.0,
        }
    )


def test_run_pass_threshold_is_the_one_given() -> None:
    parts = make_parts({"math": 1}, **SAMPLED, reward__pass_threshold=1.5)
    assert evaluate(parts)["eval/math_pass@2"] == 0.0


def test_run_records_some_answers_of_each_data_set_by_name() -> None:
    parts = make_parts({"math": 3, "code": 1}, tracking__num_logged_samples=2)
    evaluate(parts, 5)
    shown = [(rollout_id, [(one.data_set, one.kind, one.sample_id) for one in table]) for rollout_id, table in parts.tracker.tables]
    assert shown == [(5, [("math", "eval", 20), ("math", "eval", 21)]), (5, [("code", "eval", 23)])]


def test_run_data_set_whose_answers_were_all_dropped_has_no_metrics() -> None:
    parts = make_parts({"math": 1, "code": 1})
    parts.rewards.dropped = {0}
    assert {name.split("_")[0] for name in evaluate(parts)} == {"eval/code"}


def test_run_answers_of_another_weight_version_are_an_error() -> None:
    parts = make_parts({"math": 1})
    with pytest.raises(RolloutError, match="generated by weight version 4 .* the trainer is at 5"):
        parts.trainer_parts().evaluation.run(0, 5)


def test_run_looks_after_the_processes_while_it_scores() -> None:
    class Dead(Exception):
        pass

    def dead() -> None:
        raise Dead

    class Scoring:
        def score(self, samples: list[Sample], *, check: Any) -> RewardOutcome:
            check()
            raise AssertionError("check was not called")

    parts = make_parts({"math": 1})
    evaluation = parts.trainer_parts().evaluation
    object.__setattr__(evaluation, "check_alive", dead)
    object.__setattr__(evaluation, "rewards", Scoring())
    with pytest.raises(Dead):
        evaluation.run(0, 4)
