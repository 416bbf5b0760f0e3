"""Ranks of a layout: tensor parallel fastest, then data parallel."""

import pytest

from slime_ppo.errors import ParallelError
from slime_ppo.parallel.layout import ParallelLayout


def test_layout_tp2_of_six_ranks_has_neighbours_as_tensor_parallel_groups() -> None:
    layout = ParallelLayout(num_ranks=6, tp_size=2)
    assert layout.dp_size == 3 and layout.sequence_parallel
    assert [(layout.dp_rank(rank), layout.tp_rank(rank)) for rank in range(6)] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]


def test_layout_without_tensor_parallel_has_no_sequence_parallel() -> None:
    assert not ParallelLayout(num_ranks=2).sequence_parallel and ParallelLayout(num_ranks=2).dp_size == 2


@pytest.mark.parametrize(("num_ranks", "tp_size"), [(3, 2), (0, 1), (1, 2), (2, 0), (2, -1)])
def test_layout_ranks_that_do_not_divide_are_an_error_with_both_numbers(num_ranks: int, tp_size: int) -> None:
    with pytest.raises(ParallelError, match=f"{num_ranks} ranks cannot be split into tensor-parallel groups of {tp_size}"):
        ParallelLayout(num_ranks=num_ranks, tp_size=tp_size)
