"""What goes into and comes out of reference.py. Shapes: P prompt and R response tokens of one sample, n trainable ones."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slime_ppo.ppo_utils.off_policy_stats import CorrectionSettings

Model = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class ReferenceSample:
    """A prompt [P], a response [R], which response tokens are trainable [R], and a reward.

    `support[i]`: the ids the sampler could have drawn at response token i (None = the whole vocabulary).
    `bootstraps`: the response was cut and the critic's value after it stands for the rest.
    `group_id`: the prompt it answers. `rollout_log_probs` [R]: what the engine drew it with.
    """

    prompt_ids: Tensor
    response_ids: Tensor
    loss_mask: Tensor
    reward: float
    trajectory_id: int
    support: Sequence[Tensor | None] | None = None
    process_rewards: Sequence[float] | None = None
    bootstraps: bool = False
    group_id: int = 0
    rollout_log_probs: Sequence[float] | None = None

    @property
    def token_ids(self) -> Tensor:
        return torch.cat([self.prompt_ids, self.response_ids])

    @property
    def trainable(self) -> list[int]:
        """Response indices of the trainable tokens."""
        return [i for i, trained in enumerate(self.loss_mask.tolist()) if trained]


@dataclass(frozen=True)
class ReferenceSettings:
    """The numbers of one PPO run; names and meaning as the flags of the trainer. `correction` None = no rollout correction."""

    vocab_size: int
    temperature: float = 1.0
    advantage_estimator: str = "gae"
    std_normalization: bool = True
    gamma: float = 1.0
    lambd: float = 0.95
    lambd_critic: float = 0.95
    adaptive_lambd: float | None = None
    normalize_advantages: bool = True
    whiten_each_step: bool = False
    policy_loss: str = "ppo"
    correction: CorrectionSettings | None = None
    eps_clip: float | None = 0.2
    eps_clip_high: float = 0.2
    eps_clip_c: float | None = None
    value_clip: float = 0.2
    entropy_coef: float = 0.0
    entropy_support: str = "full"
    kl_support: str = "full"
    kl_coef: float = 0.0
    kl_reward_type: str = "k1"
    kl_loss_coef: float = 0.0
    kl_loss_type: str = "k3"
    use_unbiased_kl: bool = False
    kl_target: float | None = None
    kl_horizon: float = 1.0
    kl_early_stop: float | None = None
    loss_reduction: str = "token-mean"
    loss_length_norm: float = 1.0
    clip_grad: float = 1.0


@dataclass(frozen=True)
class ReferenceStep:
    """One optimizer step: which samples, and the learning rate of each role."""

    rows: Sequence[int]
    actor_lr: float
    critic_lr: float


@dataclass(frozen=True)
class ScoredSample:
    """What training needs of one sample, per *trainable* token (lists of n): fixed while the models move.

    `old_log_probs` over the support, `old_full_log_probs` over the vocabulary, `ref_log_probs` over what KL compares;
    `old_values` and `value_after` of the critic, zeros without one; `weights` of the rollout correction, all 0 if `rejected`.
    """

    sample: ReferenceSample
    old_log_probs: list[float]
    old_full_log_probs: list[float]
    ref_log_probs: list[float]
    old_values: list[float]
    value_after: float
    weights: list[float]
    rejected: bool
    rewards: list[float]
    returns: list[float]
    advantages: list[float]

    @property
    def counts(self) -> bool:
        """It takes part in baselines, whitening, the measured KL and the value loss."""
        return bool(self.sample.trainable) and not self.rejected


@dataclass(frozen=True)
class CriticReport:
    """One step of the critic; the gradient norm is that before clipping."""

    value_loss: float
    grad_norm: float


@dataclass(frozen=True)
class ActorReport:
    """One step of the actor; entropy and ppo_kl (k3 of old and current policy) are token means."""

    policy_loss: float
    loss: float
    entropy: float
    ppo_kl: float
    grad_norm: float


@dataclass(frozen=True)
class StepReport:
    """One planned step; `actor` is None when the actor ran no step, `critic` when there is no critic."""

    critic: CriticReport | None
    actor: ActorReport | None


@dataclass(frozen=True)
class IterationReport:
    """One iteration: the scored samples, KL to the reference per trajectory, the next beta, and each step."""

    scored: Sequence[ScoredSample]
    kl: float
    next_kl_coef: float
    explained_variance: float | None
    steps: Sequence[StepReport]
