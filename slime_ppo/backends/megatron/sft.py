"""The actor of supervised fine-tuning on one rank: log-probs of given responses, and updates that raise them."""

from collections.abc import Sequence

import numpy as np
import torch

from slime_ppo.backends.megatron.lm_head import LmHead, fuse_output_layer
from slime_ppo.backends.megatron.role import (
    MegatronRole,
    StepDenominator,
    add_token_means,
    require_finite_columns,
    together,
)
from slime_ppo.parallel.worker_settings import WorkerSettings
from slime_ppo.ppo_utils.aggregate import loss_sum
from slime_ppo.types.micro_batch import MicroBatch
from slime_ppo.types.rollout_batch import ColumnPart, RolloutBatch
from slime_ppo.types.stats import Stats
from slime_ppo.types.step_plan import Step, StepPlan


class SftRole(MegatronRole):
    """A language model that learns responses as they are given. Every public method is collective over its ranks."""

    def __init__(self, settings: WorkerSettings) -> None:
        super().__init__(settings, "language_model")
        self._lm_head = LmHead(
            vocab_size=self.shape.vocab_size,
            temperature=1.0,
            entropy_support="full",
            weight=fuse_output_layer(self.models[-1]) if settings.model.fuse_lm_head else None,
            sequence_parallel=self.layout.sequence_parallel,
        )

    def compute_log_probs(self, batch: RolloutBatch) -> tuple[ColumnPart | None, Stats]:
        """Log-probs of the responses by the present weights, as old_log_probs, and their negative mean over the trainable tokens,
        as nll. Returns the samples of this rank (None on ranks whose samples another rank reports)."""
        part = self.columns(self.micro_batches(batch, np.arange(batch.num_samples)), self._head)
        mine = batch.select(part.rows)
        together(lambda: require_finite_columns(mine, part.columns))
        if not self.reports:
            return None, Stats()
        stats, mask = Stats(), mine.loss_mask
        stats.add_mean("nll", -part.columns["old_log_probs"][mask].sum(dtype=np.float64), mask.sum())
        return part, stats

    def train(self, batch: RolloutBatch, plan: StepPlan, learning_rates: Sequence[float]) -> list[Stats]:
        """One optimizer step per planned step. A step without trainable tokens, or with a non-finite gradient, changes nothing and
        reports skipped = 1."""

        def run(step: Step, lr: float, stats: Stats) -> bool:
            self._step(batch, step, lr, stats)
            return False

        return self.run_plan(plan, batch, learning_rates, run)

    def _head(self, micro_batch: MicroBatch, output: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"old_log_probs": self._lm_head.log_probs(micro_batch, output, "none").log_probs}

    def _step(self, batch: RolloutBatch, step: Step, lr: float, stats: Stats) -> None:
        """Loss: the mean of -log p over the trainable tokens of the whole step."""
        denominator = StepDenominator.token_mean(batch, step)

        def loss(micro_batch: MicroBatch, output: torch.Tensor) -> torch.Tensor:
            nll, mask = -self._lm_head.log_probs(micro_batch, output, "none").log_probs, micro_batch.column("loss_mask")
            share = loss_sum(nll, mask, micro_batch.lens, denominator.seen_by(micro_batch))
            stats.add_total("loss", share.item())
            add_token_means(stats, mask, {"nll": nll})
            return share

        self.accumulate(self.micro_batches(batch, step.rows), loss, stats)
        outcome = self.apply(lr)
        denominator.report(stats)
        stats.add_value("skipped", float(not outcome.stepped))
        stats.add_value("grad_norm", outcome.grad_norm)
