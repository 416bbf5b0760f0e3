"""Three PPO rollouts of both roles in every layout against the same on one rank (SEMANTICS 9). `make layouts` prints the table."""

from pathlib import Path

import pytest

from slime_ppo.parallel.worker_settings import BatchSettings
from tests.dist.backends.cases import RANKS, Case, make_batch, make_plan
from tests.dist.backends.conftest import CaseMaker
from tests.dist.backends.matrix import DENSE, NUM_ROLLOUTS, PPO, compare
from tests.helpers.rank_pool import RankPool

# Adam divides a gradient by its own size: where that is nearly nothing, rounding alone moves a weight by up to lr per step
WEIGHTS_PER_STEP = 1e-2


@pytest.fixture(scope="session")
def one_rank_runs() -> dict[str, object]:
    """Runs on one rank by model kind, filled on first use."""
    return {}


def _run(pool: RankPool, case: Case) -> object:
    batches = [make_batch(seed=seed) for seed in range(NUM_ROLLOUTS)]
    return pool.run(f"{RANKS}:rollouts", world=case.layout.num_ranks, case=case, batches=batches, plan=make_plan())[0]


@pytest.mark.parametrize("name", list(DENSE))
def test_dense_rollouts_in_any_layout_equal_those_of_one_rank(
    megatron_pool: RankPool, make_case: CaseMaker, one_rank_runs: dict, layout_rows: dict, tmp_path: Path, name: str
) -> None:
    layout, batching = DENSE[name]
    case = make_case(PPO, tie=True)
    if "dense" not in one_rank_runs:
        one_rank_runs["dense"] = _run(megatron_pool, case)
    found = compare(_run(megatron_pool, case.on(layout, batching, tmp_path)), one_rank_runs["dense"], case.lr)
    layout_rows[name] = (layout, found)
    num_steps = len(make_plan().steps)
    assert found.losses <= 1e-6
    assert found.metrics <= 1e-5
    assert found.gradients <= 1e-5
    for rollout, error in enumerate(found.weights, 1):
        assert error <= WEIGHTS_PER_STEP * num_steps * rollout
    assert found.replicas_equal


def test_matrix_has_the_layouts_it_promises() -> None:
    layouts = [layout for layout, _ in DENSE.values()]
    assert len(DENSE) >= 20 and {layout.num_ranks for layout in layouts} == {1, 2, 4, 8}
    assert {type(batching) for _, batching in DENSE.values()} == {BatchSettings}
    for size in ("tp_size", "cp_size", "pp_size", "vpp_size", "dp_size"):
        assert {getattr(layout, size) for layout in layouts} >= {1, 2}, size
