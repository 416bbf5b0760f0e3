"""Groups of equal counts and nearly equal token sums: the same number of samples to each rank, and as much work.

Strategy. Samples are dealt longest first, in rounds of one for each group, each round's longest to the group that is lightest
so far. Then the heaviest group swaps one sample with the lightest that has a swap to offer, while such a swap brings the two
closer. No torch.

Invariants, each asserted by a test:
1. Every sample is in exactly one group.
2. Counts differ by at most one.
3. The result is a function of (lens, num_groups).
4. No swap of one sample between the heaviest group and another brings the two closer (unless len(lens) swaps were not enough).
"""

import numpy as np

from slime_ppo.errors import ConfigError


def equal_count_groups(lens: np.ndarray, num_groups: int) -> list[np.ndarray]:
    """Positions in `lens` of each group's samples: `num_groups` arrays of int64, ascending; some empty with too few samples.

    `lens` int64 [S] are tokens per sample, >= 0. Raises ConfigError when num_groups < 1.
    """
    if num_groups < 1:
        raise ConfigError(f"num_groups is {num_groups}; expected at least 1 group to deal {len(lens)} samples to")
    lens = np.asarray(lens, np.int64)
    groups = _dealt(lens, num_groups)
    loads = np.array([lens[members].sum() for members in groups], np.int64)
    for _ in range(len(lens)):
        if not _swap_once(groups, loads, lens):
            break
    return [np.sort(members) for members in groups]


def _dealt(lens: np.ndarray, num_groups: int) -> list[np.ndarray]:
    """Members of each group, longest first."""
    order = np.argsort(-lens, kind="stable")
    loads = np.zeros(num_groups, np.int64)
    owner = np.empty(len(lens), np.int64)
    for start in range(0, len(order), num_groups):
        turn = order[start : start + num_groups]
        lightest_first = np.argsort(loads, kind="stable")[: len(turn)]
        owner[turn] = lightest_first
        loads[lightest_first] += lens[turn]
    return [order[owner[order] == group] for group in range(num_groups)]


def _swap_once(groups: list[np.ndarray], loads: np.ndarray, lens: np.ndarray) -> bool:
    """Swap two samples so that the heaviest group and the lightest possible other come closer, in place; False if none can."""
    heavy = int(loads.argmax())
    for light in np.argsort(loads, kind="stable"):
        gap = int(loads[heavy] - loads[light])
        if gap <= 1:
            return False
        swap = _best_swap(lens[groups[heavy]], lens[groups[light]], gap)
        if swap is None:
            continue
        give, take = swap
        change = lens[groups[heavy][give]] - lens[groups[light][take]]
        groups[heavy][give], groups[light][take] = groups[light][take], groups[heavy][give]
        for group, moved in ((heavy, -change), (light, change)):
            loads[group] += moved
            groups[group] = groups[group][np.argsort(-lens[groups[group]], kind="stable")]
        return True
    return False


def _best_swap(heavy: np.ndarray, light: np.ndarray, gap: int) -> tuple[int, int] | None:
    """Positions in `heavy` and `light` (lengths, longest first) whose swap moves nearest to half the gap; None if none helps."""
    if not len(light):
        return None
    ascending = light[::-1]
    above = np.searchsorted(ascending, heavy - gap / 2)
    nearest = np.clip(np.stack([above - 1, above]), 0, len(light) - 1)
    change = heavy - ascending[nearest]
    distance = np.where((change > 0) & (change < gap), np.abs(2 * change - gap), gap)
    side, give = np.unravel_index(distance.argmin(), distance.shape)
    if distance[side, give] >= gap:
        return None
    return int(give), len(light) - 1 - int(nearest[side, give])
