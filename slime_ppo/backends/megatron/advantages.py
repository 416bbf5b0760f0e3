"""Token rewards and advantages on one rank, with values of a critic or without (SEMANTICS 4 to 6, 13)."""

from collections.abc import Callable

import numpy as np
import torch

from slime_ppo.backends.megatron.collectives import data_parallel_group
from slime_ppo.backends.megatron.role import add_token_means, require_finite_columns, together
from slime_ppo.config.ppo import PpoConfig
from slime_ppo.ppo_utils.advantages import AdvantageInputs, Advantages, AdvantageSettings, SequenceRewards
from slime_ppo.ppo_utils.token_rewards import TokenRewards, build_token_rewards
from slime_ppo.ppo_utils.whiten import whiten_advantages
from slime_ppo.types.rollout_batch import FINISH_CODES, ColumnPart, RolloutBatch, filled
from slime_ppo.types.sample import FinishReason
from slime_ppo.types.stats import Stats

Estimator = Callable[[AdvantageInputs, AdvantageSettings], Advantages]


def with_advantages(
    batch: RolloutBatch, part: ColumnPart, ppo: PpoConfig, estimator: Estimator, *, kl_coef: float
) -> tuple[ColumnPart, Stats]:
    """`part` with the columns token_rewards, returns and advantages of its samples, and their token means.

    `batch` is the whole rollout, which every rank holds, with old and, where the KL is charged, reference log-probs; `part`
    brings values (and bootstrap values) where there is a critic; `estimator` is the function of the run's estimator, which may
    be the user's own. Made before any update of the rollout. Collective over data-parallel ranks. Raises NumericsError, on all
    of them, that names the sample where a result is not finite at a trainable token.
    """
    mine = batch.select(part.rows).with_columns(**part.columns)
    mask, kept, lens = torch.tensor(mine.loss_mask), torch.tensor(mine.kept_mask), torch.tensor(mine.response_lens)
    values = None if mine.values is None else torch.tensor(mine.values)
    rewards = together(lambda: _token_rewards(mine, ppo, kl_coef))
    inputs = AdvantageInputs(
        token_rewards=rewards.rewards,
        mask=mask,
        lens=lens,
        rollout=_sequence_rewards(batch, ppo),
        rows=torch.tensor(part.rows),
        values=values,
        bootstrap_values=_bootstrap_values(mine, ppo),
    )
    found = together(lambda: _estimated(mine, inputs, ppo, estimator))
    advantages = found.advantages
    if ppo.whitens and ppo.whiten_domain == "rollout":
        advantages = whiten_advantages(advantages, kept, group=data_parallel_group())
    stats = Stats()
    add_token_means(stats, mask, {"returns": found.returns, "token_rewards": rewards.rewards})
    add_token_means(stats, kept, {"advantages": found.advantages})
    if values is not None:
        add_token_means(stats, mask, {"values": values})
    if kl_coef > 0:
        add_token_means(stats, mask, {"kl_reward_clamped": rewards.clamped})
    columns = {"token_rewards": rewards.rewards, "returns": found.returns, "advantages": advantages}
    return ColumnPart(part.rows, dict(part.columns) | {name: column.numpy() for name, column in columns.items()}), stats


def _token_rewards(mine: RolloutBatch, ppo: PpoConfig, kl_coef: float) -> TokenRewards:
    rewards = build_token_rewards(
        torch.tensor(mine.rewards),
        torch.tensor(mine.kl_log_probs),
        None if mine.ref_log_probs is None else torch.tensor(mine.ref_log_probs),
        torch.tensor(mine.loss_mask),
        torch.tensor(mine.response_lens),
        kl_coef=kl_coef,
        kl_kind=ppo.kl_reward_type,
        process_rewards=None if mine.process_rewards is None else torch.tensor(mine.process_rewards),
        sample_ids=torch.tensor(mine.sample_ids),
    )
    require_finite_columns(mine, {"token_rewards": rewards.rewards.numpy()})
    return rewards


def _estimated(mine: RolloutBatch, inputs: AdvantageInputs, ppo: PpoConfig, estimator: Estimator) -> Advantages:
    found = estimator(inputs, _settings(ppo))
    require_finite_columns(mine, {"returns": found.returns.numpy(), "advantages": found.advantages.numpy()})
    return found


def _sequence_rewards(batch: RolloutBatch, ppo: PpoConfig) -> SequenceRewards:
    """The rewards of the whole rollout, and which samples take part in baselines."""
    counted = batch.trainable_tokens > 0
    if ppo.masked_in_baseline:
        counted |= _truncated(batch)
    if batch.rejected is not None:
        counted &= ~batch.rejected
    return SequenceRewards(
        rewards=torch.tensor(batch.rewards),
        group_ids=torch.tensor(batch.group_ids),
        trajectory_ids=torch.tensor(batch.trajectory_ids),
        counted=torch.tensor(counted),
    )


def _settings(ppo: PpoConfig) -> AdvantageSettings:
    return AdvantageSettings(
        gamma=ppo.gamma,
        lambd=ppo.lambd,
        lambd_critic=ppo.critic_lambd,
        adaptive_lambd=ppo.adaptive_lambd,
        std_normalization=ppo.grpo_std_normalization,
    )


def _bootstrap_values(mine: RolloutBatch, ppo: PpoConfig) -> torch.Tensor | None:
    """V after the whole response for samples cut by length, 0 for the others (--truncation-policy bootstrap)."""
    if ppo.truncation_policy != "bootstrap":
        return None
    return torch.where(torch.tensor(_truncated(mine)), torch.tensor(filled(mine.bootstrap_values)), 0.0)


def _truncated(batch: RolloutBatch) -> np.ndarray:
    cut: np.ndarray = batch.finish == FINISH_CODES.index(FinishReason.LENGTH)
    return cut
