"""Prompts in, rewarded samples out: one rollout's requests, answers and rewards."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np

from slime_ppo.data.seeding import derive_seed
from slime_ppo.data.tokenizer import TextTokenizer
from slime_ppo.errors import RolloutError
from slime_ppo.ppo_utils.support_checks import validate_support
from slime_ppo.rollout.engine import RolloutEngine, check_results
from slime_ppo.types.sample import FinishReason, GenerateRequest, GenerateResult, Prompt, Sample, SamplingParams


@dataclass(frozen=True)
class SampleBuilder:
    """How prompts become samples.

    `mask_truncated`: a response cut by length trains on no token (--truncation-policy mask). Aborted answers never train:
    they are left out and counted by the caller. `restore` brings an engine that was lost back with the same weights, and is False
    when it was not lost; it raises when there is no hope. `answering` is entered around every call of the engine.
    """

    engine: RolloutEngine
    tokenizer: TextTokenizer
    run_seed: int
    vocab_size: int
    mask_truncated: bool
    restore: Callable[[], bool]
    answering: Callable[[], AbstractContextManager[None]] = nullcontext

    def generate(
        self,
        rollout_id: int,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        *,
        n_samples_per_prompt: int,
        purpose: str,
        first_group_id: int | None = None,
    ) -> list[Sample]:
        """`n_samples_per_prompt` answers to each prompt, in prompt order; answers to one prompt form a group.

        Groups and samples are numbered through the rollouts of a purpose, and a sample's random numbers depend on (run seed,
        rollout, that number, purpose) alone (SEMANTICS 14). The ids are those numbers, or count from `first_group_id` on: for
        purposes that share their ids. Raises RolloutError when the engine breaks its contract. What an engine that was lost did
        not finish is asked again, from the beginning.
        """
        first = rollout_id * len(prompts)
        shift = 0 if first_group_id is None else first_group_id - first
        requests, owners = [], []
        for group, prompt in enumerate(prompts, start=first):
            for number in range(group * n_samples_per_prompt, (group + 1) * n_samples_per_prompt):
                seed = derive_seed(self.run_seed, rollout_id, number, 0, purpose)
                requests.append(GenerateRequest(number + shift * n_samples_per_prompt, prompt.token_ids, seed, sampling))
                owners.append((group + shift, prompt))
        results = self._answers(requests)
        self._check_supports(results)
        return [self._sample(group, prompt, result) for (group, prompt), result in zip(owners, results, strict=True)]

    def _answers(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        self.restore()  # it may have died since it was last asked: other data sets and slow rewards lie between
        with self.answering():
            results = self.engine.generate(requests)
        check_results(requests, results)
        unfinished = [place for place, result in enumerate(results) if result.finish is FinishReason.ABORT]
        while unfinished and self.restore():
            again = [requests[place] for place in unfinished]
            with self.answering():
                answers = self.engine.generate(again)
            check_results(again, answers)
            for place, answer in zip(unfinished, answers, strict=True):
                results[place] = answer
            unfinished = [place for place in unfinished if results[place].finish is FinishReason.ABORT]
        return results

    def _sample(self, group_id: int, prompt: Prompt, result: GenerateResult) -> Sample:
        masked = self.mask_truncated and result.finish is FinishReason.LENGTH
        return Sample(
            sample_id=result.sample_id,
            group_id=group_id,
            trajectory_id=result.sample_id,
            prompt=prompt,
            response_ids=result.response_ids,
            response_text=self.tokenizer.decode(result.response_ids),
            rollout_log_probs=result.log_probs,
            support=result.support,
            loss_mask=np.full(len(result.response_ids), not masked),
            finish=result.finish,
            weight_versions=result.weight_versions,
            num_cached_tokens=result.num_cached_tokens,
            full_log_probs=result.full_log_probs,
        )

    def _check_supports(self, results: Sequence[GenerateResult]) -> None:
        supports = [(result, result.support) for result in results if result.support is not None]
        if not supports:
            return
        labels = np.concatenate([result.response_ids for result, _ in supports])
        validate_support(
            np.concatenate([support.ids for _, support in supports]),
            np.concatenate([support.counts for _, support in supports]),
            labels,
            np.ones(len(labels), np.bool_),
            lens=np.array([len(result.response_ids) for result, _ in supports]),
            sample_ids=[result.sample_id for result, _ in supports],
            vocab_size=self.vocab_size,
        )


def without_aborted(samples: Sequence[Sample], expected_version: int) -> list[Sample]:
    """The samples that may train.

    The loop is synchronous: it pushes its weights before it asks for answers, so that a sample of another version than
    `expected_version` is a missed push, whatever rollout correction is chosen. Raises RolloutError for that, and when none is
    left.
    """
    stale = [(sample, span) for sample in samples for span in sample.weight_versions if span.version != expected_version]
    if stale:
        sample, span = stale[0]
        raise RolloutError(
            f"sample {sample.sample_id} was generated by weight version {span.version} (response tokens {span.start} to "
            f"{span.end}), the trainer is at {expected_version}: weights are pushed before every rollout, so the engine missed a "
            "push. See its log"
        )
    kept = [sample for sample in samples if sample.finish is not FinishReason.ABORT]
    if not kept:
        raise RolloutError(f"all {len(samples)} samples of the rollout were aborted: nothing to train on. See the engine's log")
    return kept
