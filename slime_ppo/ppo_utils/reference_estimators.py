"""The critic-free estimators and the rollout correction in plain Python, one sample at a time: the oracle of their fast twins.

Nothing here is shared with the functions it checks (group_baselines.py, advantages.py, off_policy.py, reward_shaping.py) but
the settings. Sequences of numbers belong to the n *trainable* tokens of one sample.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from slime_ppo.ppo_utils.off_policy_stats import CorrectionSettings

# Group baselines.


@dataclass(frozen=True)
class ReferenceOutcome:
    """What one sample was paid, and where it belongs. `counted`: it takes part in baselines (trainable tokens, not rejected)."""

    reward: float
    group_id: int
    trajectory_id: int
    counted: bool = True


def group_rewards(outcome: ReferenceOutcome, outcomes: Sequence[ReferenceOutcome]) -> list[float]:
    """Rewards of the trajectories of this sample's group that count, its own first: one vote per trajectory."""
    votes = {outcome.trajectory_id: outcome.reward}
    for other in outcomes:
        if other.counted and other.group_id == outcome.group_id:
            votes[other.trajectory_id] = other.reward
    return list(votes.values())


def mean_score(outcome: ReferenceOutcome, outcomes: Sequence[ReferenceOutcome]) -> float:
    """r - mean of the group; 0 when all are equal, or the sample does not count."""
    if not outcome.counted:
        return 0.0
    rewards = group_rewards(outcome, outcomes)
    if min(rewards) == max(rewards):
        return 0.0
    return outcome.reward - math.fsum(rewards) / len(rewards)


def grpo_score(outcome: ReferenceOutcome, outcomes: Sequence[ReferenceOutcome], *, std_normalization: bool = True) -> float:
    """(r - mean) / (std + 1e-6) of the group, unbiased; without `std_normalization` r - mean."""
    above = mean_score(outcome, outcomes)
    if not std_normalization or above == 0:
        return above
    rewards = group_rewards(outcome, outcomes)
    mean = math.fsum(rewards) / len(rewards)
    std = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
    return above / (std + 1e-6)


def rloo_score(outcome: ReferenceOutcome, outcomes: Sequence[ReferenceOutcome]) -> float:
    """r - mean of the others of the group; 0 when there is no other, all are equal, or the sample does not count."""
    if not outcome.counted:
        return 0.0
    own, *others = group_rewards(outcome, outcomes)
    if all(other == own for other in others):
        return 0.0
    return own - math.fsum(others) / len(others)


# Estimators: advantages of one sample, which are the returns too.


def reward_to_go(token_rewards: Sequence[float], *, gamma: float) -> list[float]:
    """R_i = r_i + gamma R_{i+1} over the trainable tokens: reinforce_plus_plus."""
    to_go = [0.0] * len(token_rewards)
    after = 0.0
    for i in reversed(range(len(token_rewards))):
        to_go[i] = after = token_rewards[i] + gamma * after
    return to_go


def critic_free_advantages(
    estimator: str,
    outcomes: Sequence[ReferenceOutcome],
    token_rewards: Sequence[Sequence[float]],
    *,
    gamma: float,
    std_normalization: bool = True,
) -> list[list[float]]:
    """Advantages of every sample of a rollout, a number per trainable token; all 0 for samples that do not count."""
    advantages = []
    for outcome, rewards in zip(outcomes, token_rewards, strict=True):
        if not outcome.counted:
            advantages.append([0.0] * len(rewards))
        elif estimator == "reinforce_plus_plus":
            advantages.append(reward_to_go(rewards, gamma=gamma))
        elif estimator == "reinforce_plus_plus_baseline":
            advantages.append([mean_score(outcome, outcomes)] * len(rewards))
        elif estimator == "grpo":
            advantages.append([grpo_score(outcome, outcomes, std_normalization=std_normalization)] * len(rewards))
        elif estimator == "rloo":
            advantages.append([rloo_score(outcome, outcomes)] * len(rewards))
        else:
            raise AssertionError(f"no reference for the estimator {estimator!r}")
    return advantages


# Rollout correction.


def bounded_ratio(log_ratio: float) -> float:
    """exp of the log-ratio clamped to +-20."""
    return math.exp(min(max(log_ratio, -20.0), 20.0))


def inside(ratio: float, low: float | None, high: float | None) -> bool:
    """low <= ratio <= high, where None is no bound."""
    return (low is None or ratio >= low) and (high is None or ratio <= high)


def is_rejected(old: Sequence[float], rollout: Sequence[float], settings: CorrectionSettings) -> bool:
    """Whether the sample's ratio, or its geometric mean per token, lies outside the bounds of the rejection."""
    if settings.rejection == "none" or len(old) == 0:
        return False
    log_ratio = math.fsum(o - r for o, r in zip(old, rollout, strict=True))
    if settings.rejection == "geometric":
        log_ratio /= len(old)
    return not inside(bounded_ratio(log_ratio), settings.rejection_low, settings.rejection_high)


def correction_weights(old: Sequence[float], rollout: Sequence[float], settings: CorrectionSettings) -> list[float]:
    """What the policy loss of each trainable token of one sample is multiplied by; all 0 when it is rejected."""
    if is_rejected(old, rollout, settings):
        return [0.0] * len(old)
    gaps = [o - r for o, r in zip(old, rollout, strict=True)]
    if settings.level == "sequence":
        gaps = [math.fsum(gaps)] * len(gaps)
    weights = []
    for ratio in map(bounded_ratio, gaps):
        if settings.mode == "tis":
            weights.append(ratio if settings.cap is None else min(ratio, settings.cap))
        elif settings.mode == "icepop":
            weights.append(ratio if inside(ratio, settings.low, settings.high) else 0.0)
        else:
            weights.append(1.0)
    return weights


def mismatch_figures(old: Sequence[float], rollout: Sequence[float]) -> tuple[float, float, float, float]:
    """(mean |d|, max |d|, mean of exp(d) - 1 - d, effective sample share) of some tokens, d = old - rollout."""
    gaps = [o - r for o, r in zip(old, rollout, strict=True)]
    if not gaps:
        return 0.0, 0.0, 0.0, 1.0
    ratios = [bounded_ratio(d) for d in gaps]
    k3 = math.fsum(ratio - 1 - math.log(ratio) for ratio in ratios) / len(gaps)
    ess = math.fsum(ratios) ** 2 / (len(gaps) * math.fsum(ratio**2 for ratio in ratios))
    return math.fsum(abs(d) for d in gaps) / len(gaps), max(abs(d) for d in gaps), k3, ess


# Rewards before training.


def overlong_penalty(response_len: int, *, max_len: int, buffer_len: int, factor: float) -> float:
    """0 up to max_len - buffer_len, then down along a line to -factor at max_len, -factor beyond."""
    if response_len <= max_len - buffer_len:
        return 0.0
    if response_len <= max_len:
        return factor * (max_len - buffer_len - response_len) / buffer_len
    return -factor


def is_informative(outcome: ReferenceOutcome, outcomes: Sequence[ReferenceOutcome]) -> bool:
    """Whether the raw rewards of the sample's group are not all equal."""
    return len({other.reward for other in outcomes if other.group_id == outcome.group_id}) > 1
