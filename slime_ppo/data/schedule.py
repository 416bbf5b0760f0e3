"""Which samples go into which optimizer step, data-parallel rank and micro-batch.

Strategy. A pass visits every trajectory once, in an order shuffled by (seed, rollout, pass); the order is cut into steps. The
rows of a step are shared out to the data-parallel ranks and cut into micro-batches. Micro-batches are a matter of memory: the
loss has one denominator per step, so how a step is cut never changes its gradient.

Invariants, each asserted by a test:
1. A pass trains on every sample exactly once ("spread"), or on those of its full steps ("drop"; the others are counted).
2. The samples of a trajectory are in one step. Steps of a pass differ by at most one trajectory; B counts trajectories.
3. The plan is a function of (ids, sizes, seed, rollout, pass): both roles and a resumed run get the same one.
4. The ranks together hold every row of the step exactly once, whatever dp_size is.
5. All ranks have the same number of micro-batches (a collective runs in each), at least `multiple_of` and a multiple of it (a
   pipeline is filled in such rounds): the missing ones are empty.
6. No micro-batch passes its limit: micro_batch_size samples, or max_tokens tokens except for one that holds a single longer sample.
7. Ranks are within one sample (fixed size) or micro-batch (token cap) of even counts; of such dealings no swap between the rank of
   the greatest cost and another brings the two closer (data/balance.py).
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from slime_ppo.data.balance import capped_bins, equal_count_groups
from slime_ppo.data.seeding import derive_seed, shuffled
from slime_ppo.errors import ConfigError
from slime_ppo.types.step_plan import Step, StepPlan

Ints = npt.NDArray[np.int64]


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
    rows: Ints,
    lens: Ints,
    *,
    dp_size: int,
    micro_batch_size: int | None = None,
    max_tokens: int | None = None,
    costs: Ints | None = None,
    multiple_of: int = 1,
) -> list[list[Ints]]:
    """Micro-batches of each data-parallel rank: `result[dp_rank][micro_batch]` is int64, positions in the RolloutBatch.

    `rows` int64 are those of one step (or of a forward-only pass). `lens` int64 [S] are the tokens, and `costs` [S] the work (the
    tokens when None; rising with them), of *all* samples of the RolloutBatch, looked up by row. Exactly one limit is given:

    - `micro_batch_size` samples: the rows are dealt to the ranks, their costs even, then cut in the order of `rows`;
    - `max_tokens` tokens: the rows are packed into bins under this cap, then the bins are dealt, costs even, the costliest first.

    Every rank gets a multiple of `multiple_of` micro-batches, at least one multiple. Raises ConfigError when not exactly one
    limit is given, or a number is below 1.
    """
    rows, lens = np.asarray(rows, np.int64), np.asarray(lens, np.int64)
    own_costs = (lens if costs is None else np.asarray(costs, np.int64))[rows]
    if micro_batch_size is not None and max_tokens is None:
        if micro_batch_size < 1 or multiple_of < 1:
            raise ConfigError(f"micro_batch_size {micro_batch_size} and multiple_of {multiple_of} must both be at least 1")
        return _split_by_count(rows, own_costs, dp_size, micro_batch_size, multiple_of)
    if max_tokens is not None and micro_batch_size is None:
        bins = capped_bins(lens[rows], own_costs, max_tokens=max_tokens, multiple=dp_size * multiple_of)
        return _deal_bins([rows[members] for members in bins], [int(own_costs[members].sum()) for members in bins], dp_size)
    raise ConfigError(f"give either micro_batch_size ({micro_batch_size}) or max_tokens ({max_tokens}), not both or neither")


def _split_by_count(rows: Ints, costs: Ints, dp_size: int, micro_batch_size: int, multiple_of: int) -> list[list[Ints]]:
    dealt = [rows[members] for members in equal_count_groups(costs, dp_size)]
    needed = -(-max(len(mine) for mine in dealt) // micro_batch_size)
    starts = [index * micro_batch_size for index in range(max(-(-needed // multiple_of), 1) * multiple_of)]
    return [[mine[start : start + micro_batch_size] for start in starts] for mine in dealt]


def _deal_bins(bins: Sequence[Ints], costs: Sequence[int], dp_size: int) -> list[list[Ints]]:
    """As many bins to each rank, each rank's costliest first: where ranks wait for each other, they do like work at a time."""
    dealt = equal_count_groups(np.array(costs, np.int64), dp_size)
    return [[bins[index] for index in sorted(mine.tolist(), key=lambda index: -costs[index])] for mine in dealt]
