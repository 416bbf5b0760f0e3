"""Blocks of the lm-head: merged statistics against those of all columns at once, and the plan for a device."""

import math

import pytest
import torch

from slime_ppo.ppo_utils.linear_blocks import BlockPlan, merge_statistics
from slime_ppo.ppo_utils.vocab_parallel import VocabShard, row_statistics


def test_merge_statistics_of_blocks_equals_the_statistics_of_all_columns() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = 5 * torch.randn((4, 12), generator=generator, dtype=torch.float64)
    logits[1, :4] = -math.inf  # a block without weight
    logits[2] = -math.inf  # a row without weight, which another rank's columns may have
    labels = torch.tensor([0, 5, 11, 30])
    whole = row_statistics(logits, labels, VocabShard(0, 12, None), temperature=0.7, with_entropy=True)
    blocks = [
        row_statistics(logits[:, start : start + 4], labels, VocabShard(start, 4, None), temperature=0.7, with_entropy=True)
        for start in (0, 4, 8)
    ]
    merged = merge_statistics(torch.stack(blocks), temperature=0.7)
    assert torch.allclose(merged, whole, rtol=1e-12)
    assert merged[2].tolist() == [-math.inf, 0.0, 0.0, -math.inf]


def test_plan_multiplies_bfloat16_as_float32_only_where_the_cpu_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    for has, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda has=has: {"avx2": True, "avx512_bf16": has})
        assert BlockPlan.of(torch.zeros(1, 1, dtype=torch.bfloat16)).dtype == expected
    for dtype, expected in ((torch.float16, torch.float32), (torch.float32,) * 2, (torch.float64,) * 2):
        assert BlockPlan.of(torch.zeros(1, 1, dtype=dtype)).dtype == expected
