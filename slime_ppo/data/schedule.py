"""Which samples go into which optimizer step, data-parallel rank and micro-batch.

Strategy. A pass visits every trajectory once, in an order shuffled by (seed, rollout, pass); the order is cut into steps. The
rows of a step are shared out to the data-parallel ranks and cut into micro-batches. Micro-batches are a matter of memory: the
loss has one denominator per step, so how a step is cut never changes its gradient.

Invariants, each asserted by a test:
1. A pass trains on every sample exactly once ("spread"), or on those of its full steps ("drop"; the others are counted).
2. The samples of a trajectory are in one step. Steps of a pass differ by at most one trajectory; B counts trajectories.
3. The plan is a function of (ids, sizes, seed, rollout, pass): both roles and a resumed run get the same one.
4. The ranks together hold every row of the step exactly once, whatever dp_size is.
5. All ranks have the same number of micro-batches (a collective runs in each): the missing ones are empty.
6. In token mode no micro-batch passes max_tokens, except one that holds a single longer sample.
"""

import heapq
from collections.abc import Sequence
from typing import Literal

import numpy as np

from slime_ppo.data.seeding import derive_seed, shuffled
from slime_ppo.errors import ConfigError
from slime_ppo.types.step_plan import Step, StepPlan


def make_step_plan(
    rollout_id: int,
    trajectory_ids: np.ndarray,
    *,
    global_batch_size: int,
    num_epochs: int,
    seed: int,
    partial_step: Literal["spread", "drop"],
) -> StepPlan:
    """Deal the samples of a rollout over optimizer steps (SEMANTICS 11).

    `trajectory_ids` is int64 [S]; `seed` is the run's; `global_batch_size` B counts trajectories. Each of the `num_epochs`
    passes is dealt over ceil(S/B) steps that differ by at most one trajectory; with "drop" over floor(S/B) steps of exactly B,
    which is none when S < B. `step_index` counts within the pass; `num_dropped` counts samples over all passes.
    """
    if global_batch_size < 1 or num_epochs < 1:
        raise ConfigError(f"global_batch_size {global_batch_size} and num_epochs {num_epochs} must both be at least 1")
    _, trajectory_of_row = np.unique(trajectory_ids, return_inverse=True)
    by_trajectory = np.argsort(trajectory_of_row, kind="stable")
    counts = np.bincount(trajectory_of_row) if len(trajectory_ids) else np.zeros(0, np.int64)
    rows_of_trajectory = np.split(by_trajectory, np.cumsum(counts)[:-1]) if len(counts) else []
    steps: list[Step] = []
    num_dropped = 0
    for pass_index in range(num_epochs):
        order = shuffled(len(counts), seed=derive_seed(seed, rollout_id, 0, pass_index, "step_order"))
        if partial_step == "drop":
            kept = len(order) // global_batch_size * global_batch_size
            num_dropped += int(counts[order[kept:]].sum())
            order = order[:kept]
        num_steps = -(-len(order) // global_batch_size)
        for step_index, chosen in enumerate(np.array_split(order, num_steps) if num_steps else []):
            rows = np.concatenate([rows_of_trajectory[trajectory] for trajectory in chosen])
            steps.append(Step(pass_index=pass_index, step_index=step_index, rows=rows.astype(np.int64)))
    return StepPlan(rollout_id=rollout_id, steps=tuple(steps), num_dropped=num_dropped)


def split_rows(
    rows: np.ndarray,
    total_lens: np.ndarray,
    *,
    dp_size: int,
    micro_batch_size: int | None = None,
    max_tokens: int | None = None,
    multiple_of: int = 1,
) -> list[list[np.ndarray]]:
    """Micro-batches of each data-parallel rank: `result[dp_rank][micro_batch]` is int64, positions in the RolloutBatch.

    `rows` int64 are those of one step (or of a forward-only pass); `total_lens` int64 [S] are prompt plus response tokens of
    *all* samples of the RolloutBatch, looked up by row. Exactly one of the two limits is given: `micro_batch_size` samples
    (rows are dealt round robin, then cut), or `max_tokens` tokens (packed first, then dealt).
    """
    rows = np.asarray(rows, np.int64)
    if micro_batch_size is not None and max_tokens is None:
        dealt = _split_by_count(rows, dp_size, micro_batch_size)
    elif max_tokens is not None and micro_batch_size is None:
        dealt = _split_by_tokens(rows, np.asarray(total_lens, np.int64)[rows], dp_size, max_tokens)
    else:
        raise ConfigError(f"give either micro_batch_size ({micro_batch_size}) or max_tokens ({max_tokens}), not both or neither")
    missing = -len(dealt[0]) % multiple_of
    return [mine + [rows[:0]] * missing for mine in dealt]


def _split_by_count(rows: np.ndarray, dp_size: int, micro_batch_size: int) -> list[list[np.ndarray]]:
    dealt = [rows[dp_rank::dp_size] for dp_rank in range(dp_size)]
    num_micro_batches = -(-len(dealt[0]) // micro_batch_size)
    starts = [index * micro_batch_size for index in range(num_micro_batches)]
    return [[mine[start : start + micro_batch_size] for start in starts] for mine in dealt]


def _split_by_tokens(rows: np.ndarray, lens: np.ndarray, dp_size: int, max_tokens: int) -> list[list[np.ndarray]]:
    bins = _pack(lens, dp_size, max_tokens)
    heaviest_first = sorted(range(len(bins)), key=lambda index: -int(lens[bins[index]].sum()))
    dealt: list[list[np.ndarray]] = [[] for _ in range(dp_size)]
    for position, index in enumerate(heaviest_first):
        turn, offset = divmod(position, dp_size)
        # back and forth, so that the rank that got the heaviest of one round gets the lightest of the next
        dealt[offset if turn % 2 == 0 else dp_size - 1 - offset].append(rows[bins[index]])
    return dealt


def _pack(lens: np.ndarray, multiple: int, max_tokens: int) -> list[np.ndarray]:
    """Bins of positions in `lens`, as few as this heuristic finds, their number divisible by `multiple`.

    More bins than samples leave empty ones. Bins stay within `max_tokens`, except those of one longer sample alone.
    """
    longer = [np.array([position]) for position in np.flatnonzero(lens > max_tokens)]
    fitting = np.flatnonzero(lens <= max_tokens)
    num_bins = len(longer) + -(-int(lens[fitting].sum()) // max_tokens)
    while True:
        num_bins = -(-num_bins // multiple) * multiple
        packed = _refine(_longest_first(lens[fitting], num_bins - len(longer)), lens[fitting])
        if all(lens[fitting[members]].sum() <= max_tokens for members in packed):
            return longer + [fitting[members] for members in packed]
        num_bins += 1


def _longest_first(lens: np.ndarray, num_bins: int) -> list[list[int]]:
    """Longest processing time first: each sample, longest first, into the bin that is lightest so far."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    lightest = [(0, index) for index in range(num_bins)]
    for position in np.argsort(-lens, kind="stable"):
        load, index = heapq.heappop(lightest)
        bins[index].append(int(position))
        heapq.heappush(lightest, (load + int(lens[position]), index))
    return bins


def _refine(bins: Sequence[list[int]], lens: np.ndarray) -> list[np.ndarray]:
    """Swap between the heaviest and the lightest bin while that brings them closer; each round lowers the sum of squares."""
    packed = [np.asarray(members, np.int64) for members in bins]
    loads = np.array([lens[members].sum() for members in packed], np.int64)
    for _ in range(len(lens) if len(packed) > 1 else 0):
        heavy, light = int(loads.argmax()), int(loads.argmin())
        gap = int(loads[heavy] - loads[light])
        # swapping with "nothing", the last column, is a move
        change = lens[packed[heavy]][:, None] - np.append(lens[packed[light]], 0)[None, :]
        useful = (change > 0) & (change < gap)
        if not useful.any():
            break
        give, take = np.unravel_index(np.where(useful, np.abs(2 * change - gap), np.iinfo(np.int64).max).argmin(), change.shape)
        received = packed[light][take : take + 1]
        given = packed[heavy][give : give + 1]
        packed[heavy] = np.concatenate([np.delete(packed[heavy], give), received])
        packed[light] = np.concatenate([np.setdiff1d(packed[light], received, assume_unique=True), given])
        loads[heavy] -= change[give, take]
        loads[light] += change[give, take]
    return packed
