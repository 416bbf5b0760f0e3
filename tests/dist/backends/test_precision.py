"""bfloat16 parameters with float32 around them: main parameters, gradients and their reduction, value head, lm-head on request."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from slime_ppo.config.ppo import PpoConfig
from slime_ppo.parallel.layout import ParallelLayout
from slime_ppo.parallel.worker_settings import BatchSettings
from tests.dist.backends.cases import RANKS as TRAINING
from tests.dist.backends.cases import make_batch, make_plan, make_scored_batch
from tests.dist.backends.compare import gradient_error
from tests.dist.backends.conftest import CaseMaker
from tests.helpers.rank_pool import RankPool

RANKS = "tests.dist.backends.precision_ranks"
LAYOUTS = {
    "one_rank": ParallelLayout(1),
    "dp2": ParallelLayout(2),
    "tp2": ParallelLayout(2, tp_size=2),
    "pp2": ParallelLayout(2, pp_size=2),
    "cp2": ParallelLayout(2, cp_size=2),
}
LOSSES = {"actor": ("pg_loss", "entropy_loss"), "critic": ("value_loss",)}
LM_HEAD = "lm_head.weight"


@pytest.fixture(scope="session")
def bf16_runs() -> dict[str, list]:
    """Runs on one rank, filled on first use."""
    return {}


@pytest.mark.parametrize("layout", ["dp2", "tp2", "pp2", "cp2"])
def test_bfloat16_losses_of_any_layout_are_those_of_one_rank_up_to_rounding(
    megatron_pool: RankPool, make_case: CaseMaker, tmp_path: Path, bf16_runs: dict, record_property: object, layout: str
) -> None:
    """Of gradients the difference is reported, and nothing is promised (SEMANTICS 9)."""
    case = make_case(PpoConfig(entropy_coef=0.01, value_clip=0.25), dtype="bfloat16")
    plan = replace(make_plan(), steps=make_plan().steps[:2])

    def train(name: str) -> list:
        own = case.on(LAYOUTS[name], BatchSettings(3, None), tmp_path)
        world = own.layout.num_ranks
        return megatron_pool.run(f"{TRAINING}:train_columns", world=world, case=own, batch=make_scored_batch(), plan=plan)[0]

    if "one_rank" not in bf16_runs:
        bf16_runs["one_rank"] = train("one_rank")
    for own, one, (role, losses) in zip(train(layout), bf16_runs["one_rank"], LOSSES.items(), strict=True):
        # in the second step the weights differ by what Adam makes of gradients that are nearly 0
        for step, expected, tolerance in zip(own.steps, one.steps, (2e-3, 5e-3), strict=True):
            for name in losses:
                assert step[name] == pytest.approx(expected[name], rel=tolerance, abs=tolerance), f"{role} {name}"
        assert own.replicas_equal and all(step["skipped"] == 0 for step in own.steps)
        record_property(f"{role} gradients", gradient_error(own.gradients[0], one.gradients[0]))  # type: ignore[operator]


@pytest.mark.parametrize("layout", ["dp2", "pp2"])
def test_bfloat16_steps_too_small_for_it_accumulate_in_float32_main_parameters(
    megatron_pool: RankPool, make_case: CaseMaker, tmp_path: Path, layout: str
) -> None:
    """Norm weights are 1, whose neighbours in bfloat16 are 2^-8 and 2^-7 away; a step moves them by 1e-5."""
    megatron_pool.preload(RANKS)
    case = make_case(PpoConfig(), dtype="bfloat16", lr=1e-5)
    case = case.on(LAYOUTS[layout], BatchSettings(3, None), tmp_path)
    plan = replace(make_plan(), steps=make_plan().steps[:1])
    ranks = megatron_pool.run(f"{RANKS}:small_steps", world=2, case=case, batch=make_scored_batch(), plan=plan, repeats=3)
    for precision, critic in ranks:
        assert precision.dtypes["parameters"] == {"bfloat16"}
        for dtypes in (precision.dtypes, critic):
            assert dtypes["gradients"] == dtypes["main"] == {"float32"}
        assert precision.dtypes["moments"] == {"float32"}
        assert critic["head"] <= {"float32"}
        assert precision.norm_moved == [0.0, 0.0, 0.0]
        assert 0 < precision.main_moved[0] < precision.main_moved[1] < precision.main_moved[2] <= 4e-5
    assert any("float32" in critic["head"] for _, critic in ranks)
    owners = [precision.norm_main_moved for precision, _ in ranks if precision.norm_main_moved[0] > 0]
    assert owners and all(moved[0] < moved[1] < moved[2] for moved in owners)


@pytest.mark.parametrize(
    ("layout", "tie", "fused"),
    [("one_rank", True, True), ("one_rank", False, False), ("tp2", True, False), ("tp2", False, True), ("pp2", True, True)],
)
def test_fp32_lm_head_any_way_of_computing_it_gives_the_same_log_probs(
    megatron_pool: RankPool, make_case: CaseMaker, tmp_path: Path, *, layout: str, tie: bool, fused: bool
) -> None:
    """The trunk rounds alike with a fused head and without; only float32 logits can then agree to 1e-5. What is loaded and
    exported is the folder's float32 tensor, unrounded."""
    megatron_pool.preload(RANKS)
    case = make_case(PpoConfig(), tie=tie, dtype="bfloat16", fp32_lm_head=True, fuse_lm_head=fused)

    def run(**changes: object) -> tuple:
        own = replace(case, **changes).on(LAYOUTS[layout], BatchSettings(3, None), tmp_path)  # type: ignore[arg-type]
        ranks = megatron_pool.run(f"{RANKS}:lm_head_pass", world=own.layout.num_ranks, case=own, batch=make_batch())
        return next(found for found in ranks if found[0])

    columns, weights, types = run()
    other, _, narrow_types = run(fuse_lm_head=not fused)
    for name in ("old_log_probs", "entropy"):
        assert np.abs(columns[name] - other[name]).max() <= 1e-5, name
    head = "model.embed_tokens.weight" if tie else LM_HEAD
    assert {name for name, dtype in types.items() if dtype == "float32"} == {head}
    assert narrow_types == types
    assert np.array_equal(weights[head], load_file(Path(case.actor_folder) / "model.safetensors")[head])


def test_fp32_lm_head_trains_in_a_layout_with_a_tied_embedding_on_two_stages(
    megatron_pool: RankPool, make_case: CaseMaker, tmp_path: Path
) -> None:
    case = make_case(PpoConfig(entropy_coef=0.01), dtype="bfloat16", fp32_lm_head=True)
    plan = replace(make_plan(), steps=make_plan().steps[:2])
    one, two = (
        megatron_pool.run(f"{TRAINING}:train_columns", world=layout.num_ranks, case=own, batch=make_scored_batch(), plan=plan)[0][0]
        for layout in (LAYOUTS["one_rank"], LAYOUTS["pp2"])
        for own in (case.on(layout, BatchSettings(3, None), tmp_path),)
    )
    assert two.replicas_equal
    assert gradient_error(two.gradients[0], one.gradients[0]) <= 1e-5
    for step, expected in zip(two.steps, one.steps, strict=True):
        assert step["pg_loss"] == pytest.approx(expected["pg_loss"], abs=1e-5)
