"""Layers built up and named as transformer-engine's, on a CPU: same weights in, same numbers, same weights out."""

from pathlib import Path

import numpy as np
import pytest

from slime_ppo.config.ppo import PpoConfig
from slime_ppo.parallel.layout import ParallelLayout
from slime_ppo.parallel.worker_settings import BatchSettings
from tests.dist.backends.cases import RANKS, Case, make_batch, make_plan
from tests.dist.backends.compare import gradient_error
from tests.helpers.rank_pool import RankPool
from tests.helpers.tiny_family import make_tiny_family

FUSED_RANKS = "tests.dist.backends.fused_ranks"


@pytest.mark.parametrize(("family", "layout"), [("qwen2", ParallelLayout(1)), ("qwen3", ParallelLayout(2, tp_size=2))])
def test_iteration_on_layers_with_fused_norms_equals_that_on_local_ones(
    megatron_pool: RankPool, tmp_path: Path, *, family: str, layout: ParallelLayout
) -> None:
    """Loading, gradients (of norms summed over tensor-parallel ranks) and export go by the names of fused norms."""
    folders = [str(make_tiny_family(tmp_path / name, family, tie=True, seed=seed)) for name, seed in (("a", 0), ("c", 1))]
    case = Case(*folders, None, PpoConfig())
    runs = [case.on(layout, BatchSettings(3, None), tmp_path) for _ in range(2)]
    work = {"batch": make_batch(), "plan": make_plan()}
    expected = megatron_pool.run(f"{RANKS}:iteration", world=layout.num_ranks, case=runs[0], **work)[0]
    fused, num_models = megatron_pool.run(f"{FUSED_RANKS}:iteration", world=layout.num_ranks, case=runs[1], **work)[0]
    assert num_models == 2
    assert all(np.array_equal(fused.columns[name], column) for name, column in expected.columns.items())
    for own, other in ((fused.actor, expected.actor), (fused.critic, expected.critic)):
        assert own.replicas_equal
        assert sum(name.endswith("layernorm.weight") for name in own.gradients[0]) == 4
        assert gradient_error(own.gradients[0], other.gradients[0]) <= 1e-6
        assert gradient_error(own.weights, other.weights) <= 1e-6
