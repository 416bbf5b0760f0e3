"""The actor on one rank: old and reference log-probs, and policy updates."""

from collections.abc import Sequence

import numpy as np
import torch

from slime_ppo.backends.megatron.collectives import sum_over_data_parallel, tensor_parallel_group
from slime_ppo.backends.megatron.role import (
    MegatronRole,
    add_token_means,
    require_finite_columns,
    run_steps,
    sample_weights,
    token_weights,
)
from slime_ppo.config.ppo import PpoConfig
from slime_ppo.parallel.worker_settings import WorkerSettings
from slime_ppo.ppo_utils.aggregate import masked_weighted_sum
from slime_ppo.ppo_utils.kl import kl_estimate, kl_loss
from slime_ppo.ppo_utils.policy_loss import clipped_policy_loss
from slime_ppo.ppo_utils.top_p import SupportLogProbs, support_log_probs
from slime_ppo.ppo_utils.vocab_parallel import EntropyMode, vocab_log_probs
from slime_ppo.ppo_utils.whiten import whiten_advantages
from slime_ppo.types.micro_batch import MicroBatch
from slime_ppo.types.rollout_batch import ColumnPart, RolloutBatch, filled
from slime_ppo.types.stats import Stats
from slime_ppo.types.step_plan import Step, StepPlan


