"""Packed causal attention without transformer-engine: the CPU path, and the fall-back on a GPU.

Shapes: T packed tokens of this rank, W context-parallel ranks that each hold T of the same sequences, B sequences.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig


class PackedAttention(MegatronModule):  # type: ignore[misc]
    """softmax(q k^T * scale) v, causal within each sequence of a THD pack; grouped queries.

    q, k, v are scattered into one padded SDPA call and gathered back: much faster on a CPU than one call per sequence,
    with the same numbers (the padding sits behind the last query of its row, where a causal mask hides it).

    Under context parallelism a rank has the queries of its two chunks of each sequence (parallel/cp_map.py), gathers keys and
    values of all ranks, and masks by position in the sequence.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        if attn_mask_type is not AttnMaskType.causal:
            raise ValueError(f"PackedAttention is causal, layer {layer_number} asks for {attn_mask_type}")
        self.scale = softmax_scale
        self.cp_group: dist.ProcessGroup | None = None if pg_collection is None else pg_collection.cp

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: object | None = None,
    ) -> torch.Tensor:
        """query [T, heads, d], key and value [T, groups, d] -> [T, heads * d]. Under context parallelism collective over its
        ranks: an all-gather of keys and values forward, a reduce-scatter of their gradients backward."""
        lengths = torch.diff(packed_seq_params.cu_seqlens_q.long())  # type: ignore[union-attr]
        if self.cp_group is None or self.cp_group.size() == 1:
            return packed_attention(query, key, value, lengths, scale=self.scale)
        # the second argument: every rank has a gradient of its own for all keys, so that they are summed
        both = gather_from_sequence_parallel_region(torch.cat((key, value), 1), True, group=self.cp_group)
        whole_key, whole_value = both.chunk(2, 1)
        return context_attention(
            query,
            whole_key,
            whole_value,
            lengths,
            cp_size=self.cp_group.size(),
            cp_rank=self.cp_group.rank(),
            scale=self.scale,
        )


def packed_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: torch.Tensor, *, scale: float | None
) -> torch.Tensor:
    """Attention within sequences of `lengths` int64 [B]: query [T, heads, d], key and value [T, groups, d] -> [T, heads * d]."""
    slots, width = _padded_slots(lengths), int(lengths.max())
    spread_query, spread_key, spread_value = (_spread(x, slots, len(lengths), width) for x in (query, key, value))
    out = F.scaled_dot_product_attention(
        spread_query,
        spread_key,
        spread_value,
        is_causal=True,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return _packed(out, slots)


def context_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: torch.Tensor,
    *,
    cp_size: int,
    cp_rank: int,
    scale: float | None,
) -> torch.Tensor:
    """Attention of one context-parallel rank's queries: query [T, heads, d], key and value [W * T, groups, d], one rank's share
    after the other -> [T, heads * d].

    `lengths` int64 [B] are those of the whole sequences, each a multiple of 2 * cp_size.
    """
    own = lengths // cp_size
    width, whole_width, chunk = int(own.max()), int(lengths.max()), own // 2
    slot = torch.arange(width, device=lengths.device)
    second = slot >= chunk[:, None]  # beyond the rank's own tokens of a row it is of no matter
    position = slot + torch.where(second, (2 * cp_size - 2 - cp_rank), cp_rank) * chunk[:, None]
    visible = position[..., None] >= torch.arange(whole_width, device=lengths.device)
    query_slots, key_slots = _padded_slots(own), _gathered_slots(lengths, cp_size)
    spread_key, spread_value = (_spread(x, key_slots, len(lengths), whole_width) for x in (key, value))
    out = F.scaled_dot_product_attention(
        _spread(query, query_slots, len(lengths), width),
        spread_key,
        spread_value,
        attn_mask=visible[:, None],
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return _packed(out, query_slots)


def _spread(x: torch.Tensor, slots: torch.Tensor, rows: int, width: int) -> torch.Tensor:
    """[T, heads, d] -> [rows, heads, width, d], token t at place slots[t] of the grid, zeros elsewhere."""
    padded = x.new_zeros(rows * width, *x.shape[1:]).index_copy(0, slots, x)
    return padded.view(rows, width, *x.shape[1:]).transpose(1, 2)


def _packed(x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The inverse, heads laid together: [rows, heads, width, d] -> [T, heads * d]."""
    return x.transpose(1, 2).flatten(0, 1).flatten(1).index_select(0, slots)


def _padded_slots(lengths: torch.Tensor) -> torch.Tensor:
    """Position of each packed token in a [B, max length] grid, flattened."""
    row, position = _rows_and_places(lengths)
    return row * lengths.max() + position


def _gathered_slots(lengths: torch.Tensor, cp_size: int) -> torch.Tensor:
    """The same for the packs of all context-parallel ranks, one after the other, in the grid of the whole sequences."""
    row, place = _rows_and_places(lengths // cp_size)
    chunk = (lengths // (2 * cp_size))[row]
    second = place >= chunk
    ranks = torch.arange(cp_size, device=lengths.device)[:, None]
    position = place + torch.where(second, 2 * cp_size - 2 - ranks, ranks) * chunk
    return (row * lengths.max() + position).flatten()


def _rows_and_places(lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequence of each packed token, and its place among the tokens of that sequence."""
    row = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    starts = torch.cumsum(lengths, 0) - lengths
    return row, torch.arange(len(row), device=lengths.device) - starts[row]
