"""What the token losses of one optimizer step are divided by (SEMANTICS 9). No torch: the driver makes it.

Made once per role and step from the whole step's masks, before the step is cut into ranks and micro-batches, so that the
gradient is the same however it is cut. Every reducer asks for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np

from slime_ppo.errors import ConfigError, DataError
from slime_ppo.ppo_utils.registries import Reduction


@dataclass(frozen=True)
class Denominator:
    """`sample_weights` float64 [S]: what each trainable token of a sample counts in the step's loss,

    loss = sum over samples s and their trainable tokens t of sample_weights[s] * loss_t.

    `num_tokens` and `num_trajectories` are those of the whole step, also in a part of it made by `select`.
    """

    mode: Reduction
    num_tokens: int
    num_trajectories: int
    sample_weights: np.ndarray

    @property
    def is_empty(self) -> bool:
        """No trainable token in the step: it runs no optimizer step."""
        return self.num_tokens == 0

    def select(self, rows: Sequence[int] | np.ndarray) -> "Denominator":
        """The same step seen by some of its samples, `rows` int [s] in their order: same figures, the weights of those."""
        return replace(self, sample_weights=self.sample_weights[np.asarray(rows, np.int64)])

    def metrics(self) -> dict[str, float]:
        """What the step's losses were divided by, as metrics: trainable tokens, trajectories that have one, and the mode."""
        return {
            "denominator_tokens": float(self.num_tokens),
            "denominator_trajectories": float(self.num_trajectories),
            f"denominator_{self.mode}": 1.0,
        }


def make_denominator(
    trainable_tokens: Sequence[int] | np.ndarray,
    trajectory_ids: Sequence[int] | np.ndarray,
    *,
    mode: Reduction,
    length_norm: float | None = None,
) -> Denominator:
    """The denominator of a step with samples of `trainable_tokens` [S] tokens that belong to `trajectory_ids` [S].

    token-mean               1 / tokens of the step
    seq-mean-token-mean      1 / (trajectories * tokens of the trajectory over all its samples)
    seq-mean-token-sum       1 / trajectories
    seq-mean-token-sum-norm  1 / (trajectories * length_norm)

    Trajectories without a trainable token are not counted, samples without one weigh 0.
    Raises ConfigError when `length_norm` is missing or not positive where the mode needs it; DataError on bad counts.
    """
    tokens = np.asarray(trainable_tokens, np.int64)
    trajectories = np.asarray(trajectory_ids, np.int64)
    if tokens.ndim != 1 or tokens.shape != trajectories.shape:
        raise DataError(
            f"a denominator needs one count and one trajectory id per sample, found shapes {tokens.shape} and {trajectories.shape}"
        )
    if (tokens < 0).any():
        raise DataError(f"sample {int(np.argmin(tokens))} of the step has {int(tokens.min())} trainable tokens; expected 0 or more")
    _, member = np.unique(trajectories, return_inverse=True)
    tokens_of = np.bincount(member, weights=tokens) if len(tokens) else np.zeros(0)
    num_trajectories = int((tokens_of > 0).sum())
    per_sample = _divisors(mode, tokens_of[member] if len(tokens) else tokens_of, int(tokens.sum()), num_trajectories, length_norm)
    weights = np.divide(1.0, per_sample, out=np.zeros(len(tokens)), where=tokens > 0)
    return Denominator(mode=mode, num_tokens=int(tokens.sum()), num_trajectories=num_trajectories, sample_weights=weights)


def _divisors(
    mode: Reduction, own_tokens: np.ndarray, num_tokens: int, num_trajectories: int, length_norm: float | None
) -> np.ndarray:
    """The divisor of each sample; `own_tokens` [S] are the tokens of the sample's whole trajectory."""
    if mode == "token-mean":
        return np.full(own_tokens.shape, float(num_tokens))
    if mode == "seq-mean-token-mean":
        return num_trajectories * own_tokens
    if mode == "seq-mean-token-sum":
        return np.full(own_tokens.shape, float(num_trajectories))
    if mode == "seq-mean-token-sum-norm":
        if length_norm is None or not length_norm > 0:
            raise ConfigError(
                f"loss reduction {mode} has length norm {length_norm}; expected a number of tokens > 0 (--loss-length-norm)"
            )
        return np.full(own_tokens.shape, num_trajectories * length_norm)
    raise ConfigError(f"unknown loss reduction {mode!r}; expected one of {', '.join(get_args(Reduction))}")
