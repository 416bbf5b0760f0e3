"""Policy losses on real gloo ranks that hold parts of the same samples, against one rank that holds all: loss and gradient."""

from dataclasses import replace

import pytest
import torch

from tests.dist.ppo_utils.policy_loss_ranks import CLIPS, loss_and_gradient, make_case
from tests.helpers.rank_pool import RankPool

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", CLIPS)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_policy_loss_over_context_parallel_ranks_equals_one_rank(
    rank_pool: RankPool, world: int, name: str, dtype: torch.dtype
) -> None:
    results = rank_pool.run("tests.dist.ppo_utils.policy_loss_ranks:policy_loss", world=world, name=name, dtype=dtype)
    case = make_case(torch.float64, world)
    alone = replace(case, owner=torch.zeros_like(case.owner))
    loss, gradient, clipped = loss_and_gradient(name, alone, 0, None)
    assert clipped.any() and not clipped[case.mask].all()
    assert sum(result[0] for result in results) == pytest.approx(loss, rel=TOLERANCE[dtype])
    for rank, (_, found, found_clipped) in enumerate(results):
        own = case.owner == rank
        assert torch.equal(found_clipped, clipped[own])
        assert found.shape == gradient[own].shape
        assert (found.double() - gradient[own]).abs().sum() <= TOLERANCE[dtype] * gradient.abs().max()
