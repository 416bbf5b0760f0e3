"""Three PPO rollouts of both roles in every layout against the same on one rank (SEMANTICS 9). `make layouts` prints the table."""

from dataclasses import replace
from pathlib import Path

import pytest

from slime_ppo.parallel.layout import ParallelLayout
from tests.dist.backends.cases import RANKS, Case, make_batch, make_plan
from tests.dist.backends.conftest import CaseMaker
from tests.dist.backends.matrix import DENSE, MIXTURE, NUM_ROLLOUTS, PPO, Comparison, compare
from tests.helpers.rank_pool import RankPool

# Adam divides a gradient by its own size: where that is nearly nothing, rounding alone moves a weight by up to lr per step
WEIGHTS_PER_STEP = 1e-2


@pytest.fixture(scope="session")
def one_rank_runs() -> dict[str, object]:
    """Runs on one rank by model kind, filled on first use."""
    return {}


def _run(pool: RankPool, case: Case) -> object:
    batches = [make_batch(seed=seed) for seed in range(NUM_ROLLOUTS)]
    ranks = pool.run(
        f"{RANKS}:rollouts", world=case.layout.num_ranks, timeout_s=180.0, case=case, batches=batches, plan=make_plan()
    )
    return ranks[0]


def _check(found: Comparison) -> None:
    num_steps = len(make_plan().steps)
    assert found.losses <= 1e-6
    assert found.metrics <= 1e-5
    assert found.gradients <= 1e-5
    for rollout, error in enumerate(found.weights, 1):
        assert error <= WEIGHTS_PER_STEP * num_steps * rollout
    assert found.replicas_equal


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
    _check(found)


@pytest.mark.parametrize("name", list(MIXTURE))
def test_rollouts_of_experts_in_any_layout_equal_those_of_one_rank(
    megatron_pool: RankPool, mixture_case: Case, one_rank_runs: dict, layout_rows: dict, tmp_path: Path, name: str
) -> None:
    layout, batching = MIXTURE[name]
    case = replace(mixture_case, ppo=PPO)
    if "experts" not in one_rank_runs:
        one_rank_runs["experts"] = _run(megatron_pool, case.on(ParallelLayout(1), case.batching, tmp_path))
    found = compare(_run(megatron_pool, case.on(layout, batching, tmp_path)), one_rank_runs["experts"], case.lr)
    layout_rows[name] = (layout, found)
    _check(found)


def test_matrix_has_the_layouts_it_promises() -> None:
    dense, mixture = ([layout for layout, _ in of_kind.values()] for of_kind in (DENSE, MIXTURE))
    assert len(dense) + len(mixture) >= 24
    assert {layout.num_ranks for layout in dense} == {layout.num_ranks for layout in mixture} == {1, 2, 4, 8}
    for size in ("tp_size", "cp_size", "pp_size", "vpp_size", "dp_size"):
        assert {getattr(layout, size) for layout in dense} >= {1, 2}, size
    for size in ("tp_size", "cp_size", "pp_size", "vpp_size", "ep_size", "etp_size", "expert_dp_size"):
        assert {getattr(layout, size) for layout in mixture} >= {1, 2}, size
