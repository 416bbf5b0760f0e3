"""The coefficient beta of the KL penalty in the reward, and the measurement it follows (SEMANTICS 10). No torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from slime_ppo.errors import ConfigError, DataError, NumericsError


@dataclass(frozen=True)
class MeasuredKL:
    """KL to the reference over one rollout: mean over trajectories of the token sum, and mean over tokens."""

    per_trajectory: float
    per_token: float
    num_trajectories: int


def measure_kl(kl_sums: Sequence[float], trainable_tokens: Sequence[int], trajectory_ids: Sequence[int]) -> MeasuredKL:
    """The figures the controller and the metrics use, from three numbers per sample.

    `kl_sums[s]` is the sum of k1 over the trainable tokens of sample s. Samples of one trajectory add up; a trajectory
    without any trainable token is left out, and rejected samples are given 0 trainable tokens: they leave. With no trajectory
    at all both means are 0.
    """
    total, tokens = 0.0, 0
    trajectories: set[int] = set()
    for kl_sum, num_tokens, trajectory in zip(kl_sums, trainable_tokens, trajectory_ids, strict=True):
        if num_tokens < 0:
            raise DataError(f"a sample of trajectory {trajectory} has {num_tokens} trainable tokens; expected 0 or more")
        if num_tokens > 0:
            total += float(kl_sum)
            tokens += int(num_tokens)
            trajectories.add(int(trajectory))
    return MeasuredKL(total / max(len(trajectories), 1), total / max(tokens, 1), len(trajectories))


@dataclass(frozen=True)
class FixedKL:
    """beta never changes."""

    beta: float

    def update(self, kl: float, n: int) -> "FixedKL":
        return self


@dataclass(frozen=True)
class AdaptiveKL:
    """beta grows when the measured KL is above `target` and shrinks when below.

    beta <- beta (1 + clip(kl / target - 1, -0.2, 0.2) min(n / horizon, 1)): Ziegler et al., "Fine-tuning language models
    from human preferences" (2019), section 2.2; the factor n / horizon is capped so that one large rollout cannot pass 20%.
    """

    beta: float
    target: float
    horizon: float

    def __post_init__(self) -> None:
        if not self.target > 0:
            raise ConfigError(f"the KL target is {self.target}; expected a number > 0 (--kl-target)")
        if not self.horizon > 0:
            raise ConfigError(f"the KL horizon is {self.horizon}; expected a number of trajectories > 0 (--kl-horizon)")

    def update(self, kl: float, n: int) -> "AdaptiveKL":
        """The controller after a rollout of `n` trajectories in which `kl` was measured; call once per rollout that
        trains the actor, after its token rewards were built. n = 0 changes nothing."""
        if not math.isfinite(kl):
            raise NumericsError(
                f"the measured KL to the reference is {kl}; expected a finite number to adapt beta {self.beta} with"
            )
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        return replace(self, beta=self.beta * (1.0 + error * min(n / self.horizon, 1.0)))
