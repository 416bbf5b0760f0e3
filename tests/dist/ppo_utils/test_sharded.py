"""Sharded functions on real gloo ranks against their unsharded twins: values and gradients."""

import math

import pytest
import torch
from torch import Tensor

from tests.dist.ppo_utils.ranks import vocab_case, whiten_case
from tests.helpers.rank_pool import RankPool

RANKS = "tests.dist.ppo_utils.ranks"
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
# the vocabulary 13 leaves one padding column in 16; 5 leaves the last two of four ranks with padding only
SHAPES = [(16, 16), (16, 13), (16, 5)]


def _close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    expected = expected.detach()
    return bool((found.double() - expected).abs().max() <= TOLERANCE[dtype] * max(1.0, float(expected.abs().max())))


def _plain(case: dict[str, Tensor], vocab_size: int, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    logits = case["logits"].double().requires_grad_()
    log_p = (logits[:, :vocab_size] / temperature).log_softmax(-1)
    return logits, log_p, -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("width", "vocab_size"), SHAPES)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_vocab_log_probs_over_ranks_equal_log_softmax(
    rank_pool: RankPool, world: int, width: int, vocab_size: int, dtype: torch.dtype
) -> None:
    results = rank_pool.run(f"{RANKS}:vocab", world=world, dtype=dtype, width=width, vocab_size=vocab_size, temperature=0.7)
    case = vocab_case(dtype, width, vocab_size)
    logits, log_p, entropy = _plain(case, vocab_size, 0.7)
    picked = log_p.gather(1, case["labels"][:, None])[:, 0]
    upstream = case["upstream"].double()
    (picked @ upstream[0] + entropy @ upstream[1]).backward()
    for log_probs, entropies, _ in results:
        assert _close(log_probs, picked, dtype) and _close(entropies, entropy, dtype)
        assert torch.equal(log_probs, results[0][0])
    assert logits.grad is not None
    assert _close(torch.cat([gradient for *_, gradient in results], 1), logits.grad, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("width", "vocab_size"), SHAPES)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_support_log_probs_over_ranks_equal_a_masked_softmax(
    rank_pool: RankPool, world: int, width: int, vocab_size: int, dtype: torch.dtype
) -> None:
    results = rank_pool.run(f"{RANKS}:support", world=world, dtype=dtype, width=width, vocab_size=vocab_size, temperature=0.7)
    case = vocab_case(dtype, width, vocab_size)
    labels = case["labels"]
    logits, log_p, entropy = _plain(case, vocab_size, 0.7)
    keep = torch.zeros_like(log_p, dtype=torch.bool)
    keep[torch.repeat_interleave(torch.arange(len(labels)), case["support_counts"]), case["support_ids"]] = True
    keep[torch.arange(len(labels)), labels] = True
    restricted = log_p.masked_fill(~keep, -math.inf).log_softmax(-1)
    picked, full = (x.gather(1, labels[:, None])[:, 0] for x in (restricted, log_p))
    expected = [picked, full, log_p.exp().masked_fill(keep, 0.0).sum(-1), entropy]
    (torch.stack([picked, full, entropy]) * case["upstream"].double()).sum().backward()
    for columns in results:
        assert all(_close(found, wanted, dtype) for found, wanted in zip(columns[:4], expected, strict=True))
    assert logits.grad is not None
    assert _close(torch.cat([columns[4] for columns in results], 1), logits.grad, dtype)


@pytest.mark.parametrize("sizes", [[40], [40, 0], [9, 31], [13, 0, 26, 1]])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_whiten_over_ranks_equals_one_rank_for_every_split(rank_pool: RankPool, sizes: list[int], dtype: torch.dtype) -> None:
    whitened = torch.cat(rank_pool.run(f"{RANKS}:whiten", world=len(sizes), sizes=sizes, dtype=dtype))
    x, mask = whiten_case(40, dtype)
    kept = x[mask].double()
    assert _close(whitened[mask], (kept - kept.mean()) / (kept.var() + 1e-8).sqrt(), torch.float32)
    assert whitened[~mask].eq(0).all()
    (alone,) = rank_pool.run(f"{RANKS}:whiten", world=1, sizes=[40], dtype=dtype)
    assert _close(whitened, alone.double(), dtype)


def test_collectives_of_losses_correction_and_whitening_are_as_documented(rank_pool: RankPool) -> None:
    """Forward and backward; those of log-probs and context parallelism are counted where these are tested."""
    expected = {
        "ppo": [0, 0],
        "cispo": [0, 0],
        "gspo": [1, 1],
        "correction per token": [0, 0],
        "correction per sequence": [1, 0],
        "rejection": [1, 0],
        "whitening": [1, 0],
    }
    assert rank_pool.run(f"{RANKS}:collectives", world=2) == [expected] * 2
