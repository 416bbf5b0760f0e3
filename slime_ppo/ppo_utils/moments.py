"""Statistics that merge: each rank sees part of the tokens, the merged result is that of all of them. No torch.

Count, mean and sum of squared deviations (M2) are kept instead of sums of squares, which cancel when the mean is large
against the spread (at mean 1000, std 0.01 they give NaN in float32).
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Moments:
    """Count, mean and M2 = sum (x - mean)^2 of some tokens."""

    count: float = 0.0
    mean: float = 0.0
    m2: float = 0.0

    def merge(self, other: "Moments") -> "Moments":
        """Moments of both sets together.

        Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances" (1979), eq. 2.1.
        """
        count = self.count + other.count
        if count == 0:
            return Moments()
        delta = other.mean - self.mean
        share = other.count / count
        return Moments(count, self.mean + delta * share, self.m2 + other.m2 + delta * delta * self.count * share)

    @property
    def variance(self) -> float:
        """Unbiased variance; 0 for fewer than two tokens."""
        return self.m2 / (self.count - 1) if self.count > 1 else 0.0


@dataclass(frozen=True)
class ExplainedVariance:
    """What 1 - var(returns - values) / var(returns) is computed from (SEMANTICS 8), mergeable over ranks and samples."""

    returns: Moments = Moments()
    residuals: Moments = Moments()
    lowest_return: float = math.inf
    highest_return: float = -math.inf

    def merge(self, other: "ExplainedVariance") -> "ExplainedVariance":
        return ExplainedVariance(
            returns=self.returns.merge(other.returns),
            residuals=self.residuals.merge(other.residuals),
            lowest_return=min(self.lowest_return, other.lowest_return),
            highest_return=max(self.highest_return, other.highest_return),
        )

    @property
    def value(self) -> float | None:
        """1 means a perfect critic, 0 one as good as the mean. None when all returns are equal: nothing to explain."""
        if self.lowest_return >= self.highest_return:
            return None
        return 1.0 - self.residuals.variance / self.returns.variance
