"""One rollout's requests, and what becomes of the answers."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from slime_ppo.data.seeding import derive_seed
from slime_ppo.errors import RolloutError
from slime_ppo.rollout.generate import SampleBuilder, without_aborted
from slime_ppo.types.sample import (
    FinishReason,
    GenerateRequest,
    GenerateResult,
    Prompt,
    Sample,
    SamplingParams,
    Support,
    one_version,
)
from tests.helpers.trainer_parts import NumberTokenizer, ScriptedEngine, make_prompt

SAMPLING = SamplingParams(max_new_tokens=2, stop_token_ids=(3,))
PROMPTS = [make_prompt(index) for index in (40, 41, 42)]


class SupportEngine(ScriptedEngine):
    """Adds the ids in `support`, the same for each token, to every answer; `spoiled` sample ids get `spoiled_ids` instead."""

    def __init__(self, support: list[int], spoiled: int, spoiled_ids: list[int]) -> None:
        super().__init__([])
        self._support, self._spoiled, self._spoiled_ids = support, spoiled, spoiled_ids

    def generate(self, requests: list[GenerateRequest]) -> list[GenerateResult]:  # type: ignore[override]
        return [replace(result, support=self._support_of(result)) for result in super().generate(requests)]

    def _support_of(self, result: GenerateResult) -> Support:
        ids = self._spoiled_ids if result.sample_id == self._spoiled else self._support
        num_tokens = len(result.response_ids)
        return Support(np.array(ids * num_tokens, np.int32), np.full(num_tokens, len(ids), np.int32))


def make_builder(engine: ScriptedEngine | None = None, *, run_seed: int = 5, mask_truncated: bool = False) -> SampleBuilder:
    tokenizer: Any = NumberTokenizer()
    engine = ScriptedEngine([]) if engine is None else engine
    engine.version = 0
    return SampleBuilder(
        engine=engine,
        tokenizer=tokenizer,
        run_seed=run_seed,
        vocab_size=100,
        mask_truncated=mask_truncated,
        restore=lambda: False,
    )


def generate(
    builder: SampleBuilder, prompts: list[Prompt] = PROMPTS, *, rollout_id: int = 2, copies: int = 2, purpose: str = "rollout"
) -> list[Sample]:
    return builder.generate(rollout_id, prompts, SAMPLING, n_samples_per_prompt=copies, purpose=purpose)


def test_generate_two_copies_of_three_prompts_have_unique_ids_and_share_groups() -> None:
    """Rollout 2 comes after 2 x 3 groups of 2 samples each."""
    samples = generate(make_builder())
    assert [sample.sample_id for sample in samples] == [12, 13, 14, 15, 16, 17]
    assert [sample.group_id for sample in samples] == [6, 6, 7, 7, 8, 8]
    assert [sample.trajectory_id for sample in samples] == [12, 13, 14, 15, 16, 17]
    assert [sample.prompt.index for sample in samples] == [40, 40, 41, 41, 42, 42]


def test_generate_ids_from_a_first_group_on_keep_the_random_numbers() -> None:
    plain, shifted = ScriptedEngine([]), ScriptedEngine([])
    generate(make_builder(plain))
    options: dict[str, Any] = {"n_samples_per_prompt": 2, "purpose": "rollout", "first_group_id": 50}
    samples = make_builder(shifted).generate(2, PROMPTS, SAMPLING, **options)
    assert [sample.sample_id for sample in samples] == [100, 101, 102, 103, 104, 105]
    assert [sample.group_id for sample in samples] == [50, 50, 51, 51, 52, 52]
    assert [one.seed for one in shifted.requests[0]] == [one.seed for one in plain.requests[0]]


def test_generate_requests_carry_prompt_sampling_and_the_samples_own_seed() -> None:
    engine = ScriptedEngine([])
    prompts = [replace(prompt, token_ids=np.array([prompt.index], np.int32)) for prompt in PROMPTS]
    generate(make_builder(engine), prompts)
    [requests] = engine.requests
    assert [request.prompt_ids.tolist() for request in requests] == [[40], [40], [41], [41], [42], [42]]
    assert all(request.sampling == SAMPLING for request in requests)
    assert [request.seed for request in requests] == [derive_seed(5, 2, sample_id, 0, "rollout") for sample_id in range(12, 18)]


def test_generate_seeds_differ_by_run_rollout_sample_and_purpose_but_not_by_prompt() -> None:
    def seeds(run_seed: int = 5, **changes: Any) -> list[int]:
        engine = ScriptedEngine([])
        generate(make_builder(engine, run_seed=run_seed), **changes)
        return [request.seed for request in engine.requests[0]]

    usual = seeds()
    assert len(set(usual + seeds(run_seed=6) + seeds(rollout_id=3) + seeds(purpose="eval"))) == 24
    assert seeds(prompts=PROMPTS[::-1]) == usual


def test_generate_answer_becomes_the_sample_unchanged() -> None:
    engine = ScriptedEngine([])
    engine.answer = lambda request: ([60 + request.sample_id - 12, 3], FinishReason.STOP)
    sample = generate(make_builder(engine))[4]
    assert sample.response_ids.tolist() == [64, 3] and sample.response_text == "64 3 "
    assert sample.rollout_log_probs.tolist() == [-0.5, -0.5] and sample.support is None
    assert sample.loss_mask.tolist() == [True, True] and sample.loss_mask.dtype == np.bool_
    assert (sample.finish, sample.weight_versions, sample.reward) == (FinishReason.STOP, one_version(0, 2), None)


@pytest.mark.parametrize(("mask_truncated", "cut_trains"), [(True, False), (False, True)])
def test_generate_mask_truncated_takes_the_tokens_of_cut_samples_only(mask_truncated: bool, cut_trains: bool) -> None:
    finishes = {12: ([7, 8], FinishReason.LENGTH), 13: ([7], FinishReason.ABORT)}
    engine = ScriptedEngine([])
    engine.answer = lambda request: finishes.get(request.sample_id, ([7, 3], FinishReason.STOP))
    cut, aborted, *others = generate(make_builder(engine, mask_truncated=mask_truncated))
    assert cut.loss_mask.tolist() == [cut_trains, cut_trains]
    assert aborted.loss_mask.tolist() == [True]
    assert all(sample.loss_mask.all() for sample in others)


def test_generate_engine_that_swaps_results_breaks_its_contract() -> None:
    class Swapping(ScriptedEngine):
        def generate(self, requests: list[GenerateRequest]) -> list[GenerateResult]:  # type: ignore[override]
            return super().generate(requests)[::-1]

    with pytest.raises(RolloutError, match="returned sample 17 at position 0, expected sample 12"):
        generate(make_builder(Swapping([])))


@pytest.mark.parametrize(
    ("spoiled_ids", "message"),
    [
        ([7, 3, 100], "the support of response token 0 of sample 15 holds id 100"),
        ([7, 3, 9, 9], "the support of response token 0 of sample 15 holds id 9 more than once"),
    ],
)
def test_generate_bad_support_names_the_sample(spoiled_ids: list[int], message: str) -> None:
    builder = make_builder(SupportEngine([7, 3], 15, spoiled_ids))
    restricted = replace(SAMPLING, top_p=0.9)
    with pytest.raises(RolloutError, match=message):
        builder.generate(2, PROMPTS, restricted, n_samples_per_prompt=2, purpose="rollout")


def test_generate_good_support_is_kept_with_the_sample() -> None:
    builder = make_builder(SupportEngine([7, 3], -1, []))
    samples = builder.generate(2, PROMPTS, replace(SAMPLING, top_p=0.9), n_samples_per_prompt=1, purpose="rollout")
    assert all(sample.support is not None and sample.support.ids.tolist() == [7, 3, 7, 3] for sample in samples)


def test_generate_full_log_probs_are_kept_with_the_sample() -> None:
    class Telling(SupportEngine):
        def generate(self, requests: list[GenerateRequest]) -> list[GenerateResult]:
            full = np.array([-0.75, -1.0], np.float32)
            return [replace(result, full_log_probs=full) for result in super().generate(requests)]

    builder = make_builder(Telling([7, 3], -1, []))
    [sample] = builder.generate(2, PROMPTS[:1], replace(SAMPLING, top_p=0.9), n_samples_per_prompt=1, purpose="rollout")
    assert sample.full_log_probs is not None and sample.full_log_probs.tolist() == [-0.75, -1.0]


def test_without_aborted_leaves_them_out_and_keeps_the_order() -> None:
    samples = generate(make_builder())
    samples[1] = replace(samples[1], finish=FinishReason.ABORT)
    samples[4] = replace(samples[4], finish=FinishReason.LENGTH)
    assert [sample.sample_id for sample in without_aborted(samples, 0)] == [12, 14, 15, 16, 17]


def test_without_aborted_all_aborted_raises() -> None:
    samples = [replace(sample, finish=FinishReason.ABORT) for sample in generate(make_builder())]
    with pytest.raises(RolloutError, match="all 6 samples of the rollout were aborted"):
        without_aborted(samples, 0)


def test_without_aborted_stale_weights_name_the_sample_and_both_versions() -> None:
    samples = generate(make_builder())
    samples[3] = replace(samples[3], weight_versions=one_version(1, 2))
    with pytest.raises(
        RolloutError, match="sample 15 was generated by weight version 1 .response tokens 0 to 2., the trainer is at 0"
    ):
        without_aborted(samples, 0)


class LosingEngine(ScriptedEngine):
    """Leaves out every second request of a batch, once; a batch of one is answered."""

    def generate(self, requests: list[GenerateRequest]) -> list[GenerateResult]:  # type: ignore[override]
        results = super().generate(requests)
        if len(requests) == 1:
            return results
        none = np.zeros(0, np.int32)
        lost = {"response_ids": none, "log_probs": np.zeros(0, np.float32), "finish": FinishReason.ABORT}
        return [
            replace(result, **lost, weight_versions=one_version(0, 0)) if index % 2 else result
            for index, result in enumerate(results)
        ]


def test_generate_what_a_lost_engine_left_out_is_asked_again_until_all_is_there() -> None:
    """Six requests: three are lost, then one of these three. No sample is lost, doubled, or drawn with another seed."""
    engine, restored = LosingEngine([]), []

    def restore() -> bool:
        restored.append(len(engine.requests))
        return True

    samples = generate(replace(make_builder(engine), restore=restore))
    assert [sample.sample_id for sample in samples] == [12, 13, 14, 15, 16, 17]
    assert all(sample.finish is FinishReason.STOP for sample in samples)
    assert [[request.sample_id for request in asked] for asked in engine.requests] == [[12, 13, 14, 15, 16, 17], [13, 15, 17], [15]]
    assert restored == [0, 1, 2]  # before the first question, too: it may have died since the push
    assert len({request.seed for asked in engine.requests for request in asked if request.sample_id == 15}) == 1


def test_generate_aborted_on_purpose_is_not_asked_again() -> None:
    engine = LosingEngine([])
    samples = generate(make_builder(engine))
    assert [sample.finish for sample in samples].count(FinishReason.ABORT) == 3
    assert len(engine.requests) == 1
