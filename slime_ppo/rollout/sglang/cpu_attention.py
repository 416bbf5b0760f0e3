"""SGLang's attention for CPUs without AMX, with one call for a whole batch of decoded tokens.

SGLang's own (`torch_native`) loops over the requests of a batch in Python, in every layer, for every token: for 128 requests of
a small model that is half of the server's time. Where `cpu_launch` registers this one, `--attention-backend torch_batched`
chooses it. Prompts still go through SGLang's loop, which runs once for each of them.
"""

from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch.nn.functional import scaled_dot_product_attention

NAME = "torch_batched"

_MOST_PADDING = 4
"""A batch is padded to its longest sequence; SGLang's loop takes one in which that would copy more than so many times its tokens."""


class BatchedAttention(TorchNativeAttnBackend):  # type: ignore[misc]
    """`TorchNativeAttnBackend` but for how a batch of single tokens is computed."""

    def _run_sdpa_forward_decode(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        *rest: Any,
        **options: Any,
    ) -> torch.Tensor:
        longest = int(seq_lens.max())
        is_plain = not rest[:1] or rest[0] is None  # `encoder_lens`: these models have no encoder
        if not is_plain or len(seq_lens) * longest > _MOST_PADDING * int(seq_lens.sum()):
            whole = (query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, *rest)
            return super()._run_sdpa_forward_decode(*whole, **options)
        slots, seen = cache_slots(req_to_token[req_pool_indices, :longest], seq_lens, options["sliding_window_size"])
        output.copy_(decode_attention(query, k_cache[slots], v_cache[slots], seen, options["scaling"]))
        return output


def cache_slots(rows: torch.Tensor, seq_lens: torch.Tensor, window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Cache slots int [B, L] that requests read, and whether their last token sees them, bool [B, L].

    `rows` int [B, L] are the requests' slots, of which the first `seq_lens` [B] are their own. `window`: how many tokens before
    itself a token sees, None for all. Slots that are not seen are the request's first, whose numbers are finite.
    """
    places = torch.arange(rows.shape[1], device=rows.device)
    seen = places < seq_lens[:, None]
    if window is not None:
        seen &= places >= seq_lens[:, None] - 1 - window
    return torch.where(seen, rows, rows[:, :1]), seen


def decode_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """[B, Hq, D] of one query [B, Hq, D] a request, keys and values [B, L, Hkv, D] and what is seen of them [B, L]."""
    keys, values = keys.to(query.dtype).transpose(1, 2), values.to(query.dtype).transpose(1, 2)
    return scaled_dot_product_attention(
        query[:, :, None],
        keys,
        values,
        attn_mask=seen[:, None, None],
        scale=scaling,
        enable_gqa=query.shape[1] != keys.shape[1],
    ).squeeze(2)
