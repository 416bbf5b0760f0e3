"""Random rollouts for the critic-free estimators and the rollout correction, for the references and for the fast functions."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slime_ppo.ppo_utils.advantages import AdvantageInputs, SequenceRewards
from slime_ppo.ppo_utils.reference_estimators import ReferenceOutcome


def random_outcomes(seed: int, *, num_trajectories: int) -> list[ReferenceOutcome]:
    """Trajectories of 1 to 3 samples in a few groups, shuffled; some rewards equal; a third of the samples not counted."""
    generator = torch.Generator().manual_seed(seed)

    def draw(high: int) -> int:
        return int(torch.randint(0, high, (), generator=generator))

    outcomes = []
    for trajectory in range(num_trajectories):
        group, few_rewards = 7 * draw(max(num_trajectories // 3, 1)), draw(2) == 0
        reward = 0.1 * draw(3) if few_rewards else float(torch.randn((), generator=generator, dtype=torch.float64))
        outcomes += [ReferenceOutcome(reward, group, 100 - trajectory, draw(3) > 0) for _ in range(1 + draw(3))]
    return [outcomes[place] for place in torch.randperm(len(outcomes), generator=generator)]


def sequence_rewards(outcomes: Sequence[ReferenceOutcome]) -> SequenceRewards:
    """The same as vectors [G]; rewards of samples that do not count are NaN, which nothing may see."""
    return SequenceRewards(
        rewards=torch.tensor([one.reward if one.counted else torch.nan for one in outcomes], dtype=torch.float64),
        group_ids=torch.tensor([one.group_id for one in outcomes], dtype=torch.int64),
        trajectory_ids=torch.tensor([one.trajectory_id for one in outcomes], dtype=torch.int64),
        counted=torch.tensor([one.counted for one in outcomes], dtype=torch.bool),
    )


def random_advantage_inputs(seed: int, *, num_trajectories: int) -> tuple[AdvantageInputs, list[ReferenceOutcome]]:
    """Samples of 0 to 5 tokens, all of the rollout; masked token rewards and values are NaN."""
    outcomes = random_outcomes(seed, num_trajectories=num_trajectories)
    generator = torch.Generator().manual_seed(seed)
    lens = torch.randint(0, 6, (len(outcomes),), generator=generator)
    num_tokens = int(lens.sum())
    mask = torch.rand(num_tokens, generator=generator) > 0.3
    rewards, values = (torch.randn(num_tokens, generator=generator, dtype=torch.float64).where(mask, torch.nan) for _ in range(2))
    inputs = AdvantageInputs(rewards, mask, lens, sequence_rewards(outcomes), torch.arange(len(outcomes)), values)
    return inputs, outcomes


@dataclass(frozen=True)
class LogProbPair:
    """Log-probs of two policies and mask [N], lens [S]; masked entries are NaN."""

    old: Tensor
    rollout: Tensor
    mask: Tensor
    lens: Tensor

    def trainable(self) -> list[tuple[list[float], list[float]]]:
        """(old, rollout) of the trainable tokens of each sample."""
        columns = (torch.split(x, self.lens.tolist()) for x in (self.old, self.rollout, self.mask))
        return [(old[mask].tolist(), rollout[mask].tolist()) for old, rollout, mask in zip(*columns, strict=True)]


def random_log_probs(seed: int, *, lens: Sequence[int], spread: float = 0.5, masked: float = 0.3) -> LogProbPair:
    """Float64 pairs whose differences have the standard deviation `spread`."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(lens)
    mask = torch.rand(num_tokens, generator=generator) >= masked
    rollout, gap = (torch.randn(num_tokens, generator=generator, dtype=torch.float64) for _ in range(2))
    return LogProbPair(
        old=(rollout + spread * gap).where(mask, torch.nan),
        rollout=rollout.where(mask, torch.nan),
        mask=mask,
        lens=torch.tensor(lens, dtype=torch.int64),
    )
