"""The critic on one rank: values, advantages from them, and value updates."""

from collections.abc import Sequence

import numpy as np
import torch

from slime_ppo.backends.megatron.advantages import with_advantages
from slime_ppo.backends.megatron.collectives import data_parallel_group, gather_objects
from slime_ppo.backends.megatron.role import (
    MegatronRole,
    StepDenominator,
    add_token_means,
    require_finite_columns,
    together,
)
from slime_ppo.config.ppo import PpoConfig
from slime_ppo.parallel.worker_settings import WorkerSettings
from slime_ppo.ppo_utils.aggregate import loss_sum
from slime_ppo.ppo_utils.moments import ExplainedVariance
from slime_ppo.ppo_utils.registries import load
from slime_ppo.ppo_utils.value_loss import clipped_value_loss, explained_variance
from slime_ppo.types.micro_batch import MicroBatch
from slime_ppo.types.rollout_batch import ColumnPart, RolloutBatch
from slime_ppo.types.stats import Stats
from slime_ppo.types.step_plan import Step, StepPlan


class CriticRole(MegatronRole):
    """The value function of one rank. Every public method is collective over the critic's ranks."""

    def __init__(self, settings: WorkerSettings, ppo: PpoConfig) -> None:
        super().__init__(settings, "value")
        self._ppo = ppo
        self._estimator = load(ppo.estimator_spec.path)

    def compute_advantages(self, batch: RolloutBatch, kl_coef: float) -> tuple[ColumnPart | None, Stats]:
        """Values, token rewards, returns and advantages (SEMANTICS 4 to 6) before any update of this rollout.

        `batch` holds old and, where the KL is charged, reference log-probs; `kl_coef` is the controller's beta.
        Returns the samples of this rank (None on ranks whose samples another rank reports).
        """
        part = self.columns(self.micro_batches(batch, np.arange(batch.num_samples)), self._value_head)
        mine, columns = batch.select(part.rows), part.columns
        together(lambda: require_finite_columns(mine, columns))
        part, stats = with_advantages(batch, part, self._ppo, self._estimator, kl_coef=kl_coef)
        values, returns = torch.tensor(part.columns["values"]), torch.tensor(part.columns["returns"])
        explained = _merged_over_ranks(explained_variance(values, returns, torch.tensor(mine.loss_mask))).value
        if not self.reports:
            return None, Stats()
        if explained is not None:
            stats.add_value("explained_variance", explained)
        return part, stats

    def train(self, batch: RolloutBatch, plan: StepPlan, learning_rates: Sequence[float]) -> list[Stats]:
        """One optimizer step per planned step; `batch` must hold values (those before the first step) and returns."""

        def run(step: Step, lr: float, stats: Stats) -> bool:
            self._step(batch, step, lr, stats)
            return False

        return self.run_plan(plan, batch, learning_rates, run)

    def _value_head(self, micro_batch: MicroBatch, output: torch.Tensor) -> dict[str, torch.Tensor]:
        values = output.float().reshape(-1)
        columns = {"values": values.index_select(0, micro_batch.positions)}
        if self._ppo.truncation_policy == "bootstrap":
            columns["bootstrap_values"] = micro_batch.at_last_positions(values)
        return columns

    def _step(self, batch: RolloutBatch, step: Step, lr: float, stats: Stats) -> None:
        denominator = StepDenominator.of(batch, step, self._ppo)

        def loss(micro_batch: MicroBatch, output: torch.Tensor) -> torch.Tensor:
            kept = micro_batch.column("kept_mask")
            found = clipped_value_loss(
                output.float().reshape(-1).index_select(0, micro_batch.positions),
                micro_batch.column("values"),
                micro_batch.column("returns"),
                kept,
                value_clip=self._ppo.value_clip,
            )
            share = loss_sum(found.loss, kept, micro_batch.lens, denominator.seen_by(micro_batch))
            stats.add_total("value_loss", share.item())
            add_token_means(stats, kept, {"value_clipfrac": found.clipped})
            return share

        self.accumulate(self.micro_batches(batch, step.rows), loss, stats)
        outcome = self.apply(lr)
        denominator.report(stats)
        stats.add_value("skipped", float(not outcome.stepped))
        stats.add_value("grad_norm", outcome.grad_norm)


def _merged_over_ranks(own: ExplainedVariance) -> ExplainedVariance:
    """The statistics of all data-parallel ranks, merged in rank order. Collective."""
    merged = ExplainedVariance()
    for part in gather_objects(own, data_parallel_group()):
        merged = merged.merge(part)
    return merged
