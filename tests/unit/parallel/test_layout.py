"""Ranks of a layout: tensor parallel fastest, then data parallel."""

import pytest

from slime_ppo.errors import ParallelError
from slime_ppo.parallel.layout import ParallelLayout


def test_layout_tp2_of_six_ranks_has_neighbours_as_tensor_parallel_groups() -> None:
    layout = ParallelLayout(num_ranks=6, tp_size=2)
    assert layout.dp_size == 3 and layout.sequence_parallel
    assert [(layout.dp_rank(rank), layout.tp_rank(rank)) for rank in range(6)] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]


def test_layout_context_parallel_ranks_stand_between_tensor_and_data_parallel_ones() -> None:
    layout = ParallelLayout(num_ranks=12, tp_size=2, cp_size=3)
    assert layout.dp_size == 2
    found = [(layout.dp_rank(rank), layout.cp_rank(rank), layout.tp_rank(rank)) for rank in range(12)]
    assert found == [(dp, cp, tp) for dp in range(2) for cp in range(3) for tp in range(2)]


def test_layout_without_tensor_parallel_has_no_sequence_parallel() -> None:
    assert not ParallelLayout(num_ranks=2).sequence_parallel and ParallelLayout(num_ranks=2).dp_size == 2


@pytest.mark.parametrize(("num_ranks", "tp_size"), [(3, 2), (0, 1), (1, 2), (2, 0), (2, -1)])
def test_layout_ranks_that_do_not_divide_are_an_error_with_both_numbers(num_ranks: int, tp_size: int) -> None:
    with pytest.raises(ParallelError, match=f"{num_ranks} ranks cannot be split into tensor-parallel groups of {tp_size}"):
        ParallelLayout(num_ranks=num_ranks, tp_size=tp_size)


@pytest.mark.parametrize(("num_ranks", "tp_size", "cp_size"), [(6, 2, 2), (2, 1, 0), (2, 2, 2)])
def test_layout_context_parallel_size_that_does_not_divide_is_an_error_with_all_numbers(
    num_ranks: int, tp_size: int, cp_size: int
) -> None:
    with pytest.raises(ParallelError) as caught:
        ParallelLayout(num_ranks, tp_size, cp_size)
    assert f"{num_ranks} ranks cannot be split into groups of {tp_size} (tensor parallel) x {cp_size}" in str(caught.value)
