"""The actor on one rank: old and reference log-probs, advantages without a critic, and policy updates."""

from collections.abc import Sequence

import numpy as np
import torch

from slime_ppo.backends.megatron.actor_loss import ActorLoss, kl_side, present
from slime_ppo.backends.megatron.advantages import with_advantages
from slime_ppo.backends.megatron.collectives import from_last_stage, sum_numbers, token_parallel_group
from slime_ppo.backends.megatron.correction import add_mismatch, add_reference_kl, correction_columns, trajectories_of
from slime_ppo.backends.megatron.lm_head import LmHead, fuse_output_layer
from slime_ppo.backends.megatron.role import (
    MegatronRole,
    StepDenominator,
    require_finite_columns,
    together,
)
from slime_ppo.config.correction import CorrectionConfig
from slime_ppo.config.ppo import PpoConfig
from slime_ppo.parallel.worker_settings import WorkerSettings
from slime_ppo.ppo_utils.registries import load
from slime_ppo.ppo_utils.whiten import whiten_advantages
from slime_ppo.types.micro_batch import MicroBatch
from slime_ppo.types.rollout_batch import ColumnPart, RolloutBatch, filled
from slime_ppo.types.stats import Stats
from slime_ppo.types.step_plan import Step, StepPlan


class ActorRole(MegatronRole):
    """The policy of one rank. Every public method is collective over the actor's ranks."""

    def __init__(self, settings: WorkerSettings, ppo: PpoConfig, correction: CorrectionConfig, temperature: float) -> None:
        super().__init__(settings, "language_model")
        self._ppo = ppo
        self._correction = correction
        self._lm_head = LmHead(
            vocab_size=self.shape.vocab_size,
            temperature=temperature,
            entropy_support=ppo.entropy_support,
            weight=fuse_output_layer(self.models[-1]) if settings.model.fuse_lm_head else None,
            sequence_parallel=self.layout.sequence_parallel,
        )
        self._actor_loss = ActorLoss.of(ppo)
        self._estimator = load(ppo.estimator_spec.path)

    def compute_log_probs(self, batch: RolloutBatch) -> tuple[ColumnPart | None, Stats]:
        """Old log-probs and entropy of this batch, the reference's log-probs where the KL is used, and the rollout correction.

        With --use-rollout-log-probs the engine's log-probs are the old ones and only the reference computes. Returns the samples
        of this rank (None on ranks whose samples another rank reports), and over them the mismatch with the engine, the entropy
        and the KL.
        """
        micro_batches = self.micro_batches(batch, np.arange(batch.num_samples))
        part = self._old_columns(batch, micro_batches)
        columns = dict(part.columns)
        if self.reference is not None:
            with self.reference.swapped_in():
                columns |= self.columns(micro_batches, self._reference_head).columns
        outside_mass = columns.pop("outside_mass") if "outside_mass" in columns else None
        mine = batch.select(part.rows)
        together(lambda: require_finite_columns(mine, columns))
        mine = mine.with_columns(**columns)
        columns |= correction_columns(mine, self._correction)
        part = ColumnPart(part.rows, columns)
        num_trajectories = trajectories_of(batch, part, self.device)
        if not self.reports:
            return None, Stats()
        return part, self._log_prob_stats(mine.with_columns(**columns), num_trajectories, outside_mass)

    def compute_advantages(self, batch: RolloutBatch, kl_coef: float) -> tuple[ColumnPart | None, Stats]:
        """Token rewards, returns and advantages by an estimator that needs no critic, as CriticRole.compute_advantages."""
        rows = np.arange(batch.num_samples)[self.dp_rank :: self.layout.dp_size]
        part, stats = with_advantages(batch, ColumnPart(rows, {}), self._ppo, self._estimator, kl_coef=kl_coef)
        return (part, stats) if self.reports else (None, Stats())

    def train(self, batch: RolloutBatch, plan: StepPlan, learning_rates: Sequence[float]) -> list[Stats]:
        """One optimizer step per planned step; `batch` must hold old log-probs and advantages.

        A step without trainable tokens, after an early stop by KL, or with a non-finite gradient changes nothing and
        reports skipped = 1.
        """
        first = plan.steps[0] if plan.steps else None

        def run(step: Step, lr: float, stats: Stats) -> bool:
            return self._step(batch, step, lr=lr, stats=stats, may_stop=step is not first)

        return self.run_plan(plan, batch, learning_rates, run)

    def _old_columns(self, batch: RolloutBatch, micro_batches: Sequence[MicroBatch]) -> ColumnPart:
        if not self._correction.use_rollout_log_probs:
            return self.columns(micro_batches, self._old_head)
        rows = np.concatenate([micro_batch.rows for micro_batch in micro_batches])
        return ColumnPart(rows, {"old_log_probs": batch.select(rows).rollout_log_probs})

    def _old_head(self, micro_batch: MicroBatch, output: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self._lm_head.log_probs(micro_batch, output, "metric")
        columns = {"old_log_probs": found.log_probs, "entropy": present(found.entropy)}
        if micro_batch.batch.support_ids is not None:
            columns["outside_mass"] = found.outside_mass
            if self._ppo.kl_support == "full":
                columns["old_full_log_probs"] = found.full_log_probs
        return columns

    def _reference_head(self, micro_batch: MicroBatch, output: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"ref_log_probs": kl_side(self._lm_head.log_probs(micro_batch, output, "none"), self._ppo)}

    def _log_prob_stats(self, mine: RolloutBatch, num_trajectories: int, outside_mass: np.ndarray | None) -> Stats:
        """Token means over these samples; `num_trajectories` is this rank's share of the rollout's."""
        stats, mask = Stats(), mine.loss_mask
        bypassed = self._correction.use_rollout_log_probs
        if not bypassed:  # the engine's log-probs would be compared with themselves
            add_mismatch(stats, mine)
        if mine.entropy is not None:
            stats.add_mean("entropy", mine.entropy[mask].sum(dtype=np.float64), mask.sum())
        if outside_mass is not None:
            stats.add_mean("outside_mass", outside_mass[mask].sum(dtype=np.float64), mask.sum())
        # without a pass of its own the old policy has no log-probs over the full vocabulary once the sampler is restricted
        comparable = not bypassed or mine.support_ids is None or self._ppo.kl_support == "sampled"
        if mine.ref_log_probs is not None and comparable:
            add_reference_kl(stats, mine, num_trajectories)
        return stats

    def _step(self, batch: RolloutBatch, step: Step, *, lr: float, stats: Stats, may_stop: bool) -> bool:
        """One optimizer step; True when it was discarded because its KL passed --kl-early-stop."""
        denominator = StepDenominator.of(batch, step, self._ppo)
        if self._ppo.whitens and self._ppo.whiten_domain == "step":
            batch = _whitened_over_step(batch, step)

        def loss(micro_batch: MicroBatch, output: torch.Tensor) -> torch.Tensor:
            found = self._lm_head.log_probs(micro_batch, output, "grad" if self._ppo.entropy_coef > 0 else "metric")
            return self._actor_loss(micro_batch, found, denominator.seen_by(micro_batch), stats)

        self.accumulate(self.micro_batches(batch, step.rows), loss, stats)
        denominator.report(stats)
        limit = self._ppo.kl_early_stop
        if limit is not None and may_stop:
            own = [stats.sums.get("ppo_kl", 0.0), stats.counts.get("ppo_kl", 0.0)]  # seen by the last stage alone
            moved, count = from_last_stage(sum_numbers(own, self.device, token_parallel_group()))
            if moved / count > limit:
                stats.add_value("skipped", 1.0)
                stats.add_value("early_stopped", 1.0)
                return True
        outcome = self.apply(lr)
        stats.add_value("skipped", float(not outcome.stepped))
        stats.add_value("grad_norm", outcome.grad_norm)
        return False


def _whitened_over_step(batch: RolloutBatch, step: Step) -> RolloutBatch:
    """Whiten the step's advantages anew; every rank holds all of them, so no collective is needed."""
    at = batch.flat_index(step.rows, "response_token")
    advantages = np.array(filled(batch.advantages))
    advantages[at] = whiten_advantages(torch.tensor(advantages[at]), torch.tensor(batch.kept_mask[at])).numpy()
    return batch.with_columns(advantages=advantages)
