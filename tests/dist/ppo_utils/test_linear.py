"""The lm-head on real gloo ranks against a dense softmax in float64: values, and gradients of states and weight."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.dist.ppo_utils.linear_ranks import TEMPERATURE, linear_case, token_loss
from tests.helpers.rank_pool import RankPool

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def _close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    expected = expected.detach()
    assert found.shape == expected.shape
    if expected.numel() == 0:
        return True
    return bool((found.double() - expected).abs().max() <= TOLERANCE[dtype] * max(1.0, float(expected.abs().max())))


class _Dense:
    """The whole of the states, weight and logits, in float64 and one piece."""

    def __init__(self, case: dict[str, Any], vocab_size: int) -> None:
        self.hidden, self.weight = (case[name].double().clone().requires_grad_() for name in ("hidden", "weight"))
        logits = self.hidden[case["positions"]] @ self.weight[:vocab_size].T / TEMPERATURE
        self._log_p, self._labels = logits.log_softmax(-1), case["labels"]
        self._rows = torch.arange(len(self._labels))
        self.log_probs, self.entropy = self._figures(self._log_p)

    def _figures(self, log_p: Tensor) -> tuple[Tensor, Tensor]:
        return log_p[self._rows, self._labels], -torch.where(log_p > -math.inf, log_p.exp() * log_p, 0.0).sum(-1)

    def inside(self, case: dict[str, Any], *, unrestricted: bool) -> tuple[Tensor, Tensor, Tensor]:
        """(log-probs over the supports, their entropy, mass outside)."""
        supports = case["supports"]
        keep = torch.zeros_like(self._log_p, dtype=torch.bool)
        keep[torch.repeat_interleave(self._rows, supports.counts), supports.ids] = True
        keep[self._rows, self._labels] = True
        if unrestricted:
            keep[supports.unrestricted] = True
        # a large negative number: -inf - -inf has a NaN gradient in the entropy
        log_probs, entropy = self._figures(self._log_p.masked_fill(~keep, -1e9).log_softmax(-1))
        return log_probs, entropy, self._log_p.exp().masked_fill(keep, 0.0).sum(-1)


def _expected(case: dict[str, Any], vocab_size: int) -> dict[str, list[Tensor]]:
    upstream = case["upstream"].double()
    found: dict[str, list[Tensor]] = {}

    def finish(name: str, dense: _Dense, loss: Tensor, values: list[Tensor]) -> None:
        loss.backward()
        assert dense.hidden.grad is not None and dense.weight.grad is not None
        found[name] = [*values, dense.hidden.grad, dense.weight.grad]

    dense = _Dense(case, vocab_size)
    loss = dense.log_probs @ upstream[0] + dense.entropy @ upstream[1]
    finish("plain", dense, loss, [dense.log_probs, dense.entropy])
    dense = _Dense(case, vocab_size)
    inside, _, outside = dense.inside(case, unrestricted=True)
    loss = (torch.stack([inside, dense.log_probs, dense.entropy]) * upstream).sum()
    finish("support", dense, loss, [inside, dense.log_probs, outside, dense.entropy])
    dense = _Dense(case, vocab_size)
    inside, entropy, _ = dense.inside(case, unrestricted=False)
    finish("support_only", dense, inside @ upstream[0] + entropy @ upstream[1], [inside, entropy])
    dense = _Dense(case, vocab_size)
    loss = token_loss(dense.log_probs, dense.entropy, upstream).sum()
    finish("token", dense, 3.0 * loss, [loss, dense.log_probs, dense.entropy])
    return found


# the vocabulary 13 leaves three padding rows in 16; 5 leaves the last two of four ranks with padding only
@pytest.mark.parametrize(("vocab_size", "num_positions"), [(13, 9), (5, 9), (13, 0)])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_linear_head_over_ranks_equals_a_dense_softmax(
    rank_pool: RankPool, dtype: torch.dtype, world: int, sequence_parallel: bool, vocab_size: int, num_positions: int
) -> None:
    sizes = {"vocab_size": vocab_size, "num_positions": num_positions}
    results = rank_pool.run(
        "tests.dist.ppo_utils.linear_ranks:linear", world=world, dtype=dtype, sequence_parallel=sequence_parallel, **sizes
    )
    for name, expected in _expected(linear_case(dtype, **sizes), vocab_size).items():
        *values, hidden, weight = expected
        found = [result[name] for result in results]
        for columns in found:
            assert all(_close(x, wanted, dtype) for x, wanted in zip(columns[:-2], values, strict=True)), name
            assert all(torch.equal(x, first) for x, first in zip(columns[:-2], found[0], strict=False)), name
        assert _close(torch.cat([columns[-1] for columns in found]), weight, dtype), name
        if sequence_parallel:
            assert _close(torch.cat([columns[-2] for columns in found]), hidden, dtype), name
        else:
            assert all(_close(columns[-2], hidden, dtype) for columns in found), name
