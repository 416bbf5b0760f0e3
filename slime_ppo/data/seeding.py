"""Where every random number of a run comes from: a hash of what it is for, never of when it is drawn (SEMANTICS 14)."""

from hashlib import blake2b

import numpy as np


def derive_seed(run_seed: int, rollout_id: int, sample_id: int, turn: int, purpose: str) -> int:
    """A seed in [0, 2^63) that depends on the five arguments alone.

    BLAKE2b of the arguments in decimal, so it is the same on every machine, in every process and Python version.
    """
    key = "/".join([str(int(run_seed)), str(int(rollout_id)), str(int(sample_id)), str(int(turn)), purpose])
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little") >> 1


def shuffled(n: int, *, seed: int) -> np.ndarray:
    """A permutation of range(n), int64 [n].

    Sorts raw Philox words: numpy promises the raw stream of a bit generator for good, `Generator.permutation` it does not.
    """
    words = np.random.Philox(np.random.SeedSequence(seed)).random_raw(n)
    return np.argsort(words, kind="stable").astype(np.int64)
