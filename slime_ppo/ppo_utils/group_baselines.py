"""Rewards against those of the same prompt: the group figures behind the critic-free estimators (SEMANTICS 13).

Shapes: G samples of the whole rollout. All ranks know these vectors, so that there is no collective and every split of the
samples over ranks gives the same figures. A group are the answers to one prompt, each with one vote per *trajectory*: all
samples of a trajectory carry its reward and get the same result. With r the reward of a trajectory, k the number of those of
its group, mean and unbiased std over them:

    mean   r - mean                      Hu et al., "REINFORCE++" (2025), the baseline variant
    grpo   (r - mean) / (std + 1e-6)     Shao et al., "DeepSeekMath" (2024), section 4.1.2
    rloo   r - mean of the others        Ahmadian et al., "Back to basics: revisiting REINFORCE-style optimization for learning
                                         from human feedback in LLMs" (2024), the RLOO estimator

Samples that are not counted are as if absent and get 0; a group that lost some uses who is left; in a group of one, or of
equal rewards, everyone gets exactly 0.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from slime_ppo.errors import DataError

STD_EPSILON = 1e-6


@dataclass(frozen=True)
class SequenceRewards:
    """What the whole rollout was paid, each [G]: `rewards` (floating), `group_ids`, `trajectory_ids` (int64), and `counted`
    (bool): takes part in baselines, that is, has trainable tokens and is not rejected. A trajectory takes part while any of
    its samples does; all of those share one group and one finite reward."""

    rewards: Tensor
    group_ids: Tensor
    trajectory_ids: Tensor
    counted: Tensor


def mean_scores(rollout: SequenceRewards) -> Tensor:
    """r - mean of the group, float64 [G]."""
    votes = _votes(rollout)
    return votes.per_sample(votes.centred)


def grpo_scores(rollout: SequenceRewards, *, std_normalization: bool) -> Tensor:
    """(r - mean) / (std + 1e-6), float64 [G]; without `std_normalization` r - mean.

    The latter: Liu et al., "Understanding R1-Zero-like training: a critical perspective" (2025), Dr. GRPO.
    """
    votes = _votes(rollout)
    if not std_normalization:
        return votes.per_sample(votes.centred)
    squares = votes.per_group(votes.centred.square())
    std = (squares / (votes.group_sizes - 1.0).clamp(min=1.0)).sqrt()
    return votes.per_sample(votes.centred / (std + STD_EPSILON)[votes.group])


def rloo_scores(rollout: SequenceRewards) -> Tensor:
    """r - mean of the others of the group, float64 [G]: k / (k - 1) times r - mean."""
    votes = _votes(rollout)
    sizes = votes.group_sizes[votes.group]
    return votes.per_sample(votes.centred * sizes / (sizes - 1.0).clamp(min=1.0))


@dataclass(frozen=True)
class _Votes:
    """The t trajectories that count, in groups: `centred` float64 [t] = r - mean of the group, `group` [t] of each,
    `group_sizes` float64. `kept` [k]: the samples that count, `vote` [k]: the trajectory of each."""

    centred: Tensor
    group: Tensor
    group_sizes: Tensor
    kept: Tensor
    vote: Tensor
    num_samples: int

    def per_group(self, x: Tensor) -> Tensor:
        """Sums over the trajectories of each group."""
        return torch.zeros_like(self.group_sizes).index_add(0, self.group, x)

    def per_sample(self, x: Tensor) -> Tensor:
        """`x` [t] for every sample of the trajectory that counts, 0 for the others: [G]."""
        return x.new_zeros(self.num_samples).index_copy(0, self.kept, x[self.vote])


def _votes(rollout: SequenceRewards) -> _Votes:
    kept = rollout.counted.nonzero()[:, 0]
    rewards, group_ids = rollout.rewards[kept].double(), rollout.group_ids[kept]
    trajectories, vote = torch.unique(rollout.trajectory_ids[kept], return_inverse=True)
    own_rewards = _shared(rewards, vote, trajectories, name="rewards")
    own_groups = _shared(group_ids, vote, trajectories, name="group ids")
    if not bool(own_rewards.isfinite().all()):
        bad = int((~own_rewards.isfinite()).nonzero()[0, 0])
        raise DataError(
            f"trajectory {int(trajectories[bad])} has the reward {float(own_rewards[bad])}, but takes part in a baseline; "
            "expected a finite number, or the sample dropped (--on-bad-sample drop)"
        )
    groups, group = torch.unique(own_groups, return_inverse=True)
    sizes = torch.bincount(group, minlength=len(groups)).double()
    # from the lowest of the group upwards: equal rewards are then exactly 0 throughout, and a large offset costs no digits
    lowest = own_rewards.new_zeros(len(groups)).scatter_reduce(0, group, own_rewards, "amin", include_self=False)
    above = own_rewards - lowest[group]
    mean = above.new_zeros(len(groups)).index_add(0, group, above) / sizes
    return _Votes(above - mean[group], group, sizes, kept, vote, len(rollout.rewards))


def _shared(x: Tensor, vote: Tensor, trajectories: Tensor, *, name: str) -> Tensor:
    """The value of `x` [k] that all samples of a trajectory share, [t]."""
    first = x.new_zeros(len(trajectories)).index_copy(0, vote, x)
    differs = (first[vote] != x) & ~(x.isnan() & first[vote].isnan())
    if bool(differs.any()):
        place = int(differs.nonzero()[0, 0])
        raise DataError(
            f"samples of trajectory {int(trajectories[vote[place]])} have different {name}: {first[vote[place]].item()} and "
            f"{x[place].item()}; expected one for all parts of a trajectory, from the reward function or the generate function"
        )
    return first
