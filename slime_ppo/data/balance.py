"""Samples shared out evenly: to groups of equal counts, or into bins that keep within a token cap.

Strategy. Samples are dealt costliest first, to whoever has the least so far. Then the group of the greatest cost swaps one sample
with the cheapest group that has such a swap to offer, while this brings the two closer; a bin may also move one for nothing. Bins
are tried in the least number that could hold all tokens; if those overflow, best fit decreasing tells how many are enough.
Of two samples the longer one costs more, and equally long ones cost the same: the swaps under the cap rely on it. No torch.

Invariants, each asserted by a test:
1. Every sample is in exactly one group, or bin.
2. Counts of groups differ by at most one. The number of bins divides by `multiple`, and is at least that.
3. No bin passes `max_tokens`, except one that holds a single longer sample.
4. The result is a function of (lens, costs) and the other numbers.
5. No swap (bins: or move) of one sample, within the cap, between the costliest group and one of the NUM_TRIED cheapest brings the
   two closer, unless MOST_SWAPS were not enough. A bin of a single longer sample stays out of this.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slime_ppo.errors import ConfigError

Ints = npt.NDArray[np.int64]

# they bound the time for samples of which no few swaps make even groups, such as tens of thousands longer than half the cap
NUM_TRIED, MOST_SWAPS = 64, 4096


def equal_count_groups(costs: Ints, num_groups: int) -> list[Ints]:
    """Positions in `costs` of each group's samples: `num_groups` arrays of int64, ascending; some empty with too few samples.

    `costs` int64 [S], >= 0. Raises ConfigError when num_groups < 1.
    """
    if num_groups < 1:
        raise ConfigError(f"num_groups is {num_groups}; expected at least 1 group to deal {len(costs)} samples to")
    costs = np.asarray(costs, np.int64)
    return _evened(_dealt_in_rounds(costs, num_groups), _Load(costs, costs, int(costs.sum())), moves=False)


def capped_bins(lens: Ints, costs: Ints, *, max_tokens: int, multiple: int) -> list[Ints]:
    """Positions in `lens` of each bin's samples: as few bins as found, their number a multiple of `multiple`; some may be empty.

    `lens` and `costs` int64 [S], >= 0, are tokens and any measure of work. The cap `max_tokens` is in tokens; a longer sample is
    in a bin of its own. Raises ConfigError when max_tokens or multiple is below 1.
    """
    if max_tokens < 1 or multiple < 1:
        raise ConfigError(f"max_tokens {max_tokens} and multiple {multiple} must both be at least 1")
    alone = [np.array([position]) for position in np.flatnonzero(lens > max_tokens)]
    fitting = np.flatnonzero(lens <= max_tokens)
    load = _Load(costs[fitting], lens[fitting], max_tokens)

    def rounded(num_bins: int) -> int:
        return max(-(-(num_bins + len(alone)) // multiple), 1) * multiple - len(alone)

    # samples without tokens need a bin too
    least = max(-(-int(load.lens.sum()) // max_tokens), min(len(fitting), 1))
    bins = _spread(load, rounded(least))
    if bins is None:
        enough = _best_fit(load.lens, max_tokens)
        num_bins = rounded(len(enough))
        bins = _spread(load, num_bins) or enough + [_NOTHING] * (num_bins - len(enough))
    return alone + [fitting[members] for members in _evened(bins, load, moves=True)]


_NOTHING = np.zeros(0, np.int64)


@dataclass(frozen=True)
class _Load:
    """Cost and tokens of each sample, int64 [S], and the tokens that a group may hold."""

    costs: Ints
    lens: Ints
    max_tokens: int


def _dealt_in_rounds(costs: Ints, num_groups: int) -> list[Ints]:
    """Costliest first, in rounds of one sample for each group; a round's costliest to the group that has the least so far."""
    order = np.argsort(-costs, kind="stable")
    sums = np.zeros(num_groups, np.int64)
    owner = np.empty(len(costs), np.int64)
    for start in range(0, len(order), num_groups):
        turn = order[start : start + num_groups]
        least_first = np.argsort(sums, kind="stable")[: len(turn)]
        owner[turn] = least_first
        sums[least_first] += costs[turn]
    return [np.flatnonzero(owner == group) for group in range(num_groups)]


def _spread(load: _Load, num_bins: int) -> list[Ints] | None:
    """`num_bins` bins of about equally many tokens; None when one of them passes the cap."""
    anything = _Load(load.lens, load.lens, int(load.lens.sum()))
    bins = _evened(_longest_first(load.lens, num_bins), anything, moves=True)
    return None if any(load.lens[members].sum() > load.max_tokens for members in bins) else bins


