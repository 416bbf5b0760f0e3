from typing import Literal

import numpy as np
import pytest

from slime_ppo.data.schedule import make_step_plan, split_rows
from slime_ppo.errors import ConfigError
from slime_ppo.types.step_plan import StepPlan


def plan(
    trajectory_ids: list[int],
    batch: int,
    *,
    epochs: int = 1,
    seed: int = 0,
    rollout: int = 0,
    mode: Literal["spread", "drop"] = "spread",
) -> StepPlan:
    ids = np.asarray(trajectory_ids, np.int64)
    return make_step_plan(rollout, ids, global_batch_size=batch, num_epochs=epochs, seed=seed, partial_step=mode)


def rows_of_pass(made: StepPlan, pass_index: int) -> list[int]:
    return [int(row) for step in made.steps if step.pass_index == pass_index for row in step.rows]


def test_plan_ten_trajectories_of_four_spread_evenly() -> None:
    """ceil(10/4) = 3 steps of 4, 3 and 3."""
    made = plan(list(range(10)), 4)
    assert sorted(len(step.rows) for step in made.steps) == [3, 3, 4]
    assert [(step.pass_index, step.step_index) for step in made.steps] == [(0, 0), (0, 1), (0, 2)]
    assert (made.num_dropped, made.steps[0].rows.dtype) == (0, np.int64)


def test_plan_drop_keeps_full_steps_and_counts_the_rest_of_each_pass() -> None:
    made = plan(list(range(10)), 4, epochs=3, mode="drop")
    assert [len(step.rows) for step in made.steps] == [4] * 6
    assert made.num_dropped == 3 * 2


def test_plan_drop_counts_samples_not_trajectories() -> None:
    made = plan([5, 5, 5], 2, mode="drop")
    assert (made.steps, made.num_dropped) == ((), 3)


def test_plan_smaller_than_a_batch_is_one_step() -> None:
    assert [len(step.rows) for step in plan([3, 4], 100).steps] == [2]


def test_plan_of_no_sample_has_no_step() -> None:
    assert plan([], 4, epochs=2).steps == ()


def test_plan_every_pass_is_shuffled_anew_the_first_too() -> None:
    made = plan(list(range(50)), 50, epochs=2)
    first, second = rows_of_pass(made, 0), rows_of_pass(made, 1)
    assert len({tuple(first), tuple(second), tuple(range(50))}) == 3


def test_plan_depends_on_seed_and_rollout_alone() -> None:
    ids = list(range(50))
    orders = [rows_of_pass(plan(ids, 8, seed=seed, rollout=rollout), 0) for seed, rollout in [(1, 2), (1, 2), (1, 3), (2, 2)]]
    assert orders[0] == orders[1]
    assert len({tuple(order) for order in orders}) == 3


@pytest.mark.parametrize(("batch", "epochs"), [(0, 1), (4, 0)])
def test_plan_impossible_sizes_are_refused(batch: int, epochs: int) -> None:
    with pytest.raises(ConfigError, match=f"global_batch_size {batch} and num_epochs {epochs} must both be at least 1"):
        plan([1], batch, epochs=epochs)


def listed(split: list[list[np.ndarray]]) -> list[list[list[int]]]:
    return [[micro_batch.tolist() for micro_batch in rank] for rank in split]


def test_split_fixed_of_equal_samples_deals_in_turn_and_pads_with_empty_micro_batches() -> None:
    """Nine rows over two ranks: 5 and 4, cut by 2, so the second rank lacks its third micro-batch."""
    split = split_rows(np.arange(10, 19), np.ones(19, np.int64), dp_size=2, micro_batch_size=2)
    assert listed(split) == [[[10, 12], [14, 16], [18]], [[11, 13], [15, 17], []]]
    assert split[1][2].dtype == np.int64


def test_split_fixed_deals_even_costs() -> None:
    """9 + 1 and 6 + 5 tokens are 10 and 11; by costs of 100, 10, 9 and 8 it is 100 + 8 against 10 + 9."""
    rows, lens = np.arange(4), np.array([9, 6, 5, 1])
    assert listed(split_rows(rows, lens, dp_size=2, micro_batch_size=1)) == [[[0], [3]], [[1], [2]]]
    by_cost = split_rows(rows, lens, dp_size=2, micro_batch_size=2, costs=np.array([100, 10, 9, 8]))
    assert listed(by_cost) == [[[0, 3]], [[1, 2]]]


