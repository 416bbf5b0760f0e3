"""Shaping of sequence rewards and choice of groups, before anything is trained on (SEMANTICS 13). No torch.

Shapes: S samples. Yu et al., "DAPO: an open-source LLM reinforcement learning system at scale" (2025).
"""

import math

import numpy as np

from slime_ppo.errors import ConfigError, DataError


def overlong_penalty(response_lens: np.ndarray, *, max_len: int, buffer_len: int, factor: float) -> np.ndarray:
    """What long responses are charged, float64 [S], to be added to the reward: DAPO eq. 13 times `factor`.

    0 up to max_len - buffer_len tokens, falling linearly to -factor at max_len, -factor beyond. Raises ConfigError unless
    0 < buffer_len <= max_len and factor >= 0.
    """
    if not 0 < buffer_len <= max_len:
        raise ConfigError(
            f"the overlong penalty ramps over {buffer_len} tokens up to {max_len}; expected a buffer of at least 1 token, "
            "at most the whole length"
        )
    if not 0 <= factor < math.inf:
        raise ConfigError(f"the overlong penalty is {factor}; expected a finite number >= 0, which is subtracted from the reward")
    left = (max_len - np.asarray(response_lens, np.float64)) / buffer_len
    penalty: np.ndarray = factor * np.clip(left - 1.0, -1.0, 0.0)
    return penalty


def informative_groups(rewards: np.ndarray, group_ids: np.ndarray, trajectory_ids: np.ndarray) -> np.ndarray:
    """Whether the rewards of the sample's group are not all equal, bool [S]: DAPO eq. 11, dynamic sampling.

    Groups of equal rewards, of one trajectory among them, have advantage 0 and teach nothing. Judged on raw `rewards` [S],
    before shaping, which would tell equal answers apart by their length. Raises DataError on a reward that is not finite,
    or that differs between samples of one trajectory.
    """
    raw = np.asarray(rewards, np.float64)
    if not np.isfinite(raw).all():
        bad = int(np.argmin(np.isfinite(raw)))
        raise DataError(
            f"sample {bad} of {len(raw)} (trajectory {trajectory_ids[bad]}) has the reward {raw[bad]}; expected a finite number, "
            "or the sample dropped before its group is judged (--on-bad-sample drop)"
        )
    uneven = _differing(raw, trajectory_ids)
    if uneven.any():
        raise DataError(
            f"samples of trajectory {trajectory_ids[int(np.argmax(uneven))]} have different rewards "
            f"({', '.join(str(r) for r in raw[uneven][:3])}, ...); expected one for all parts of a trajectory"
        )
    return _differing(raw, group_ids)


def _differing(x: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Whether `x` is not the same for all entries with the id of this one, bool [S]."""
    known, member = np.unique(ids, return_inverse=True)
    lowest, highest = np.full(len(known), np.inf), np.full(len(known), -np.inf)
    np.minimum.at(lowest, member, x)
    np.maximum.at(highest, member, x)
    return (lowest < highest)[member]
