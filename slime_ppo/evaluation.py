"""Evaluation: the engine answers held-out prompts of several data sets, with a sampler that is not the rollouts'."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from slime_ppo.config.root import Config
from slime_ppo.rewards.runner import RewardRunner
from slime_ppo.rollout.generate import SampleBuilder, without_aborted
from slime_ppo.tracking.base import Tracker
from slime_ppo.tracking.rollout_metrics import eval_metrics
from slime_ppo.tracking.sample_records import eval_records
from slime_ppo.types.sample import Prompt, Sample, SamplingParams


@dataclass(frozen=True)
class EvalSet:
    """A named data set of held-out prompts."""

    name: str
    prompts: Sequence[Prompt]


@dataclass(frozen=True)
class Evaluation:
    """Which prompts are answered how, and what answers, scores and records. Without data sets there is none."""

    data_sets: Sequence[EvalSet]
    sampling: SamplingParams
    n_samples_per_prompt: int
    pass_threshold: float
    num_logged_samples: int
    samples: SampleBuilder
    rewards: RewardRunner
    tracker: Tracker
    check_alive: Callable[[], None]

    @classmethod
    def of(
        cls,
        config: Config,
        data_sets: Sequence[EvalSet],
        *,
        samples: SampleBuilder,
        rewards: RewardRunner,
        tracker: Tracker,
        check_alive: Callable[[], None],
    ) -> Self:
        """The evaluation that section `eval` describes."""
        settings = config.eval
        return cls(
            data_sets=data_sets,
            sampling=SamplingParams(
                max_new_tokens=config.eval_max_response_len,
                temperature=settings.eval_temperature,
                top_p=settings.eval_top_p,
                top_k=config.eval_sampler_top_k,
                min_p=settings.eval_min_p,
                stop_token_ids=tuple(samples.tokenizer.eos_ids),
            ),
            n_samples_per_prompt=settings.eval_n_samples_per_prompt,
            pass_threshold=config.reward.pass_threshold,
            num_logged_samples=config.tracking.num_logged_samples,
            samples=samples,
            rewards=rewards,
            tracker=tracker,
            check_alive=check_alive,
        )

    def run(self, rollout_id: int, version: int) -> dict[str, float]:
        """The metrics of every data set, answered by the weights of `version`; some answers of each go to the trackers."""
        metrics: dict[str, float] = {}
        first_group = rollout_id * sum(len(one.prompts) for one in self.data_sets)
        for data_set in self.data_sets:
            scored = self._scored(data_set, rollout_id, version, first_group)
            first_group += len(data_set.prompts)
            shown = scored[: self.num_logged_samples]
            spelled = self.samples.tokenizer.token_strings
            self.tracker.log_table(rollout_id, eval_records(rollout_id, data_set.name, shown, spelled))
            metrics |= eval_metrics(
                data_set.name, scored, n_samples_per_prompt=self.n_samples_per_prompt, pass_threshold=self.pass_threshold
            )
        return metrics

    def _scored(self, data_set: EvalSet, rollout_id: int, version: int, first_group: int) -> Sequence[Sample]:
        """The data set's rewarded answers. Their random numbers do not depend on other data sets; their ids are unique."""
        answered = self.samples.generate(
            rollout_id,
            data_set.prompts,
            self.sampling,
            n_samples_per_prompt=self.n_samples_per_prompt,
            purpose=f"eval/{data_set.name}",
            first_group_id=first_group,
        )
        return self.rewards.score(without_aborted(answered, version), check=self.check_alive).samples