def test_split_multiple_of_adds_empty_micro_batches_to_a_fixed_size() -> None:
    split = split_rows(np.arange(3), np.ones(3), dp_size=1, micro_batch_size=1, multiple_of=2)
    assert listed(split) == [[[0], [1], [2], []]]


def test_split_multiple_of_spreads_tokens_over_as_many_bins() -> None:
    """One micro-batch would do; two ranks with a pipeline of two get two each, of one sample."""
    split = split_rows(np.arange(4), np.array([4, 3, 2, 1]), dp_size=2, max_tokens=100, multiple_of=2)
    assert listed(split) == [[[0], [3]], [[1], [2]]]


@pytest.mark.parametrize("limit", ["micro_batch_size", "max_tokens"])
def test_split_of_no_row_is_an_empty_micro_batch_for_each_rank(limit: str) -> None:
    split = split_rows(np.zeros(0, np.int64), np.ones(3), dp_size=2, **{limit: 4})
    assert listed(split) == [[[]], [[]]]


def test_split_tokens_balances_costs_within_the_cap() -> None:
    """8 + 8 and 4 x 4 are as many tokens, but of costs 128 and 64; 8 + 4 + 4 twice are even in both."""
    lens = np.array([8, 8, 4, 4, 4, 4])
    split = split_rows(np.arange(6), lens, dp_size=2, max_tokens=16, costs=lens**2)
    assert [int((lens[one] ** 2).sum()) for rank in split for one in rank] == [96, 96]


@pytest.mark.parametrize("numbers", [{"micro_batch_size": 0}, {"max_tokens": 0}, {"max_tokens": 5, "multiple_of": 0}])
def test_split_impossible_numbers_are_refused(numbers: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="must both be at least 1"):
        split_rows(np.arange(3), np.ones(3), dp_size=1, **numbers)


def test_split_tokens_packs_by_the_rows_own_lengths() -> None:
    """Rows 5, 6, 7 of 60, 50 and 40 tokens within 100: two micro-batches, 60 and 50 + 40."""
    lens = np.array([999, 999, 999, 999, 999, 60, 50, 40])
    split = split_rows(np.array([5, 6, 7]), lens, dp_size=1, max_tokens=100)
    assert sorted(sorted(micro_batch) for micro_batch in listed(split)[0]) == [[5], [6, 7]]


def test_split_tokens_refining_beats_longest_first() -> None:
    """Longest first packs 5 5 4 4 3 3 3 into 11, 8 and 8; 5 + 4, 5 + 4 and 3 + 3 + 3 fit a limit of 9."""
    lens = np.array([5, 5, 4, 4, 3, 3, 3])
    (micro_batches,) = split_rows(np.arange(7), lens, dp_size=1, max_tokens=9)
    assert [int(lens[micro_batch].sum()) for micro_batch in micro_batches] == [9, 9, 9]


def test_split_tokens_longer_sample_is_alone() -> None:
    lens = np.array([10, 500, 10])
    (micro_batches,) = split_rows(np.arange(3), lens, dp_size=1, max_tokens=100)
    assert sorted(sorted(micro_batch.tolist()) for micro_batch in micro_batches) == [[0, 2], [1]]


def test_split_tokens_fewer_rows_than_ranks_leaves_empty_ones() -> None:
    split = split_rows(np.array([2]), np.array([9, 9, 9]), dp_size=3, max_tokens=100)
    assert sorted(listed(split)) == [[[]], [[]], [[2]]]


@pytest.mark.parametrize(("micro_batch_size", "max_tokens"), [(None, None), (2, 100)])
def test_split_needs_exactly_one_limit(micro_batch_size: int | None, max_tokens: int | None) -> None:
    with pytest.raises(ConfigError, match="give either micro_batch_size .* or max_tokens .*, not both or neither"):
        split_rows(np.arange(3), np.ones(3), dp_size=1, micro_batch_size=micro_batch_size, max_tokens=max_tokens)
