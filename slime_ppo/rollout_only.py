"""The loop of a run that generates and trains nothing (--debug-rollout-only): rollouts, rewards, metrics, samples and report."""

from slime_ppo.config.root import Config
from slime_ppo.data.tokenizer import TextTokenizer
from slime_ppo.evaluation import Evaluation
from slime_ppo.rollout.dump import DumpWriter
from slime_ppo.rollout_source import RolloutSource
from slime_ppo.tracking.base import RolloutRecord, Tracker
from slime_ppo.tracking.clock import RunClock, phase_metrics
from slime_ppo.tracking.phrases import common_phrases
from slime_ppo.tracking.rollout_metrics import batch_metrics, pass_metrics, sample_metrics
from slime_ppo.tracking.sample_records import training_records
from slime_ppo.types.rollout_batch import RolloutBatch

VERSION = 0
"""Of the weights of --hf-checkpoint, which never change."""


class RolloutOnly:
    """Runs `num_rollout` rollouts. `evaluation` and `dumps` are None where they are not wanted."""

    def __init__(
        self,
        config: Config,
        rollouts: RolloutSource,
        tokenizer: TextTokenizer,
        *,
        evaluation: Evaluation | None,
        tracker: Tracker,
        clock: RunClock,
        dumps: DumpWriter | None,
    ) -> None:
        self._config, self._rollouts, self._tokenizer = config, rollouts, tokenizer
        self._evaluation, self._tracker, self._clock, self._dumps = evaluation, tracker, clock, dumps

    def run(self) -> None:
        """All rollouts."""
        self._rollouts.connect()
        for rollout_id in range(self._config.run.num_rollout):
            self.iterate(rollout_id)

    def iterate(self, rollout_id: int) -> None:
        """One rollout: its samples to the file and the trackers, its figures to the trackers."""
        self._clock.start_rollout(rollout_id)
        self._rollouts.use_weights(VERSION)
        last = rollout_id == self._config.run.num_rollout - 1
        metrics: dict[str, float] = {}
        if self._evaluation is not None and (last or rollout_id % self._config.eval.eval_interval == 0):
            with self._clock.phase("evaluate"):
                metrics |= self._evaluation.run(rollout_id, VERSION)
        samples = self._rollouts.collect(rollout_id, VERSION)
        if self._dumps is not None:
            self._dumps.save(rollout_id, samples)
        batch = RolloutBatch.from_samples(rollout_id, samples)
        copies, threshold = self._config.rollout.n_samples_per_prompt, self._config.reward.pass_threshold
        metrics |= batch_metrics(batch) | sample_metrics(samples)
        metrics |= pass_metrics(batch, n_samples_per_prompt=copies, threshold=threshold)
        metrics["rollout/num_dropped"] = float(self._config.samples_per_rollout - len(samples))
        tracking = self._config.tracking
        if tracking.num_logged_samples and (last or rollout_id % tracking.log_sample_interval == 0):
            shown = samples[: tracking.num_logged_samples]
            records = training_records(shown, batch.select(range(len(shown))), self._tokenizer.token_strings)
            self._tracker.log_table(rollout_id, records)
        phases = self._clock.end_rollout()
        metrics |= phase_metrics(phases, float(batch.total_lens.sum()))
        phrases = common_phrases([sample.response_text for sample in samples])
        self._tracker.log(RolloutRecord(rollout_id, metrics, (), phases, phrases))
