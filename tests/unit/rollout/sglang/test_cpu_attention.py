"""One call for a batch reads from the cache what SGLang's loop reads for each request."""

import math

import pytest
import torch

from slime_ppo.rollout.sglang.cpu_attention import decode_attention, is_worthwhile

SEQ_LENS = [1, 7, 4]


def _read(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> torch.Tensor:
    """[Hq, Dv] of one query [Hq, D] that sees keys and values [L, Hkv, ...], head by head."""
    group = query.shape[0] // keys.shape[1]
    heads = []
    for head, one in enumerate(query):
        weights = torch.softmax(scaling * keys[:, head // group] @ one, 0)
        heads.append(weights @ values[:, head // group])
    return torch.stack(heads)


@pytest.mark.parametrize(("kv_heads", "scaling", "window"), [(4, None, None), (2, 0.3, None), (1, None, 2)])
def test_decode_attention_equals_a_loop_over_requests(kv_heads: int, scaling: float | None, window: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(len(SEQ_LENS), 4, 8, generator=generator)
    k_cache = torch.full((40, kv_heads, 8), math.nan)  # what nobody has written must not be read
    v_cache = torch.full((40, kv_heads, 6), math.nan)
    slots = torch.full((len(SEQ_LENS), 20), 39)
    places = torch.randperm(39, generator=generator)
    expected = []
    for row, length in enumerate(SEQ_LENS):
        own, places = places[:length], places[length:]
        slots[row, :length] = own
        k_cache[own] = torch.randn(length, kv_heads, 8, generator=generator)
        v_cache[own] = torch.randn(length, kv_heads, 6, generator=generator)
        seen = own if window is None else own[-window - 1 :]
        expected.append(_read(query[row], k_cache[seen], v_cache[seen], 8**-0.5 if scaling is None else scaling))
    found = decode_attention(query, k_cache, v_cache, slots, torch.tensor(SEQ_LENS), scaling=scaling, window=window)
    torch.testing.assert_close(found, torch.stack(expected))


def test_is_worthwhile_bounds_the_padding() -> None:
    assert is_worthwhile(torch.tensor([9]))
    assert is_worthwhile(torch.tensor([10, 1, 1, 1, 1, 1]))
    assert not is_worthwhile(torch.tensor([100, 1, 1, 1, 1]))
