"""Every layout and every cut into micro-batches computes what one rank computes (SEMANTICS 9), on real gloo ranks.

Each layout also cuts its samples differently, so that both are compared at once. Old log-probs and values are moved by noise
after they were computed, so that ratios and values reach their clips in the first step.
"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from slime_ppo.config.correction import CorrectionConfig
from slime_ppo.config.ppo import PpoConfig
from slime_ppo.parallel.layout import ParallelLayout
from slime_ppo.parallel.worker_settings import BatchSettings
from slime_ppo.types.step_plan import StepPlan
from tests.dist.backends.cases import RANKS, RESPONSE_LENS, Case, make_batch, make_plan, make_scored_batch
from tests.dist.backends.compare import assert_reports_equal, gradient_error
from tests.dist.backends.conftest import CaseMaker
from tests.dist.backends.models import drawn_nearby
from tests.helpers.rank_pool import RankPool

if TYPE_CHECKING:
    from tests.dist.backends.ranks import Report

NOISE = 0.2
CASES = {
    "tied": (PpoConfig(kl_coef=0.1, value_clip=0.25, eps_clip_c=1.1), True, 1.0),
    "untied": (
        PpoConfig(
            loss_reduction="seq-mean-token-mean",
            use_kl_loss=True,
            kl_loss_coef=0.3,
            entropy_coef=0.02,
            value_clip=0.25,
            truncation_policy="bootstrap",
            lambd_critic=0.8,
        ),
        False,
        0.7,
    ),
    "support": (PpoConfig(loss_reduction="seq-mean-token-sum", kl_coef=0.2, value_clip=0.0, gamma=0.9), True, 1.3),
    "step_whitened": (
        PpoConfig(
            loss_reduction="seq-mean-token-sum-norm",
            loss_length_norm=7.0,
            whiten_domain="step",
            use_kl_loss=True,
            kl_loss_coef=0.2,
            kl_loss_type="k2",
            value_clip=0.25,
        ),
        True,
        1.0,
    ),
}
# critic-free: both samples 5 and 6 are rejected, the whole third step with them; sample 2 shares the trajectory of sample 5
CASES["rejecting"] = (
    PpoConfig(
        advantage_estimator="grpo", policy_loss="gspo", eps_clip=0.01, use_kl_loss=True, kl_loss_coef=0.1, use_unbiased_kl=True
    ),
    True,
    1.0,
)
REJECTING = CorrectionConfig(mode="icepop", level="sequence", low=0.8, high=1.4, rejection="sequence")
LAYOUTS = {
    "one_rank_single": (ParallelLayout(1), BatchSettings(1, None)),
    "dp2": (ParallelLayout(2), BatchSettings(1, None)),
    "tp2": (ParallelLayout(2, tp_size=2), BatchSettings(100, None)),
    "tp2_dp2": (ParallelLayout(4, tp_size=2), BatchSettings(None, 20)),
    "cp2": (ParallelLayout(2, cp_size=2), BatchSettings(2, None)),
    "cp2_tp2": (ParallelLayout(4, tp_size=2, cp_size=2), BatchSettings(100, None)),
    "cp2_dp2": (ParallelLayout(4, cp_size=2), BatchSettings(None, 10)),
    "cp4": (ParallelLayout(4, cp_size=4), BatchSettings(1, None)),
    "pp2": (ParallelLayout(2, pp_size=2), BatchSettings(2, None)),
    "pp2_vpp2": (ParallelLayout(2, pp_size=2, vpp_size=2), BatchSettings(100, None)),
    "pp2_tp2": (ParallelLayout(4, pp_size=2, tp_size=2), BatchSettings(None, 20)),
}


@pytest.fixture(scope="session")
def one_rank_reports() -> dict[str, object]:
    """One-rank runs by case, filled on first use."""
    return {}


def _case(make_case: CaseMaker, name: str) -> Case:
    ppo, tie, temperature = CASES[name]
    return make_case(ppo, tie=tie, temperature=temperature, correction=REJECTING if name == "rejecting" else CorrectionConfig())


def _run(pool: RankPool, case: Case, name: str) -> list:
    batch = make_batch(restricted=name == "support")
    if name == "rejecting":
        batch = drawn_nearby(batch, case.actor_folder, case.temperature)
    return pool.run(f"{RANKS}:iteration", world=case.layout.num_ranks, case=case, batch=batch, plan=make_plan(), noise=NOISE)


# every layout with two cases, every case with four layouts or five; test_layout_matrix has all layouts with the loss of a usual run
PAIRS = [
    (name, layout) for row, name in enumerate(CASES) for column, layout in enumerate(LAYOUTS) if (row + 2 * column) % len(CASES) < 2
]


@pytest.mark.parametrize(("name", "layout"), PAIRS)
def test_iteration_any_layout_and_cut_equals_one_rank(
    megatron_pool: RankPool,
    make_case: CaseMaker,
    one_rank_reports: dict,
    tmp_path: Path,
    *,
    name: str,
    layout: str,
) -> None:
    case = _case(make_case, name)
    expected = _one_rank(megatron_pool, case, name, one_rank_reports)
    report = _run(megatron_pool, case.on(*LAYOUTS[layout], tmp_path), name)[0]
    assert_reports_equal(report, expected, case)


@pytest.mark.parametrize(
    "batching",
    [
        BatchSettings(2, None),
        BatchSettings(7, None),
        BatchSettings(1, None, balance_by="flops"),
        # of the samples of 6 to 11 tokens two are above the cap and go alone
        BatchSettings(None, 10),
        BatchSettings(None, 10, balance_by="flops"),
        BatchSettings(None, 1000, balance_by="flops"),
    ],
    ids=str,
)
def test_iteration_on_two_ranks_any_micro_batch_equals_one_rank(
    megatron_pool: RankPool, make_case: CaseMaker, one_rank_reports: dict, tmp_path: Path, batching: BatchSettings
) -> None:
    """The matrix has micro-batches of one sample; gradients, metrics and weights are the same with each memory knob."""
    case = _case(make_case, "untied")
    expected = _one_rank(megatron_pool, case, "untied", one_rank_reports)
    report = _run(megatron_pool, case.on(ParallelLayout(2), batching, tmp_path), "untied")[0]
    assert_reports_equal(report, expected, case)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("tied", "tp2"),
        ("untied", "tp2_dp2"),
        ("support", "one_rank_single"),
        ("support", "tp2"),
        ("untied", "cp2_tp2"),
        ("support", "cp2"),
        ("tied", "pp2"),
        ("untied", "pp2_tp2"),
    ],
)
def test_iteration_fused_lm_head_equals_one_rank_with_logits(
    megatron_pool: RankPool, make_case: CaseMaker, one_rank_reports: dict, tmp_path: Path, *, name: str, layout: str
) -> None:
    case = _case(make_case, name)
    expected = _one_rank(megatron_pool, case, name, one_rank_reports)
    fused = replace(case.on(*LAYOUTS[layout], tmp_path), fuse_lm_head=True)
    assert_reports_equal(_run(megatron_pool, fused, name)[0], expected, case)


@pytest.mark.parametrize("layout", ["one_rank_single", "tp2", "pp2"])
def test_bfloat16_fused_lm_head_equals_logits_up_to_their_rounding(
    megatron_pool: RankPool, make_case: CaseMaker, tmp_path: Path, layout: str
) -> None:
    """The same states go into both heads. One rounds its logits, which are below 4 in size, to 8 bits, by 2^-7 at most; a
    log-prob is off by twice that at most, and the gradient by a share of that size."""
    case = make_case(PpoConfig(), tie=False, dtype="bfloat16")

    def run(function: str, *, fused: bool, **arguments: object) -> Any:
        own = replace(case.on(*LAYOUTS[layout], tmp_path), fuse_lm_head=fused)
        ranks = megatron_pool.run(f"{RANKS}:{function}", world=own.layout.num_ranks, case=own, **arguments)
        return next(found for found in ranks if found[0])  # of a pipeline the last stage reports

    plain, fused = (run("score", fused=fused, batch=make_batch())[0] for fused in (False, True))
    for name in ("old_log_probs", "entropy"):
        assert np.isfinite(fused[name]).all() and np.abs(fused[name] - plain[name]).max() <= 2**-6, name
    step = replace(make_plan(), steps=make_plan().steps[:1])
    own, other = (run("train_actor_steps", fused=fused, batch=make_scored_batch(), plan=step)[0] for fused in (True, False))
    assert own["skipped"] == other["skipped"] == 0
    assert own["grad_norm"] == pytest.approx(other["grad_norm"], rel=2**-6)
    assert own["pg_loss"] == pytest.approx(other["pg_loss"], abs=2**-6)


def _one_rank(pool: RankPool, case: Case, name: str, reports: dict) -> "Report":
    if name not in reports:
        reports[name] = _run(pool, case, name)[0]
    return reports[name]


@pytest.mark.parametrize("name", [name for name in CASES if name != "rejecting"])
def test_iteration_cases_reach_the_branches_they_are_made_for(
    megatron_pool: RankPool, make_case: CaseMaker, one_rank_reports: dict, name: str
) -> None:
    ppo = CASES[name][0]
    if name not in one_rank_reports:
        one_rank_reports[name] = _run(megatron_pool, _case(make_case, name), name)[0]
    report = one_rank_reports[name]
    assert sum(step["pg_clipfrac"] for step in report.actor.steps) > 0
    assert (sum(step["pg_clipfrac_dual"] for step in report.actor.steps) > 0) == (ppo.eps_clip_c is not None)
    assert all(step["grad_norm"] > 0 and step["skipped"] == 0 for step in report.actor.steps)
    assert report.critic.steps[0]["grad_norm"] > 0
    assert (sum(step["value_clipfrac"] for step in report.critic.steps) > 0) == (ppo.value_clip > 0)
    # the plan has a sample without a trainable token and a step of one sample
    batch = make_batch()
    assert batch.trainable_tokens[3] == 0
    masked = ~batch.loss_mask
    assert not report.columns["advantages"][masked].any() and not report.columns["returns"][masked].any()


def test_iteration_case_of_rejection_rejects_weighs_and_skips(
    megatron_pool: RankPool, make_case: CaseMaker, one_rank_reports: dict
) -> None:
    if "rejecting" not in one_rank_reports:
        one_rank_reports["rejecting"] = _run(megatron_pool, _case(make_case, "rejecting"), "rejecting")[0]
    report, batch = one_rank_reports["rejecting"], make_batch()
    assert report.critic is None
    assert report.columns["rejected"].tolist() == [0, 0, 0, 0, 0, 1, 1]
    assert report.log_prob_stats["rejected_samples"] == 2
    # exp(-0.3) and exp(0.4) of LOG_RATIOS lie outside [0.8, 1.4], exp(0.2) and exp(0.1) inside
    starts = batch.offsets("response_token")[:-1]
    assert report.columns["rollout_weights"][starts] == pytest.approx([np.exp(0.2), 0, np.exp(0.1), 0, 0, 0, 0], rel=1e-4)
    assert [step["skipped"] for step in report.actor.steps] == [0.0, 0.0, 1.0]
    assert report.actor.steps[0]["denominator_tokens"] == batch.trainable_tokens[make_plan().steps[0].rows].sum()
    assert report.actor.steps[0]["denominator_trajectories"] == 2
    assert sum(step["pg_clipfrac"] for step in report.actor.steps[:2]) > 0


def test_layout_rank_numbers_are_those_of_megatron(megatron_pool: RankPool) -> None:
    layout = ParallelLayout(num_ranks=8, tp_size=2, cp_size=2, pp_size=2, ep_size=2, etp_size=2)
    found = megatron_pool.run(f"{RANKS}:parallel_ranks", world=8, layout=layout)
    for numbers in found:
        assert {name: own for name, (own, _) in numbers.items()} == {name: other for name, (_, other) in numbers.items()}
    assert len({tuple(numbers[name][0] for name in ("tp_rank", "cp_rank", "dp_rank", "pp_rank")) for numbers in found}) == 8


def test_micro_batches_dp2_single_sample_step_leaves_one_rank_empty() -> None:
    from slime_ppo.data.schedule import split_rows

    shares = split_rows(make_plan().steps[2].rows, make_batch().total_lens, dp_size=2, micro_batch_size=1)
    assert [len(share) for share in shares] == [1, 1]
    assert [len(share[0]) for share in shares] == [1, 0]


@pytest.mark.parametrize("layout", ["dp2", "tp2", "cp2", "pp2"])
def test_kl_early_stop_any_layout_skips_the_actors_later_steps_on_all_ranks(
    megatron_pool: RankPool, make_case: CaseMaker, tmp_path: Path, layout: str
) -> None:
    ppo = PpoConfig(kl_early_stop=1e-6, value_clip=0.25)
    case = make_case(ppo, lr=1e-3)
    one = _run(megatron_pool, case, "early_stop")[0]
    reports = _run(megatron_pool, case.on(*LAYOUTS[layout], tmp_path), "early_stop")
    expected = [(0.0, 0), (1.0, 1), (1.0, 1)]
    for report in [one, *reports]:
        assert [(step["skipped"], step.get("early_stopped", 0)) for step in report.actor.steps] == expected
        assert [step["skipped"] for step in report.critic.steps] == [0.0, 0.0, 0.0]
        assert len(report.actor.gradients) == 1 and len(report.critic.gradients) == 3
        assert report.actor.replicas_equal
    only_first = replace(make_plan(), steps=make_plan().steps[:1])
    alone = megatron_pool.run(
        f"{RANKS}:iteration",
        world=1,
        case=case.on(*LAYOUTS["one_rank_single"], tmp_path),
        batch=make_batch(),
        plan=only_first,
        noise=NOISE,
    )[0]
    for tensor, weights in alone.actor.weights.items():
        assert np.abs(reports[0].actor.weights[tensor] - weights).max() <= 1e-2 * case.lr, tensor


@pytest.mark.parametrize("layout", ["one_rank_single", "dp2", "cp2_dp2", "cp4", "pp2_vpp2"])
def test_iteration_rank_without_trainable_token_still_takes_part(
    megatron_pool: RankPool, make_case: CaseMaker, tmp_path: Path, layout: str
) -> None:
    """Rows 3 (no trainable token) and 6 alone: with DP2 one of the ranks has nothing to learn from."""
    case = make_case(PpoConfig(kl_coef=0.1, value_clip=0.25))
    batch = make_batch().select([6, 3])
    plan = replace(make_plan(), steps=(replace(make_plan().steps[0], rows=np.array([0, 1])),))
    one = megatron_pool.run(f"{RANKS}:iteration", world=1, case=case, batch=make_batch().select([6]), plan=_single(plan))[0]
    moved = case.on(*LAYOUTS[layout], tmp_path)
    report = megatron_pool.run(f"{RANKS}:iteration", world=moved.layout.num_ranks, case=moved, batch=batch, plan=plan)[0]
    assert gradient_error(report.actor.gradients[0], one.actor.gradients[0]) <= 1e-5
    assert gradient_error(report.critic.gradients[0], one.critic.gradients[0]) <= 1e-5
    assert report.advantage_stats == pytest.approx(one.advantage_stats, rel=1e-5)
    assert report.log_prob_stats.keys() == one.log_prob_stats.keys()
    for name, value in one.log_prob_stats.items():  # log-probs of about -4 nearly cancel in the KL
        num_tokens = max(RESPONSE_LENS) if name == "kl_trajectory" else 1
        assert report.log_prob_stats[name] == pytest.approx(value, rel=1e-5, abs=1e-6 * num_tokens), name


def _single(plan: StepPlan) -> StepPlan:
    return replace(plan, steps=(replace(plan.steps[0], rows=np.array([0])),))
