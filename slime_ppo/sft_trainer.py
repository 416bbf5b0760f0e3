"""Supervised fine-tuning: one batch of examples after the other, an optimizer step each.

examples -> negative log-likelihood of their responses -> update -> report -> checkpoint
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slime_ppo.checkpoint.progress import Progress
from slime_ppo.config.root import Config
from slime_ppo.data.examples import example_batch
from slime_ppo.data.source import DataSource
from slime_ppo.errors import NumericsError
from slime_ppo.orchestration.interrupts import StopRequest
from slime_ppo.orchestration.protocols import TrainGroup
from slime_ppo.orchestration.turns import DeviceTurns
from slime_ppo.saver import CheckpointSaver, save_between, saved_at_end
from slime_ppo.tracking.base import RolloutRecord, Tracker
from slime_ppo.tracking.clock import RunClock, phase_metrics
from slime_ppo.tracking.rollout_metrics import is_skipped, training_metrics
from slime_ppo.trainer import scheduled_rate
from slime_ppo.types.rollout_batch import RolloutBatch
from slime_ppo.types.sample import Prompt
from slime_ppo.types.stats import Stats, merge_stats
from slime_ppo.types.step_plan import Step, StepPlan

_MAX_SKIPPED = 10
"""Steps in a row that may change nothing."""


@dataclass(frozen=True)
class SftParts:
    """What the loop is made of. `held_out` are examples that never train, perhaps none."""

    actor: TrainGroup
    turns: DeviceTurns
    examples: DataSource
    held_out: Sequence[Prompt]
    tracker: Tracker
    clock: RunClock
    saver: CheckpointSaver | None
    stop: StopRequest


class SftTrainer:
    """Runs the batches up to `num_rollout`. `progress` is all the state of its own."""

    def __init__(self, config: Config, parts: SftParts, progress: Progress) -> None:
        self.config = config
        self.parts = parts
        self.progress = progress

    def run(self) -> None:
        """All batches that are left, then the final weights. Raises Preempted when the run was asked to end and has saved."""
        parts, background = self.parts, self.config.checkpoint.async_save
        parts.turns.take("actor")
        with saved_at_end(parts.saver, self.progress):
            for batch_id in range(self.progress.rollout_id, self.config.run.num_rollout):
                self.iterate(batch_id)
                last = self._is_last(batch_id)
                save_between(parts.saver, parts.stop, self.progress, last=last, in_background=background, clock=parts.clock)
        if self.config.model.save_hf:
            parts.actor.save_hf(self.config.role("actor").save_folder)

    def iterate(self, batch_id: int) -> None:
        """One batch."""
        parts, clock = self.parts, self.parts.clock
        clock.start_rollout(batch_id)
        metrics = self.evaluate(batch_id) if self._evaluation_due(batch_id) else {}
        if parts.saver is not None:
            with clock.phase("save"):
                parts.saver.publish()
        batch = example_batch(batch_id, parts.examples.next_prompts(self.config.batch.global_batch_size))
        plan = StepPlan(batch_id, (Step(0, 0, rows=np.arange(batch.num_samples)),))
        with clock.phase("actor train"):
            steps = parts.actor.train(parts.actor.put(batch), plan, [scheduled_rate(self.config.role("actor"), batch_id)])
        self.progress.version += not is_skipped(steps[0])
        self.progress.prompts = parts.examples.state_dict()
        if self._is_last(batch_id):
            metrics |= self.evaluate(batch_id)
        self._report(batch, metrics, steps)
        self._check_skipped(steps[0])
        self.progress.has_trained()

    def evaluate(self, batch_id: int) -> dict[str, float]:
        """The loss on the held-out examples by the present weights, and its exponential; the mean over all their tokens."""
        held_out, size = self.parts.held_out, self.config.batch.global_batch_size
        if not held_out:
            return {}
        actor, found = self.parts.actor, []
        with self.parts.clock.phase("evaluate"):
            for first in range(0, len(held_out), size):
                batch = example_batch(batch_id, held_out[first : first + size])
                found.append(actor.compute_log_probs(actor.put(batch))[1])
        nll = merge_stats(found).result()["nll"]
        return {"eval/nll": nll, "eval/perplexity": float(np.exp(nll))}

    def _report(self, batch: RolloutBatch, metrics: dict[str, float], steps: Sequence[Stats]) -> None:
        parts, num_examples = self.parts, self.config.batch.global_batch_size * (batch.rollout_id + 1)
        metrics = training_metrics(steps, ()) | metrics
        metrics |= {
            "train/epoch": num_examples / len(parts.examples),
            "rollout/response_len/mean": float(batch.response_lens.mean()),
            "rollout/response_len/min": float(batch.response_lens.min()),
            "rollout/response_len/max": float(batch.response_lens.max()),
            "rollout/num_samples": float(batch.num_samples),
        }
        phases = parts.clock.end_rollout()
        metrics |= phase_metrics(phases, float(batch.total_lens.sum()))
        parts.tracker.log(RolloutRecord(batch.rollout_id, metrics, (), phases))

    def _is_last(self, batch_id: int) -> bool:
        return batch_id == self.config.run.num_rollout - 1

    def _evaluation_due(self, batch_id: int) -> bool:
        """Before the first batch, and before those whose number is a multiple of the interval; the last is followed by one."""
        interval = self.config.sft.eval_interval
        return batch_id == 0 or (interval > 0 and batch_id % interval == 0 and not self._is_last(batch_id))

    def _check_skipped(self, step: Stats) -> None:
        skipped = self.progress.skipped_in_a_row
        skipped["actor"] = skipped["actor"] + 1 if is_skipped(step) else 0
        if skipped["actor"] >= _MAX_SKIPPED:
            raise NumericsError(
                f"{_MAX_SKIPPED} optimizer steps in a row were skipped: their gradients are not finite. Look at train/grad_norm in "
                "metrics.jsonl, and lower --lr"
            )