def _longest_first(lens: Ints, num_bins: int) -> list[Ints]:
    """Each sample, longest first, into the bin that has the least so far."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    least_first = [(0, index) for index in range(num_bins)]
    for position in np.argsort(-lens, kind="stable").tolist():
        tokens, index = least_first[0]
        bins[index].append(position)
        heapq.heapreplace(least_first, (tokens + int(lens[position]), index))
    return [np.array(members, np.int64) for members in bins]


def _best_fit(lens: Ints, max_tokens: int) -> list[Ints]:
    """Each sample, longest first, into the fullest bin that has room for it: at most 11/9 of the least number, and one bin."""
    bins: list[list[int]] = []
    by_room: list[tuple[int, int]] = []
    for position in np.argsort(-lens, kind="stable").tolist():
        length = int(lens[position])
        at = bisect_left(by_room, (length, 0))
        if at < len(by_room):
            room, index = by_room.pop(at)
        else:
            room, index = max_tokens, len(bins)
            bins.append([])
        bins[index].append(position)
        insort(by_room, (room - length, index))
    return [np.array(members, np.int64) for members in bins]


def _evened(groups: Sequence[Ints], load: _Load, *, moves: bool) -> list[Ints]:
    """The groups after the swaps (and moves) that even out their costs; members ascending."""
    groups = [_costliest_first(members, load.costs) for members in groups]
    costs, tokens = (np.array([one[members].sum() for members in groups], np.int64) for one in (load.costs, load.lens))
    for _ in range(MOST_SWAPS if len(groups) > 1 else 0):
        swap = _find_swap(groups, costs, tokens, load=load, moves=moves)
        if swap is None:
            break
        for group, gone, new in ((swap.heavy, swap.give, swap.take), (swap.light, swap.take, swap.give)):
            members = np.concatenate((groups[group][~np.isin(groups[group], gone)], new))
            groups[group] = _costliest_first(members, load.costs)
            costs[group] += load.costs[new].sum() - load.costs[gone].sum()
            tokens[group] += load.lens[new].sum() - load.lens[gone].sum()
    return [np.sort(members) for members in groups]


def _costliest_first(members: Ints, costs: Ints) -> Ints:
    return members[np.argsort(-costs[members], kind="stable")]


@dataclass(frozen=True)
class _Swap:
    """Group `heavy` gives the one sample `give` [1] to `light`, for `take` [1], or for nothing [0]."""

    heavy: int
    light: int
    give: Ints
    take: Ints


def _find_swap(groups: Sequence[Ints], costs: Ints, tokens: Ints, *, load: _Load, moves: bool) -> _Swap | None:
    """The best swap between the costliest group and the cheapest that has any to offer; None if none of those tried has."""
    heavy = int(costs.argmax())
    for light in _cheapest_first(costs):
        gap = int(costs[heavy] - costs[light])
        if gap <= 1:
            return None
        offered = groups[light][::-1]
        # a move is a swap with a sample without cost and tokens, the cheapest of all
        light_costs, light_lens = load.costs[offered], load.lens[offered]
        if moves:
            offered = np.append(-1, offered)
            light_costs, light_lens = np.append(0, light_costs), np.append(0, light_lens)
        if not len(offered):
            continue
        own = groups[heavy]
        # the cheapest that leaves half the gap or less, the one before, and the shortest for which there is room
        above = np.searchsorted(light_costs, load.costs[own] - gap / 2)
        roomy = np.searchsorted(light_lens, load.lens[own] - (load.max_tokens - tokens[light]))
        near = np.clip(np.stack((above - 1, above, roomy)), 0, len(offered) - 1)
        change = load.costs[own] - light_costs[near]
        fits = load.lens[own] - light_lens[near] <= load.max_tokens - tokens[light]
        distance = np.where((change > 0) & (change < gap) & fits, np.abs(2 * change - gap), gap)
        side, give = np.unravel_index(distance.argmin(), distance.shape)
        if distance[side, give] < gap:
            take = offered[near[side, give]]
            return _Swap(heavy, light, own[give : give + 1], np.array([take])[: int(take >= 0)])
    return None


def _cheapest_first(costs: Ints) -> Iterator[int]:
    """The NUM_TRIED cheapest groups; they are sorted only when the first is not the one."""
    yield int(costs.argmin())
    yield from np.argsort(costs, kind="stable")[1:NUM_TRIED].tolist()
