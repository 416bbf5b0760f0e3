"""Ranks of a layout: tensor parallel fastest, then context, data and pipeline parallel."""

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


def test_layout_pipeline_stages_are_outermost_and_the_last_one_ends_the_model() -> None:
    layout = ParallelLayout(num_ranks=8, tp_size=2, pp_size=2, vpp_size=3)
    assert layout.dp_size == 2 and layout.micro_batch_multiple == 2
    found = [(layout.pp_rank(rank), layout.dp_rank(rank), layout.tp_rank(rank)) for rank in range(8)]
    assert found == [(pp, dp, tp) for pp in range(2) for dp in range(2) for tp in range(2)]
    assert [layout.is_last_stage(rank) for rank in range(8)] == [False] * 4 + [True] * 4


def test_layout_experts_share_out_the_same_ranks_anew() -> None:
    layout = ParallelLayout(num_ranks=8, tp_size=2, ep_size=2, etp_size=1)
    assert (layout.dp_size, layout.expert_dp_size, layout.micro_batch_multiple) == (4, 4, 1)
    assert [layout.ep_rank(rank) for rank in range(8)] == [0, 1] * 4
    halved = ParallelLayout(num_ranks=8, ep_size=2, etp_size=2)
    assert [(halved.ep_rank(rank), halved.etp_rank(rank)) for rank in range(4)] == [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.mark.parametrize(
    ("num_ranks", "sizes", "product"),
    [
        (3, {"tp_size": 2}, "2 x 1 x 1 (tensor x context x pipeline parallel)"),
        (1, {"tp_size": 2}, "2 x 1 x 1 (tensor x context x pipeline parallel)"),
        (6, {"tp_size": 2, "cp_size": 2}, "2 x 2 x 1 (tensor x context x pipeline parallel)"),
        (4, {"cp_size": 2, "pp_size": 4}, "1 x 2 x 4 (tensor x context x pipeline parallel)"),
        (4, {"etp_size": 2, "ep_size": 4}, "2 x 4 x 1 (expert tensor x expert x pipeline parallel)"),
    ],
)
def test_layout_ranks_that_do_not_divide_are_an_error_with_all_numbers(num_ranks: int, sizes: dict[str, int], product: str) -> None:
    with pytest.raises(ParallelError) as caught:
        ParallelLayout(num_ranks, **sizes)
    assert f"{num_ranks} ranks cannot be split into groups of {product}" in str(caught.value)


@pytest.mark.parametrize("name", ["num_ranks", "tp_size", "cp_size", "pp_size", "vpp_size", "ep_size", "etp_size"])
@pytest.mark.parametrize("size", [0, -1])
def test_layout_size_below_one_is_an_error_with_its_name(name: str, size: int) -> None:
    with pytest.raises(ParallelError, match=f"{name} {size}"):
        ParallelLayout(**({"num_ranks": 2} | {name: size}))


def test_layout_virtual_stages_without_a_pipeline_are_an_error() -> None:
    with pytest.raises(ParallelError, match="2 virtual stages per rank need a pipeline"):
        ParallelLayout(2, vpp_size=2)
