"""Attention of a batch of decoded tokens on a CPU, in one call. `cpu_launch` gives it to SGLang.

SGLang's own loops in Python over the requests of a batch, in every layer, for every token: with 128 requests of a small model
that is half of the server's time.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

_MOST_PADDING = 4


def is_worthwhile(seq_lens: torch.Tensor) -> bool:
    """Whether a batch, padded to its longest sequence, has at most four times the tokens of its `seq_lens` [B]."""
    return len(seq_lens) * int(seq_lens.max()) <= _MOST_PADDING * int(seq_lens.sum())


def decode_attention(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """What the last token of each request reads from its cache: [B, Hq, Dv] for `query` [B, Hq, D].

    The caches are [num_slots, Hkv, D or Dv]; the first `seq_lens` [B] of `slots` int [B, >= longest] are those of a request, in the
    order of its tokens. `window`: how many tokens before itself a token sees, None for all. `scaling` None is D ** -0.5.
    """
    longest = int(seq_lens.max())
    places = torch.arange(longest, device=query.device)
    seen = places < seq_lens[:, None]
    if window is not None:
        seen &= places >= seq_lens[:, None] - 1 - window
    # behind its last token a request reads its first: whatever lies elsewhere in the cache may not be finite
    read = torch.where(places < seq_lens[:, None], slots[:, :longest], slots[:, :1])
    return scaled_dot_product_attention(
        query[:, :, None],
        k_cache[read].to(query.dtype).transpose(1, 2),
        v_cache[read].to(query.dtype).transpose(1, 2),
        attn_mask=seen[:, None, None],
        scale=scaling,
        enable_gqa=query.shape[1] != k_cache.shape[1],
    ).squeeze(2)
