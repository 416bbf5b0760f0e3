"""The invariants that data/schedule.py and data/balance.py state, each on a thousand random cases.

Samples may be empty, have one token, or pass the cap; `costs` are the tokens or, as by FLOPs, grow faster than they do.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_ppo.data.balance import capped_bins, equal_count_groups
from slime_ppo.data.schedule import make_step_plan, split_rows

Ints = npt.NDArray[np.int64]

thousand = settings(max_examples=1000, deadline=None)
lengths = st.lists(st.one_of(st.integers(0, 1), st.integers(2, 90)), max_size=24).map(lambda lens: np.array(lens, np.int64))
caps = st.sampled_from([1, 13, 60, 64, 200])
# L (L + offset), as flop_costs makes them; None: the tokens
offsets = st.sampled_from([None, 1, 30, 10_000])


def costs_of(lens: Ints, offset: int | None) -> Ints:
    return lens if offset is None else lens * (lens + offset)


def assert_each_once(members: Sequence[Ints], expected: Ints) -> None:
    held = np.concatenate([np.zeros(0, np.int64), *members])
    assert held.dtype == np.int64
    assert sorted(held.tolist()) == sorted(expected.tolist())


def assert_no_swap_helps(groups: Sequence[Ints], costs: Ints) -> None:
    """By trying each swap of the costliest group."""
    sums = [int(costs[members].sum()) for members in groups]
    heavy = int(np.argmax(sums))
    for light, members in enumerate(groups):
        gap = sums[heavy] - sums[light]
        change = costs[groups[heavy]][:, None] - costs[members][None, :]
        assert gap <= 1 or not ((change > 0) & (change < gap)).any()


@thousand
@given(
    ids=st.lists(st.integers(-3, 12), max_size=30),
    batch=st.integers(1, 9),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 5),
    mode=st.sampled_from(["spread", "drop"]),
)
def test_plan_passes_train_on_every_sample_once_in_whole_trajectories(
    ids: list[int], batch: int, epochs: int, seed: int, mode: Literal["spread", "drop"]
) -> None:
    """Invariants 1 and 2 of the schedule."""
    made = make_step_plan(3, np.array(ids, np.int64), global_batch_size=batch, num_epochs=epochs, seed=seed, partial_step=mode)
    num_trajectories, dropped = len(set(ids)), 0
    for pass_index in range(epochs):
        steps = [step for step in made.steps if step.pass_index == pass_index]
        assert [step.step_index for step in steps] == list(range(len(steps)))
        rows = [int(row) for step in steps for row in step.rows]
        groups = [{ids[row] for row in step.rows} for step in steps]
        sizes = [len(group) for group in groups]
        assert len(rows) == len(set(rows))
        assert all(sum(ids.count(one) for one in group) == len(step.rows) for group, step in zip(groups, steps, strict=True))
        if mode == "spread":
            assert sorted(rows) == list(range(len(ids)))
            assert len(sizes) == -(-num_trajectories // batch)
            assert max(sizes, default=0) - min(sizes, default=0) <= 1
        else:
            assert sizes == [batch] * (num_trajectories // batch)
            dropped += len(ids) - len(rows)
    assert made.num_dropped == dropped


@thousand
@given(
    ids=st.lists(st.integers(0, 9), max_size=20),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 3)),
    seed=st.integers(0, 2**40),
    rollout=st.integers(0, 2**20),
)
def test_plan_is_a_function_of_its_arguments(ids: list[int], sizes: tuple[int, int], seed: int, rollout: int) -> None:
    """Invariant 3: nothing drawn meanwhile, no earlier plan, has a say in it."""

    def planned() -> list[list[int]]:
        made = make_step_plan(
            rollout, np.array(ids), global_batch_size=sizes[0], num_epochs=sizes[1], seed=seed, partial_step="spread"
        )
        return [step.rows.tolist() for step in made.steps]

    first = planned()
    np.random.default_rng(seed).random(3)
    assert planned() == first


@thousand
@given(
    lens=lengths,
    left_out=st.sets(st.integers(0, 23), max_size=6),
    dp_size=st.integers(1, 8),
    by_tokens=st.booleans(),
    size=st.integers(1, 7),
    cap=caps,
    multiple_of=st.integers(1, 4),
    offset=offsets,
)
def test_split_every_row_once_even_ranks_within_the_limit(
    lens: Ints,
    left_out: set[int],
    *,
    dp_size: int,
    by_tokens: bool,
    size: int,
    cap: int,
    multiple_of: int,
    offset: int | None,
) -> None:
    """Invariants 4 to 7 of the schedule."""
    rows = np.array([row for row in range(len(lens))[::-1] if row not in left_out], np.int64)
    costs = costs_of(lens, offset)
    split = split_rows(
        rows,
        lens,
        dp_size=dp_size,
        micro_batch_size=None if by_tokens else size,
        max_tokens=cap if by_tokens else None,
        costs=None if offset is None else costs,
        multiple_of=multiple_of,
    )
    cut = [micro_batch for rank in split for micro_batch in rank]
    assert len(split) == dp_size
    assert_each_once(cut, rows)
    assert len({len(rank) for rank in split}) == 1
    num = len(split[0])
    assert num >= multiple_of and num % multiple_of == 0
    if by_tokens:
        assert all(lens[one].sum() <= cap or len(one) == 1 for one in cut)
        sums = [[int(costs[one].sum()) for one in rank] for rank in split]
        assert all(rank == sorted(rank, reverse=True) for rank in sums)
        flat = np.array([one for rank in sums for one in rank], np.int64)
        assert_no_swap_helps(np.split(np.arange(len(flat)), dp_size), flat)
    else:
        counts = [sum(len(one) for one in rank) for rank in split]
        assert max(counts) - min(counts) <= 1
        assert all(len(one) <= size for one in cut) and num < -(-max(counts) // size) + multiple_of + (max(counts) == 0)
        assert_no_swap_helps([np.concatenate(rank) for rank in split], costs)


@thousand
@given(lens=lengths, dp_size=st.integers(1, 8), limit=st.integers(1, 60), by_tokens=st.booleans(), offset=offsets)
def test_split_is_a_function_of_its_arguments_and_of_no_other_rows_length(
    lens: Ints, *, dp_size: int, limit: int, by_tokens: bool, offset: int | None
) -> None:
    rows = np.arange(len(lens))[::2]
    others = lens.copy()
    others[1::2] += 7
    found = [
        split_rows(
            rows,
            some,
            dp_size=dp_size,
            micro_batch_size=None if by_tokens else limit,
            max_tokens=limit if by_tokens else None,
            costs=costs_of(some, offset),
        )
        for some in (lens, others)
    ]
    first, second = ([[one.tolist() for one in rank] for rank in split] for split in found)
    assert first == second


@thousand
@given(costs=lengths, num_groups=st.integers(1, 8), offset=offsets)
def test_groups_hold_each_sample_once_with_even_counts_and_costs(costs: Ints, num_groups: int, offset: int | None) -> None:
    """Invariants 1, 2, 4 and 5 of the balance."""
    costs = costs_of(costs, offset)
    groups = equal_count_groups(costs, num_groups)
    counts = [len(members) for members in groups]
    assert_each_once(groups, np.arange(len(costs)))
    assert len(groups) == num_groups and max(counts) - min(counts) <= 1
    assert all(members.tolist() == sorted(members) for members in groups)
    assert_no_swap_helps(groups, costs)
    again = equal_count_groups(costs, num_groups)
    assert [one.tolist() for one in again] == [one.tolist() for one in groups]


@thousand
@given(lens=lengths, cap=caps, multiple=st.integers(1, 8), offset=offsets)
def test_bins_hold_each_sample_once_within_the_cap(lens: Ints, cap: int, multiple: int, offset: int | None) -> None:
    """Invariants 1 to 4 of the balance. Best fit leaves at most one bin half empty: that bounds their number."""
    costs = costs_of(lens, offset)
    bins = capped_bins(lens, costs, max_tokens=cap, multiple=multiple)
    assert_each_once(bins, np.arange(len(lens)))
    assert len(bins) >= multiple and len(bins) % multiple == 0
    assert all(lens[members].sum() <= cap or len(members) == 1 for members in bins)
    over = lens > cap
    enough = int(over.sum()) + max(-(-2 * int(lens[~over].sum()) // cap), 1)
    assert len(bins) <= -(-enough // multiple) * multiple
    again = capped_bins(lens, costs, max_tokens=cap, multiple=multiple)
    assert [one.tolist() for one in again] == [one.tolist() for one in bins]


@thousand
@given(lens=lengths, cap=caps, multiple=st.integers(1, 8), offset=offsets)
def test_bins_no_swap_or_move_within_the_cap_brings_two_closer(lens: Ints, cap: int, multiple: int, offset: int | None) -> None:
    """Invariant 5 of the balance, by trying each."""
    costs = costs_of(lens, offset)
    bins = [one for one in capped_bins(lens, costs, max_tokens=cap, multiple=multiple) if lens[one].sum() <= cap]
    sums = [int(costs[members].sum()) for members in bins]
    heavy = int(np.argmax(sums)) if bins else 0
    for members, cost in zip(bins, sums, strict=True):
        gap, room = sums[heavy] - cost, cap - int(lens[members].sum())
        more = [np.append(values[members], 0)[None, :] for values in (costs, lens)]
        change, tokens = (values[bins[heavy]][:, None] - one for values, one in zip((costs, lens), more, strict=True))
        assert gap <= 1 or not ((change > 0) & (change < gap) & (tokens <= room)).any()
