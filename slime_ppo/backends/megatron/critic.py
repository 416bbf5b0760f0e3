"""The critic on one rank: values, token rewards, advantages, and value updates."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from slime_ppo.backends.megatron.collectives import data_parallel_group
from slime_ppo.backends.megatron.role import (
    MegatronRole,
    add_token_means,
    non_finite_columns,
    raise_together,
    run_steps,
    sample_weights,
    token_weights,
)
from slime_ppo.config.ppo import PpoConfig
from slime_ppo.parallel.worker_settings import WorkerSettings
from slime_ppo.ppo_utils.aggregate import masked_weighted_sum
from slime_ppo.ppo_utils.gae import generalized_advantages
from slime_ppo.ppo_utils.moments import ExplainedVariance
from slime_ppo.ppo_utils.token_rewards import build_token_rewards
from slime_ppo.ppo_utils.value_loss import clipped_value_loss, explained_variance
from slime_ppo.ppo_utils.whiten import whiten_advantages
from slime_ppo.types.micro_batch import MicroBatch
from slime_ppo.types.rollout_batch import FINISH_CODES, ColumnPart, RolloutBatch, filled
from slime_ppo.types.sample import FinishReason
from slime_ppo.types.stats import Stats
from slime_ppo.types.step_plan import Step, StepPlan


class CriticRole(MegatronRole):
    """The value function of one rank. Every public method is collective over the critic's ranks."""

    def __init__(self, settings: WorkerSettings, ppo: PpoConfig) -> None:
        super().__init__(settings, "value")
        self._ppo = ppo

    def compute_advantages(self, batch: RolloutBatch, kl_coef: float) -> tuple[ColumnPart | None, Stats]:
        """Values, token rewards, returns and advantages (SEMANTICS 4 to 6) before any update of this rollout.

        `batch` holds old and, where the KL is charged, reference log-probs; `kl_coef` is the controller's beta.
        Returns the samples of this rank (None on ranks whose samples another rank reports).
        """
        part = self.columns(self.micro_batches(batch, np.arange(batch.num_samples)), self._value_head)
        mine = batch.select(part.rows).with_columns(**part.columns)
        raise_together(non_finite_columns(mine, part.columns), self.device)
        mask, lens = torch.tensor(mine.loss_mask), torch.tensor(mine.response_lens)
        values = torch.tensor(filled(mine.values))
        rewards = self._token_rewards(mine, mask, lens, kl_coef)
        found = generalized_advantages(
            rewards,
            values,
            mask,
            lens,
            gamma=self._ppo.gamma,
            lambd=self._ppo.lambd,
            lambd_critic=self._ppo.critic_lambd,
            adaptive=self._ppo.adaptive_lambd,
            bootstrap_values=self._bootstrap(mine),
        )
        advantages = found.advantages
        if self._ppo.normalize_advantages and self._ppo.whiten_domain == "rollout":
            advantages = whiten_advantages(advantages, mask, group=data_parallel_group())
        explained = _merged_over_ranks(explained_variance(values, found.returns, mask)).value
        if not self.reports:
            return None, Stats()
        stats = Stats()
        add_token_means(
            stats,
            mask,
            {"values": values, "returns": found.returns, "advantages": found.advantages, "token_rewards": rewards},
        )
        if explained is not None:
            stats.add_value("explained_variance", explained)
        columns = {"token_rewards": rewards, "returns": found.returns, "advantages": advantages}
        return ColumnPart(part.rows, dict(part.columns) | {name: column.numpy() for name, column in columns.items()}), stats

    def train(self, batch: RolloutBatch, plan: StepPlan, learning_rates: Sequence[float]) -> list[Stats]:
        """One optimizer step per planned step; `batch` must hold values (those before the first step) and returns."""

        def run(step: Step, lr: float, stats: Stats) -> bool:
            self._step(batch, step, lr, stats)
            return False

        results = run_steps(plan, batch, learning_rates, run)
        return results if self.reports else [Stats() for _ in results]

    def _token_rewards(self, mine: RolloutBatch, mask: torch.Tensor, lens: torch.Tensor, kl_coef: float) -> torch.Tensor:
        reference = None if mine.ref_log_probs is None else torch.tensor(mine.ref_log_probs)
        return build_token_rewards(
            torch.tensor(mine.rewards),
            torch.tensor(mine.kl_log_probs),
            reference,
            mask,
            lens,
            kl_coef=kl_coef,
            kl_kind=self._ppo.kl_reward_type,
        ).rewards

    def _value_head(self, _: MicroBatch, output: torch.Tensor, last: torch.Tensor) -> dict[str, torch.Tensor]:
        columns = {"values": output.float().reshape(-1)}
        if self._ppo.truncation_policy == "bootstrap":
            columns["bootstrap_values"] = last.float().reshape(-1)
        return columns

    def _bootstrap(self, mine: RolloutBatch) -> torch.Tensor | None:
        """V after the whole response for samples cut by length, 0 for the others (--truncation-policy bootstrap)."""
        if self._ppo.truncation_policy != "bootstrap":
            return None
        cut = torch.tensor(mine.finish == FINISH_CODES.index(FinishReason.LENGTH))
        return torch.where(cut, torch.tensor(filled(mine.bootstrap_values)), 0.0)

    def _step(self, batch: RolloutBatch, step: Step, lr: float, stats: Stats) -> None:
        weights = sample_weights(batch, step, self._ppo)

        def loss(micro_batch: MicroBatch, output: torch.Tensor) -> torch.Tensor:
            mask = micro_batch.column("loss_mask")
            found = clipped_value_loss(
                output.float().reshape(-1),
                micro_batch.column("values"),
                micro_batch.column("returns"),
                mask,
                value_clip=self._ppo.value_clip,
            )
            share = masked_weighted_sum(found.loss, mask, token_weights(weights, micro_batch))
            stats.add_total("value_loss", share.item())
            add_token_means(stats, mask, {"value_clipfrac": found.clipped})
            return share

        self.accumulate(self.micro_batches(batch, step.rows), loss)
        outcome = self.apply(lr)
        stats.add_value("skipped", float(not outcome.stepped))
        stats.add_value("grad_norm", outcome.grad_norm)


def _merged_over_ranks(own: ExplainedVariance) -> ExplainedVariance:
    """The statistics of all data-parallel ranks, merged in rank order. Collective."""
    group = data_parallel_group()
    if group is None:
        return own
    parts: list[ExplainedVariance | None] = [None] * group.size()
    dist.all_gather_object(parts, own, group=group)
    merged = ExplainedVariance()
    for part in parts:
        if part is not None:
            merged = merged.merge(part)
    return merged
