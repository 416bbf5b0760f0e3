"""Packed causal attention without transformer-engine: the CPU path, and the fall-back on a GPU."""

import torch
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig


class PackedAttention(MegatronModule):  # type: ignore[misc]
    """softmax(q k^T * scale) v, causal within each sequence of a THD pack; grouped queries.

    q, k, v are scattered into one padded SDPA call and gathered back: much faster on a CPU than one call per sequence,
    with the same numbers (the padding sits behind the last query of its row, where a causal mask hides it).
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
        pg_collection: object | None = None,
    ) -> None:
        super().__init__(config=config)
        if attn_mask_type is not AttnMaskType.causal:
            raise ValueError(f"PackedAttention is causal, layer {layer_number} asks for {attn_mask_type}")
        self.scale = softmax_scale

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
        """query [T, heads, d], key and value [T, groups, d] -> [T, heads * d]."""
        lengths = torch.diff(packed_seq_params.cu_seqlens_q.long())  # type: ignore[union-attr]
        slots = _padded_slots(lengths)
        rows, width = len(lengths), int(packed_seq_params.max_seqlen_q)  # type: ignore[union-attr]

        def pad(x: torch.Tensor) -> torch.Tensor:
            padded = x.new_zeros(rows * width, *x.shape[1:]).index_copy(0, slots, x)
            return padded.view(rows, width, *x.shape[1:]).transpose(1, 2)

        out = F.scaled_dot_product_attention(
            pad(query), pad(key), pad(value), is_causal=True, scale=self.scale, enable_gqa=query.shape[1] != key.shape[1]
        )
        return out.transpose(1, 2).reshape(rows * width, -1).index_select(0, slots)


def _padded_slots(lengths: torch.Tensor) -> torch.Tensor:
    """Position of each packed token in a [rows, max length] grid, flattened."""
    starts = torch.cumsum(lengths, 0) - lengths
    row = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    position = torch.arange(int(lengths.sum()), device=lengths.device) - starts[row]
    return row * lengths.max() + position
