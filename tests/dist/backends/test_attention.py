"""Packed attention alone and over context-parallel ranks, against softmax written out per sequence in float64."""

import numpy as np
import pytest
import torch

from slime_ppo.parallel.cp_map import CpMap
from tests.helpers.rank_pool import RankPool

RANKS = "tests.dist.backends.attention_ranks"
GROUPS_OF_HEADS, SCALE = 2, 0.3


def _plain(lens: list[int], inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """softmax(q k^T * scale + causal mask) v of each sequence by itself, and its gradients; no padding."""
    leaves = {name: torch.tensor(inputs[name], requires_grad=True) for name in ("query", "key", "value")}
    pieces = []
    for query, key, value in zip(*(leaf.split(lens) for leaf in leaves.values()), strict=True):
        key, value = (x.repeat_interleave(GROUPS_OF_HEADS, 1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) * SCALE
        later = torch.ones(len(query), len(query), dtype=torch.bool).triu(1)
        pieces.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -torch.inf).softmax(-1), value).flatten(1))
    out = torch.cat(pieces)
    out.backward(torch.tensor(inputs["upstream"]))
    return {"out": out.detach().numpy()} | {name: leaf.grad.numpy() for name, leaf in leaves.items() if leaf.grad is not None}


@pytest.mark.parametrize("cp_size", [1, 2, 3, 4])
def test_packed_attention_every_length_over_context_parallel_ranks_equals_softmax_written_out(
    rank_pool: RankPool, cp_size: int
) -> None:
    lens = [*range(1, (2 * cp_size) ** 2 + 9), 3]
    cp_map = CpMap(cp_size, np.array(lens), np.zeros(len(lens), np.int64))
    first = np.cumsum(cp_map.padded_lens) - cp_map.padded_lens
    real = np.concatenate([start + np.arange(length) for start, length in zip(first, lens, strict=True)])
    whole: dict[str, np.ndarray] = {}
    results = rank_pool.run(f"{RANKS}:attention", world=cp_size, lens=lens)
    for index, found in results:
        for name, part in found.items():
            whole.setdefault(name, np.full((int(cp_map.padded_lens.sum()), *part.shape[1:]), np.nan))[index] = part
    inputs = rank_pool.run(f"{RANKS}:real_inputs", world=1, lens=lens, cp_size=cp_size)[0]
    expected = _plain(lens, inputs)
    assert whole.keys() == expected.keys()
    for name, values in expected.items():
        assert np.abs(whole[name][real] - values).max() <= 1e-12 * max(1.0, np.abs(values).max()), name
