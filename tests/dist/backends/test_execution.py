"""Recomputation and overlap change memory and time, never a number; and overlapped weights are whole before anyone reads them."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from slime_ppo.config.ppo import PpoConfig
from slime_ppo.parallel.layout import ParallelLayout
from slime_ppo.parallel.worker_settings import BatchSettings, ExecutionSettings
from tests.dist.backends.cases import Case, make_plan, make_scored_batch
from tests.dist.backends.compare import gradient_error
from tests.dist.backends.conftest import CaseMaker
from tests.helpers.rank_pool import RankPool

if TYPE_CHECKING:
    from tests.dist.backends.ranks import RoleReport

RANKS = "tests.dist.backends.precision_ranks"
LAYOUTS = {
    "one_rank": ParallelLayout(1),
    "dp2": ParallelLayout(2),
    "pp2": ParallelLayout(2, pp_size=2),
    "cp2": ParallelLayout(2, cp_size=2),
    "tp2": ParallelLayout(2, tp_size=2),
    "pp2_vpp2_dp2": ParallelLayout(4, pp_size=2, vpp_size=2),
    "pp2_dp2": ParallelLayout(4, pp_size=2),
}
FULL = ExecutionSettings(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
BLOCK = ExecutionSettings(recompute_granularity="full", recompute_method="block", recompute_num_layers=1)
CORE = ExecutionSettings(recompute_granularity="selective")
MLPS = ExecutionSettings(recompute_granularity="selective", recompute_modules=("mlp",))
OVERLAPPED = ExecutionSettings(overlap_grad_reduce=True)
GATHERED = ExecutionSettings(overlap_grad_reduce=True, overlap_param_gather=True)


@pytest.fixture(scope="session")
def kept_runs() -> dict[str, list]:
    """Runs by layout in which all activations are kept, filled on first use."""
    return {}


def _case(make_case: CaseMaker, layout: str, folder: Path, execution: ExecutionSettings) -> Case:
    # several micro-batches a step, also for one of two data-parallel ranks: gradients may be sent after the last alone
    case = make_case(PpoConfig(entropy_coef=0.01, value_clip=0.25), execution=execution)
    return case.on(LAYOUTS[layout], BatchSettings(1, None), folder)


def _run(pool: RankPool, function: str, case: Case, *, steps: int = 3) -> list:
    plan = replace(make_plan(), steps=make_plan().steps[:steps])
    world = case.layout.num_ranks
    return pool.run(f"{RANKS}:{function}", world=world, case=case, batch=make_scored_batch(), plan=plan)


def _assert_trained_alike(own: "RoleReport", other: "RoleReport") -> None:
    """Later steps start from weights that differ by what Adam makes of rounding: the shards of an overlapped run are others, and
    with them the order in which the gradient's norm is summed."""
    assert len(own.gradients) == len(other.gradients) > 0
    for step, (found, expected) in enumerate(zip(own.gradients, other.gradients, strict=True)):
        assert gradient_error(found, expected) <= (1e-5 if step else 1e-6), f"step {step}"
    assert own.replicas_equal


@pytest.mark.parametrize(
    ("layout", "execution", "attention", "mlp"),
    [
        ("one_rank", BLOCK, 0.25, 0.25),
        ("pp2", FULL, 1.0, 1.0),
        ("cp2", FULL, 1.0, 1.0),
        ("cp2", CORE, 1.0, 0.0),
        ("tp2", MLPS, 0.0, 1.0),
    ],
)
def test_recompute_gives_the_gradients_of_kept_activations(
    megatron_pool: RankPool,
    make_case: CaseMaker,
    tmp_path: Path,
    kept_runs: dict[str, list],
    *,
    layout: str,
    execution: ExecutionSettings,
    attention: float,
    mlp: float,
) -> None:
    """`attention`, `mlp`: the share of them that runs a second time."""
    megatron_pool.preload(RANKS)
    if layout not in kept_runs:
        kept_runs[layout] = _run(megatron_pool, "train_counted", _case(make_case, layout, tmp_path, ExecutionSettings()), steps=2)
    found = _run(megatron_pool, "train_counted", _case(make_case, layout, tmp_path, execution), steps=2)
    for own, kept in zip(found, kept_runs[layout], strict=True):
        _assert_trained_alike(own.actor, kept.actor)
        _assert_trained_alike(own.critic, kept.critic)
        assert own.attention_calls == (1 + attention) * kept.attention_calls > 0
        assert own.mlp_calls == (1 + mlp) * kept.mlp_calls > 0


@pytest.mark.parametrize("layout", ["dp2", "pp2", "pp2_vpp2_dp2"])
def test_overlapped_reduce_gives_the_gradients_of_one_at_the_end(
    megatron_pool: RankPool, make_case: CaseMaker, tmp_path: Path, layout: str
) -> None:
    """Three steps, so that buckets are sent as soon as they are full (the first step only learns when that is); in the last step
    a data-parallel rank has an empty micro-batch."""
    megatron_pool.preload(RANKS)
    plain, overlapped = (
        _run(megatron_pool, "train_in_small_buckets", _case(make_case, layout, tmp_path, execution))
        for execution in (ExecutionSettings(), OVERLAPPED)
    )
    assert overlapped[0][2] > plain[0][2]
    for own, other in zip(overlapped, plain, strict=True):
        _assert_trained_alike(own[0], other[0])
        _assert_trained_alike(own[1], other[1])


@pytest.mark.parametrize(("layout", "dtype"), [("dp2", "float32"), ("cp2", "float32"), ("pp2_dp2", "bfloat16")])
def test_overlapped_gather_every_reader_finds_the_weights_of_a_run_without_it_bit_for_bit(
    megatron_pool: RankPool, make_case: CaseMaker, tmp_path: Path, *, layout: str, dtype: str
) -> None:
    """Export, pass without gradients, reference swap, offload, and training after all of them."""
    megatron_pool.preload(RANKS)
    runs = []
    for execution in (OVERLAPPED, GATHERED):
        case = make_case(PpoConfig(kl_coef=0.1), lr=1e-3, dtype=dtype, execution=execution)
        runs.append(_run(megatron_pool, "life_of_weights", case.on(LAYOUTS[layout], BatchSettings(2, None), tmp_path), steps=1))
    for own, other in zip(*runs, strict=True):
        for when, tensors in own.items():
            for name, tensor in tensors.items():
                assert np.array_equal(tensor, other[when][name]), f"{when}: {name}"
    exports = [tensors for when, tensors in runs[1][0].items() if "export" in when]
    name = "model.norm.weight"
    assert not np.array_equal(exports[0][name], exports[-1][name])


def test_overlapped_gather_leaves_parameters_stale_until_they_are_completed(
    megatron_pool: RankPool, make_case: CaseMaker, tmp_path: Path
) -> None:
    """Without completing them the comparison above could not fail."""
    megatron_pool.preload(RANKS)
    case = _case(make_case, "dp2", tmp_path, GATHERED)
    for changed, changed_again in _run(megatron_pool, "parameters_after_a_bare_step", case, steps=1):
        assert changed and not changed_again
