"""Shards against indices worked out by hand, and exact round trips for every split."""

import pytest
import torch

from slime_ppo.conversion.mapping import Split
from slime_ppo.conversion.shard import shard, unshard

# 8 heads in 4 query groups, so that 4 tensor-parallel ranks have one each
HEAD = 2


def _parts(split: Split, groups: int) -> list[torch.Tensor]:
    shapes = {
        Split.REPLICATED: [(6,)],
        Split.ROW: [(3, 8)],
        Split.VOCAB: [(10, 3)],
        Split.QKV: [(2 * groups * HEAD, 3), (groups * HEAD, 3), (groups * HEAD, 3)],
        Split.GATE_UP: [(8, 3), (8, 3)],
    }[split]
    return [torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("split", list(Split))
def test_shard_then_unshard_any_tp_size_is_exact(split: Split, tp_size: int) -> None:
    parts = _parts(split, groups=4)
    shards = [shard(split, parts, num_query_groups=4, padded_vocab=12, tp_size=tp_size, tp_rank=rank) for rank in range(tp_size)]
    assert len({tuple(one.shape) for one in shards}) == 1
    total = sum(one.numel() for one in shards) // (tp_size if split is Split.REPLICATED else 1)
    assert total == sum(part.numel() for part in parts) + (2 * 3 if split is Split.VOCAB else 0)
    whole = unshard(split, shards, num_query_groups=4, num_heads=8, vocab_size=10)
    assert len(whole) == len(parts)
    for found, expected in zip(whole, parts, strict=True):
        assert torch.equal(found, expected)


def test_shard_qkv_interleaves_each_groups_queries_with_its_key_and_value() -> None:
    """Two groups of two heads, head size 1: rows q0 q1 k0 v0 | q2 q3 k1 v1, by hand."""
    q, k, v = torch.arange(4.0)[:, None], 10 + torch.arange(2.0)[:, None], 20 + torch.arange(2.0)[:, None]
    ranks = [shard(Split.QKV, [q, k, v], num_query_groups=2, padded_vocab=0, tp_size=2, tp_rank=rank) for rank in (0, 1)]
    assert [one[:, 0].tolist() for one in ranks] == [[0, 1, 10, 20], [2, 3, 11, 21]]


def test_shard_gate_up_has_both_halves_on_each_rank() -> None:
    """Megatron's MLP chunks its local output in two: gate and up of the same columns must be on one rank."""
    gate, up = torch.arange(4.0)[:, None], 10 + torch.arange(4.0)[:, None]
    ranks = [shard(Split.GATE_UP, [gate, up], num_query_groups=1, padded_vocab=0, tp_size=2, tp_rank=rank) for rank in (0, 1)]
    assert [one[:, 0].tolist() for one in ranks] == [[0, 1, 10, 11], [2, 3, 12, 13]]


def test_shard_vocab_pads_the_end_with_zeros_on_the_last_rank() -> None:
    rows = torch.arange(1.0, 6.0)[:, None]
    ranks = [shard(Split.VOCAB, [rows], num_query_groups=1, padded_vocab=8, tp_size=2, tp_rank=rank) for rank in (0, 1)]
    assert [one[:, 0].tolist() for one in ranks] == [[1, 2, 3, 4], [5, 0, 0, 0]]


def test_shard_row_splits_the_input_dimension() -> None:
    whole = torch.arange(8.0).view(2, 4)
    second = shard(Split.ROW, [whole], num_query_groups=1, padded_vocab=0, tp_size=2, tp_rank=1)
    assert second.tolist() == [[2, 3], [6, 7]]
