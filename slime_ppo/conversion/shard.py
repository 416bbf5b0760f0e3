"""Whole HF tensors -> one rank's shard of a Megatron parameter, and back. Exact: only copies and reshapes."""

from collections.abc import Sequence

import torch

from slime_ppo.conversion.mapping import Split


def shard(
    split: Split, parts: Sequence[torch.Tensor], *, num_query_groups: int, padded_vocab: int, tp_size: int, tp_rank: int
) -> torch.Tensor:
    """The shard of rank `tp_rank` of the parameter fused from the HF tensors `parts`.

    `padded_vocab` is the number of vocabulary rows over all ranks; rows beyond the HF ones are zero.
    """
    if split is Split.REPLICATED:
        return parts[0]
    if split is Split.GATE_UP:
        return torch.cat([part.chunk(tp_size, 0)[tp_rank] for part in parts], 0)
    if split is Split.ROW:
        return parts[0].chunk(tp_size, 1)[tp_rank]
    if split is Split.VOCAB:
        missing = padded_vocab - parts[0].shape[0]
        whole = torch.cat((parts[0], parts[0].new_zeros(missing, *parts[0].shape[1:]))) if missing else parts[0]
    else:
        whole = _fuse_qkv(parts, num_query_groups)
    return whole.chunk(tp_size, 0)[tp_rank]


def unshard(
    split: Split, shards: Sequence[torch.Tensor], *, num_query_groups: int, num_heads: int, vocab_size: int
) -> list[torch.Tensor]:
    """The HF tensors of a parameter from the shards of all tensor-parallel ranks, in rank order; padding is cut off."""
    if split is Split.REPLICATED:
        return [shards[0]]
    if split is Split.GATE_UP:
        halves = [piece.chunk(2, 0) for piece in shards]
        return [torch.cat([half[i] for half in halves], 0) for i in (0, 1)]
    if split is Split.ROW:
        return [torch.cat(list(shards), 1)]
    whole = torch.cat(list(shards), 0)
    if split is Split.VOCAB:
        return [whole[:vocab_size]]
    return _split_qkv(whole, num_query_groups, num_heads)


def _fuse_qkv(parts: Sequence[torch.Tensor], num_query_groups: int) -> torch.Tensor:
    per_group = [part.reshape(num_query_groups, -1, *part.shape[1:]) for part in parts]
    return torch.cat(per_group, 1).reshape(-1, *parts[0].shape[1:])


def _split_qkv(whole: torch.Tensor, num_query_groups: int, num_heads: int) -> list[torch.Tensor]:
    heads_per_group = num_heads // num_query_groups
    grouped = whole.reshape(num_query_groups, heads_per_group + 2, -1, *whole.shape[1:])
    pieces = (grouped[:, :heads_per_group], grouped[:, heads_per_group], grouped[:, heads_per_group + 1])
    return [piece.reshape(-1, *whole.shape[1:]) for piece in pieces]
