"""Section 5: samples of lognormal lengths dealt to groups, and packed into micro-batches."""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from slime_ppo.data.balance import capped_bins, equal_count_groups
from slime_ppo.data.schedule import split_rows
from tools.bench.measure import Candidate, Case, Scale, error_within

# samples and groups of the balancing; samples of the packing
SIZES: dict[Scale, tuple[int, int, int]] = {"small": (64, 8, 500), "full": (4096, 64, 65_536)}
MAX_TOKENS = 32_768
DP_SIZE, ATTENTION_HALF = 8, 30_000
Groups = Sequence[Any]  # of positions
# sum of lengths and the positions that make it up, as nested pairs
Bin = tuple[int, Any]


def lengths(num_samples: int) -> np.ndarray:
    """Lognormal, median 500, no longer than a micro-batch."""
    drawn = np.random.default_rng(0).lognormal(np.log(500), 1.0, num_samples).astype(np.int64) + 1
    return np.minimum(drawn, MAX_TOKENS)


def imbalance(lens: np.ndarray, groups: Groups) -> float:
    """Heaviest group over the mean, minus 1."""
    loads = [lens[np.asarray(members, np.int64)].sum() for members in groups]
    return float(max(loads) / np.mean(loads) - 1)


def least_imbalance(lens: np.ndarray, num_groups: int) -> float:
    """What no dealing of equal counts can go below: the longest sample together with the shortest ones."""
    ordered = np.sort(lens)
    count = len(lens) // num_groups
    return max(0.0, float((ordered[-1] + ordered[: count - 1].sum()) / (lens.sum() / num_groups) - 1))


def karmarkar_karp(lens: np.ndarray, num_groups: int) -> Groups:
    """Largest differencing, any counts: each sample begins as a partition of its own."""
    return _differenced(([(int(length), position)] for position, length in enumerate(lens)), num_groups)


def karmarkar_karp_equal(lens: np.ndarray, num_groups: int) -> Groups:
    """Largest differencing, equal counts: each round of `num_groups` samples of like length begins as a partition."""
    rounds = np.argsort(lens, kind="stable").reshape(-1, num_groups)
    return _differenced(([(int(lens[i]), int(i)) for i in reversed(one)] for one in rounds), num_groups)


def _differenced(states: Iterable[list[Bin]], num_groups: int) -> Groups:
    """Merge the two partitions of largest spread, heaviest bin with lightest, until one is left."""
    empty: list[Bin] = [(0, None)]
    queue = []
    for number, bins in enumerate(states):
        full = bins + empty * (num_groups - len(bins))
        queue.append((full[-1][0] - full[0][0], number, full))
    heapq.heapify(queue)
    number = len(queue)
    while len(queue) > 1:
        first, second = heapq.heappop(queue)[2], heapq.heappop(queue)[2]
        pairs = zip(first, reversed(second), strict=True)
        merged = sorted(((a[0] + b[0], (a[1], b[1])) for a, b in pairs), key=lambda one: -one[0])
        number += 1
        heapq.heappush(queue, (merged[-1][0] - merged[0][0], number, merged))
    return [list(_members(tree)) for _, tree in queue[0][2]]


def _members(tree: Any) -> Iterator[int]:
    pending = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, tuple):
            pending.extend(node)
        elif node is not None:
            yield node


def first_fit_decreasing(lens: np.ndarray) -> Groups:
    """Each sample, longest first, into the first micro-batch with room; room is found in a tree of maxima."""
    size = 1 << (len(lens) - 1).bit_length()
    room = [MAX_TOKENS] * (2 * size)
    bins: list[list[int]] = []
    for position in np.argsort(-lens, kind="stable").tolist():
        length, node = int(lens[position]), 1
        while node < size:
            node *= 2
            node += room[node] < length
        if node - size == len(bins):
            bins.append([])
        bins[node - size].append(position)
        room[node] -= length
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return bins


def uncapped_bins(lens: np.ndarray, num_groups: int) -> Groups:
    """How the schedule fills a given number of micro-batches, were there no cap."""
    return capped_bins(lens, lens, max_tokens=int(lens.sum()), multiple=num_groups)


def packed(lens: np.ndarray) -> Groups:
    return capped_bins(lens, lens, max_tokens=MAX_TOKENS, multiple=1)


def costs_of(lens: np.ndarray) -> np.ndarray:
    """Operations as data/cost.py counts them, of a model whose attention is half of them at ATTENTION_HALF tokens."""
    return lens * (lens + ATTENTION_HALF)


def ranks_by(lens: np.ndarray, costs: np.ndarray) -> Groups:
    """Rows of each of DP_SIZE ranks, packed under the cap and then dealt."""
    split = split_rows(np.arange(len(lens)), lens, dp_size=DP_SIZE, max_tokens=MAX_TOKENS, costs=costs)
    return [np.concatenate(rank) for rank in split]


def cases(scale: Scale) -> Iterator[Case]:
    num_samples, num_groups, num_packed = SIZES[scale]
    lens = lengths(num_samples)
    reach = error_within(max(1e-3, 1.05 * least_imbalance(lens, num_groups)))
    yield Case(
        title=f"5 {num_samples} samples to {num_groups} groups of equal counts; no grouping is below "
        f"{least_imbalance(lens, num_groups):.3g}",
        candidates=(
            Candidate("Karmarkar-Karp", lambda: karmarkar_karp_equal(lens, num_groups)),
            Candidate("equal_count_groups", lambda: equal_count_groups(lens, num_groups), reach=(reach,)),
        ),
        bases=("Karmarkar-Karp",),
        error_is="imbalance",
        error=lambda groups: imbalance(lens, groups),
    )
    yield Case(
        title=f"5 {num_samples} samples to {num_groups} groups of any count",
        candidates=(
            Candidate("Karmarkar-Karp", lambda: karmarkar_karp(lens, num_groups)),
            Candidate("capped_bins", lambda: uncapped_bins(lens, num_groups)),
        ),
        bases=("Karmarkar-Karp",),
        error_is="imbalance",
        error=lambda groups: imbalance(lens, groups),
    )
    many = lengths(num_packed)
    least = -(-int(many.sum()) // MAX_TOKENS)
    yield Case(
        title=f"5 {num_packed} samples packed into micro-batches of {MAX_TOKENS} tokens, at least {least}",
        candidates=(
            Candidate("first fit decreasing", lambda: first_fit_decreasing(many)),
            Candidate("capped_bins", lambda: packed(many), reach=(error_within(1e-3),)),
        ),
        bases=("first fit decreasing",),
        error_is="micro-batches more than the least, share",
        error=lambda bins: len(bins) / least - 1,
    )
    yield Case(
        title=f"5 {num_samples} samples packed and dealt to {DP_SIZE} ranks, with attention",
        candidates=(
            Candidate("by tokens", lambda: ranks_by(lens, lens)),
            Candidate("by flops", lambda: ranks_by(lens, costs_of(lens)), reach=(error_within(1e-3),)),
        ),
        bases=("by tokens",),
        error_is="imbalance of operations",
        error=lambda groups: imbalance(costs_of(lens), groups),
    )
