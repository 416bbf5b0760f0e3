"""Shares of context-parallel ranks, without other processes; over real ranks in tests/dist/ppo_utils/test_context_parallel.py."""

import numpy as np
import pytest
import torch

from slime_ppo.errors import ParallelError
from slime_ppo.parallel.cp_map import CpMap
from slime_ppo.ppo_utils.cp_ops import ContextShard, sample_sums

# P = 2, R = 4 and P = 1, R = 1: rank 0 owns tokens 0 and 4, rank 1 tokens 1 to 3 (worked out in cp_map.py)
LENS = (np.array([2, 1]), np.array([4, 1]))


def _shard(rank: int) -> ContextShard:
    return ContextShard.of_rank(CpMap(2, *LENS), rank, group=None)


def test_context_shard_takes_the_tokens_that_the_map_gives_to_the_rank() -> None:
    x = torch.tensor([10.0, 11.0, 12.0, 13.0, 20.0])
    assert _shard(0).take(x).tolist() == [10, 20] and _shard(0).lens.tolist() == [1, 1]
    assert _shard(1).take(x).tolist() == [11, 12, 13] and _shard(1).lens.tolist() == [3, 0]
    assert _shard(1).last_rows.tolist() == [0, 1] and _shard(0).last_rows.tolist() == []


def test_context_shard_shares_laid_one_after_the_other_give_the_batch_in_order() -> None:
    x = torch.arange(5.0)
    width = _shard(0).width
    laid = torch.cat([torch.nn.functional.pad(_shard(r).take(x), (0, width - len(_shard(r).index)), value=-1) for r in (0, 1)])
    assert width == 3 and torch.equal(laid[_shard(0).source], x)


def test_context_shard_of_one_rank_gathers_and_shares_what_it_has() -> None:
    shard = ContextShard.of(CpMap(1, *LENS), None)
    x = torch.arange(5.0, requires_grad=True)
    (found,) = shard.gather(x)
    assert torch.equal(found, x) and not found.requires_grad and torch.equal(shard.take(x), x)
    assert shard.share_last(torch.tensor([1.0, 2.0])).tolist() == [1.0, 2.0]


def test_context_shard_map_of_another_size_than_the_group_is_refused() -> None:
    with pytest.raises(ParallelError, match="group has 1 ranks, but the map splits over 2"):
        ContextShard.of(CpMap(2, *LENS), None)


def test_context_shard_columns_of_wrong_length_or_type_are_refused() -> None:
    with pytest.raises(ParallelError, match="the 2 response tokens that this context-parallel rank owns"):
        _shard(0).gather(torch.zeros(5))
    with pytest.raises(ParallelError, match="type torch.int64"):
        _shard(0).gather(torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ParallelError, match="each of the 5 response tokens"):
        _shard(0).take(torch.zeros(2))


def test_sample_sums_without_group_match_hand_values_and_gradients() -> None:
    x = torch.tensor([1.0, 2.0, 4.0], requires_grad=True)
    sums = sample_sums(x, torch.tensor([2, 0, 1]), None)
    assert sums.tolist() == [3.0, 0.0, 4.0] and sums.dtype == torch.float32
    (sums * torch.tensor([5.0, 6.0, 7.0])).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [5.0, 5.0, 7.0]


def test_sample_sums_of_float32_are_accumulated_in_float64() -> None:
    # 2^24 + 1 is no float32: adding ones one by one to it in float32 stays at 2^24
    x = torch.cat([torch.tensor([2.0**24]), torch.ones(1000)])
    assert sample_sums(x, torch.tensor([1001]), None).item() == 2.0**24 + 1000
