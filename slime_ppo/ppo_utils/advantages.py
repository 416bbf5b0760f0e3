"""Advantage estimators: one call each, typed in and out (SEMANTICS 5, 13).

Shapes: n response tokens of this rank, S samples of this rank, G samples of the whole rollout. Under context parallelism
per-token tensors are this rank's part; `mask` [N] and `lens` [S] are those of the whole samples and `context` knows the parts.

    gae                        Schulman et al. (2016): gae.py; the only one that needs a critic
    reinforce_plus_plus        Hu et al., "REINFORCE++" (2025): discounted sum of the token rewards to go
    grpo, rloo, reinforce_plus_plus_baseline
                               reward of the sequence against those of its group, the same for every trainable token:
                               group_baselines.py

Whitening is the caller's next step. Samples that are not counted get advantage 0.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from slime_ppo.errors import ConfigError
from slime_ppo.ppo_utils.cp_ops import ContextShard
from slime_ppo.ppo_utils.gae import Advantages, generalized_advantages
from slime_ppo.ppo_utils.group_baselines import SequenceRewards, grpo_scores, mean_scores, rloo_scores
from slime_ppo.ppo_utils.packed import select

__all__ = [
    "AdvantageInputs",
    "AdvantageSettings",
    "Advantages",
    "SequenceRewards",
    "gae_advantages",
    "grpo_advantages",
    "reinforce_plus_plus_advantages",
    "reinforce_plus_plus_baseline_advantages",
    "rloo_advantages",
]


@dataclass(frozen=True)
class AdvantageInputs:
    """`token_rewards` [n] (KL and process rewards in them; token_rewards.py), `mask` [n], `lens` [S]; `rollout` [G] and
    `rows` int64 [S], which of the G samples these are; `values` [n] and `bootstrap_values` [S] of the critic, None without one.
    With `context`, `mask` and `lens` are those of the whole samples. All on one device."""

    token_rewards: Tensor
    mask: Tensor
    lens: Tensor
    rollout: SequenceRewards
    rows: Tensor
    values: Tensor | None = None
    bootstrap_values: Tensor | None = None
    context: ContextShard | None = None


@dataclass(frozen=True)
class AdvantageSettings:
    """Numbers of the estimators, as the flags of the same names: each takes those that its equation has."""

    gamma: float
    lambd: float
    lambd_critic: float
    adaptive_lambd: float | None = None
    std_normalization: bool = True


def gae_advantages(inputs: AdvantageInputs, settings: AdvantageSettings) -> Advantages:
    """Generalised advantages with lambd (or its adaptive form), returns with lambd_critic (gae.py), both [n].

    Raises ConfigError without values. No collective without context; with it those of generalized_advantages.
    """
    if inputs.values is None:
        raise ConfigError(
            "the advantage estimator gae has no values of a critic; train one, or choose a critic-free estimator "
            "(--advantage-estimator)"
        )
    found = generalized_advantages(
        inputs.token_rewards,
        inputs.values,
        inputs.mask,
        inputs.lens,
        gamma=settings.gamma,
        lambd=settings.lambd,
        lambd_critic=settings.lambd_critic,
        adaptive=settings.adaptive_lambd,
        bootstrap_values=inputs.bootstrap_values,
        context=inputs.context,
    )
    return _counted_only(found, inputs)


def reinforce_plus_plus_advantages(inputs: AdvantageInputs, settings: AdvantageSettings) -> Advantages:
    """A_t = sum over the trainable tokens from t on of gamma^(tokens between) r: [n], also the returns.

    Hu et al., "REINFORCE++" (2025), A_t = r - beta * sum over i >= t of KL_i at gamma 1, the KL penalty being in the token
    rewards: GAE with values 0 and lambda 1. The sum runs on through masked tokens, and gamma counts trainable ones.
    Collectives as gae_advantages.
    """
    rewards = inputs.token_rewards
    found = generalized_advantages(
        rewards,
        torch.zeros_like(rewards),
        inputs.mask,
        inputs.lens,
        gamma=settings.gamma,
        lambd=1.0,
        lambd_critic=1.0,
        context=inputs.context,
    )
    return _counted_only(found, inputs)


def reinforce_plus_plus_baseline_advantages(inputs: AdvantageInputs, settings: AdvantageSettings) -> Advantages:
    """A_t = r - mean of the group at every trainable token: [n], also the returns. No collective."""
    return _spread(mean_scores(inputs.rollout), inputs)


def grpo_advantages(inputs: AdvantageInputs, settings: AdvantageSettings) -> Advantages:
    """A_t = (r - mean) / (std + 1e-6) of the group at every trainable token: [n], also the returns. No collective.

    Without settings.std_normalization A_t = r - mean.
    """
    return _spread(grpo_scores(inputs.rollout, std_normalization=settings.std_normalization), inputs)


def rloo_advantages(inputs: AdvantageInputs, settings: AdvantageSettings) -> Advantages:
    """A_t = r - mean of the others of the group at every trainable token: [n], also the returns. No collective."""
    return _spread(rloo_scores(inputs.rollout), inputs)


def _spread(scores: Tensor, inputs: AdvantageInputs) -> Advantages:
    """`scores` [G] of the samples at each of their trainable tokens here, [n]: float32 (float64 if the rewards are)."""
    dtype = torch.float64 if inputs.token_rewards.dtype == torch.float64 else torch.float32
    mask, lens = _local(inputs)
    advantages = select(scores[inputs.rows].to(dtype).repeat_interleave(lens), mask)
    return Advantages(advantages=advantages, returns=advantages)


def _counted_only(found: Advantages, inputs: AdvantageInputs) -> Advantages:
    """The same, with advantage 0 for the samples that are not counted; what they were paid stays in the returns."""
    _, lens = _local(inputs)
    counted = inputs.rollout.counted[inputs.rows].repeat_interleave(lens)
    return Advantages(advantages=select(found.advantages, counted), returns=found.returns)


def _local(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Mask [n] and lens [S] of the tokens on this rank."""
    if inputs.context is None:
        return inputs.mask, inputs.lens
    return inputs.context.take(inputs.mask), inputs.context.lens