class ActorRole(MegatronRole):
    """The policy of one rank. Every public method is collective over the actor's ranks."""

    def __init__(self, settings: WorkerSettings, ppo: PpoConfig, temperature: float) -> None:
        super().__init__(settings, "language_model")
        self._ppo = ppo
        self._temperature = temperature

    def compute_log_probs(self, batch: RolloutBatch) -> tuple[ColumnPart | None, Stats]:
        """Old log-probs and entropy of this batch, and the reference's log-probs where the KL is used.

        Returns the samples of this rank (None on ranks whose samples another rank reports), and the gap to the engine,
        the entropy and the KL over them.
        """
        micro_batches = self.micro_batches(batch, np.arange(batch.num_samples))
        part = self.columns(micro_batches, self._old_head)
        columns = dict(part.columns)
        if self.reference is not None:
            with self.reference.swapped_in():
                columns |= self.columns(micro_batches, self._reference_head).columns
        if not self.reports:
            return None, Stats()
        outside_mass = columns.pop("outside_mass") if "outside_mass" in columns else None
        mine = batch.select(part.rows)
        require_finite_columns(mine, columns)
        num_trajectories = int(np.isin(part.rows, _first_of_trajectory(batch)).sum())
        stats = _log_prob_stats(mine.with_columns(**columns), num_trajectories)
        if outside_mass is not None:
            stats.add_mean("outside_mass", outside_mass[mine.loss_mask].sum(dtype=np.float64), mine.loss_mask.sum())
        return ColumnPart(part.rows, columns), stats

    def train(self, batch: RolloutBatch, plan: StepPlan, learning_rates: Sequence[float]) -> list[Stats]:
        """One optimizer step per planned step; `batch` must hold old log-probs and advantages.

        A step without trainable tokens, after an early stop by KL, or with a non-finite gradient changes nothing and
        reports skipped = 1.
        """
        first = plan.steps[0] if plan.steps else None

        def run(step: Step, lr: float, stats: Stats) -> bool:
            return self._step(batch, step, lr=lr, stats=stats, may_stop=step is not first)

        results = run_steps(plan, batch, learning_rates, run)
        return results if self.reports else [Stats() for _ in results]

    def _log_probs(self, micro_batch: MicroBatch, logits: torch.Tensor, entropy: EntropyMode) -> SupportLogProbs:
        """Log-probs over the recorded support and over the vocabulary, the same when the sampler was unrestricted."""
        labels = micro_batch.column("response_ids").long()
        size, group = self.shape.vocab_size, tensor_parallel_group()
        if micro_batch.batch.support_ids is not None:
            ids, counts = micro_batch.column("support_ids").long(), micro_batch.column("support_counts").long()
            return support_log_probs(
                logits, labels, ids, counts, vocab_size=size, temperature=self._temperature, group=group, entropy=entropy
            )
        full = vocab_log_probs(logits, labels, vocab_size=size, temperature=self._temperature, group=group, entropy=entropy)
        return SupportLogProbs(full.log_probs, full.log_probs, torch.zeros_like(full.log_probs), full.entropy)

    def _old_head(self, micro_batch: MicroBatch, logits: torch.Tensor, _: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self._log_probs(micro_batch, logits, "metric")
        columns = {"old_log_probs": found.log_probs, "entropy": _present(found.entropy)}
        if micro_batch.batch.support_ids is not None:
            columns |= {"old_full_log_probs": found.full_log_probs, "outside_mass": found.outside_mass}
        return columns

    def _reference_head(self, micro_batch: MicroBatch, logits: torch.Tensor, _: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"ref_log_probs": self._log_probs(micro_batch, logits, "none").full_log_probs}

    def _step(self, batch: RolloutBatch, step: Step, *, lr: float, stats: Stats, may_stop: bool) -> bool:
        """One optimizer step; True when it was discarded because its KL passed --kl-early-stop."""
        weights = sample_weights(batch, step, self._ppo)
        if self._ppo.normalize_advantages and self._ppo.whiten_domain == "step":
            batch = _whitened_over_step(batch, step)

        def loss(micro_batch: MicroBatch, logits: torch.Tensor) -> torch.Tensor:
            return self._loss(micro_batch, logits, token_weights(weights, micro_batch), stats)

        self.accumulate(self.micro_batches(batch, step.rows), loss)
        limit = self._ppo.kl_early_stop
        if limit is not None and may_stop:
            moved, count = sum_over_data_parallel([stats.sums["ppo_kl"], stats.counts["ppo_kl"]], self.device)
            if moved / count > limit:
                stats.add_value("skipped", 1.0)
                stats.add_value("early_stopped", 1.0)
                return True
        outcome = self.apply(lr)
        stats.add_value("skipped", float(not outcome.stepped))
        stats.add_value("grad_norm", outcome.grad_norm)
        return False

    def _loss(self, micro_batch: MicroBatch, logits: torch.Tensor, weights: torch.Tensor, stats: Stats) -> torch.Tensor:
        """This micro-batch's share of policy - entropy_coef * H + kl_loss_coef * KL (SEMANTICS 7)."""
        ppo, mask = self._ppo, micro_batch.column("loss_mask")
        old = micro_batch.column("old_log_probs")
        found = self._log_probs(micro_batch, logits, "grad" if ppo.entropy_coef > 0 else "metric")
        policy = clipped_policy_loss(
            found.log_probs,
            old,
            micro_batch.column("advantages"),
            mask,
            eps_clip_low=ppo.eps_clip,
            eps_clip_high=ppo.clip_high,
            eps_clip_c=ppo.eps_clip_c,
        )
        entropy = _present(found.entropy)
        policy_share = masked_weighted_sum(policy.loss, mask, weights)
        entropy_share = masked_weighted_sum(entropy, mask, weights)
        objective = policy_share - ppo.entropy_coef * entropy_share
        if ppo.use_kl_loss:
            kl = kl_loss(ppo.kl_loss_type, found.full_log_probs, micro_batch.column("ref_log_probs"), mask)
            kl_share = masked_weighted_sum(kl.kl, mask, weights)
            objective = objective + ppo.kl_loss_coef * kl_share
            stats.add_total("kl_loss", kl_share.item())
            add_token_means(stats, mask, {"kl_clamped": kl.clamped})
        stats.add_total("pg_loss", policy_share.item())
        stats.add_total("entropy_loss", entropy_share.item())
        stats.add_total("loss", objective.item())
        moved = kl_estimate("k3", old, found.log_probs.detach(), mask)
        add_token_means(
            stats,
            mask,
            {
                "pg_clipfrac": policy.clipped_low | policy.clipped_high | policy.clipped_dual,
                "pg_clipfrac_low": policy.clipped_low,
                "pg_clipfrac_high": policy.clipped_high,
                "pg_clipfrac_dual": policy.clipped_dual,
                "ratio_clamped": policy.clamped,
                "ppo_kl": moved.kl,
                "entropy": entropy,
            },
        )
        return objective


def _present(entropy: torch.Tensor | None) -> torch.Tensor:
    if entropy is None:
        raise ValueError("the entropy was not asked for")
    return entropy


def _whitened_over_step(batch: RolloutBatch, step: Step) -> RolloutBatch:
    """Whiten the step's advantages anew; every rank holds all of them, so no collective is needed."""
    at = batch.flat_index(step.rows, "response_token")
    advantages = np.array(filled(batch.advantages))
    advantages[at] = whiten_advantages(torch.tensor(advantages[at]), torch.tensor(batch.loss_mask[at])).numpy()
    return batch.with_columns(advantages=advantages)


def _first_of_trajectory(batch: RolloutBatch) -> np.ndarray:
    """Row of the first trainable sample of each trajectory that has one.

    The samples of a trajectory may lie on several ranks; the rank that holds this one counts it.
    """
    rows = np.flatnonzero(batch.trainable_tokens)
    return rows[np.unique(batch.trajectory_ids[rows], return_index=True)[1]]


def _log_prob_stats(batch: RolloutBatch, num_trajectories: int) -> Stats:
    """Gap to the engine, entropy, and KL to the reference, over the trainable tokens of these samples.

    `num_trajectories` is this rank's share of the rollout's trajectories.
    """
    stats, mask = Stats(), batch.loss_mask
    count = int(mask.sum())
    old = filled(batch.old_log_probs)
    gap = np.abs(old - batch.rollout_log_probs)[mask]
    stats.add_mean("logprob_gap_mean", gap.sum(dtype=np.float64), count)
    if count:
        stats.add_max("logprob_gap_max", float(gap.max()))
    stats.add_mean("entropy", filled(batch.entropy)[mask].sum(dtype=np.float64), count)
    if batch.ref_log_probs is not None:
        kl = (batch.kl_log_probs - batch.ref_log_probs)[mask].sum(dtype=np.float64)
        stats.add_mean("kl", kl, count)
        stats.add_mean("kl_trajectory", kl, num_trajectories)
    return stats
