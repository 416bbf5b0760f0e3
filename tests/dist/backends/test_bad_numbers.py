"""Numbers that are not finite: skipped alike on all ranks, harmless where masked, an error that names the sample where not."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from slime_ppo.config.ppo import PpoConfig
from slime_ppo.parallel.layout import ParallelLayout
from slime_ppo.parallel.worker_settings import BatchSettings
from slime_ppo.types.rollout_batch import RolloutBatch
from slime_ppo.types.step_plan import Step, StepPlan
from tests.dist.backends.cases import RANKS, Case, make_batch, make_plan, make_scored_batch
from tests.dist.backends.conftest import CaseMaker
from tests.helpers.rank_pool import RankError, RankPool
from tests.helpers.tiny_llama import make_tiny_llama

LAYOUTS = {
    "one_rank": ParallelLayout(1),
    "dp2": ParallelLayout(2),
    "tp2": ParallelLayout(2, tp_size=2),
    "cp2": ParallelLayout(2, cp_size=2),
    "pp2": ParallelLayout(2, pp_size=2),
}
BY_ONE = BatchSettings(1, None)
FIRST = replace(make_plan(), steps=make_plan().steps[:1])


def _with_value(batch: RolloutBatch, name: str, row: int, value: float) -> RolloutBatch:
    """`value` at the first trainable token of a sample."""
    column = np.array(getattr(batch, name))
    column[batch.offsets("response_token")[row]] = value
    return batch.with_columns(**{name: column})


def _train(pool: RankPool, case: Case, batch: RolloutBatch, plan: StepPlan) -> list:
    return pool.run(f"{RANKS}:train_columns", world=case.layout.num_ranks, case=case, batch=batch, plan=plan)


@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_train_gradient_not_finite_skips_on_all_ranks_and_keeps_the_weights(
    megatron_pool: RankPool, make_case: CaseMaker, tmp_path: Path, *, value: float, layout: str
) -> None:
    """The bad sample is on one data-parallel rank alone."""
    case = make_case(PpoConfig(value_clip=0.0)).on(LAYOUTS[layout], BY_ONE, tmp_path)
    row = int(FIRST.steps[0].rows[0])
    batch = _with_value(_with_value(make_scored_batch(), "advantages", row, value), "returns", row, value)
    sources = [load_file(Path(folder) / "model.safetensors") for folder in (case.actor_folder, case.critic_folder)]
    for roles in _train(megatron_pool, case, batch, FIRST):
        for role, source in zip(roles, sources, strict=True):
            assert [step["skipped"] for step in role.steps] == [1.0]
            assert not np.isfinite(role.steps[0]["grad_norm"])
            assert role.replicas_equal
            for name, weights in role.weights.items():
                assert np.array_equal(weights, source[name]), name


def test_train_skipped_step_dp2_leaves_the_next_step_as_if_it_were_the_first(
    megatron_pool: RankPool, make_case: CaseMaker, tmp_path: Path
) -> None:
    case = make_case(PpoConfig(value_clip=0.0))
    row = int(FIRST.steps[0].rows[0])
    bad = _with_value(_with_value(make_scored_batch(), "advantages", row, np.inf), "returns", row, np.inf)
    two = replace(make_plan(), steps=make_plan().steps[:2])
    second = replace(make_plan(), steps=make_plan().steps[1:2])
    after_skip = _train(megatron_pool, case.on(LAYOUTS["dp2"], BY_ONE, tmp_path), bad, two)[0]
    alone = _train(megatron_pool, case.on(LAYOUTS["dp2"], BY_ONE, tmp_path), make_scored_batch(), second)[0]
    for found, expected in zip(after_skip, alone, strict=True):
        assert [step["skipped"] for step in found.steps] == [1.0, 0.0]
        for name, weights in expected.weights.items():
            assert np.array_equal(found.weights[name], weights), name


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_train_masked_tokens_that_are_not_finite_change_nothing(
    megatron_pool: RankPool, make_case: CaseMaker, tmp_path: Path, value: float
) -> None:
    ppo = PpoConfig(use_kl_loss=True, kl_loss_coef=0.1, entropy_coef=0.01, whiten_domain="step")
    case, clean = make_case(ppo), make_scored_batch()
    clean = clean.with_columns(ref_log_probs=clean.old_log_probs)
    names = ("old_log_probs", "advantages", "values", "returns", "ref_log_probs")
    dirty = clean.with_columns(
        **{name: np.where(clean.loss_mask, getattr(clean, name), value).astype(np.float32) for name in names}
    )
    assert not np.isfinite(dirty.advantages).all()
    expected, found = (
        _train(megatron_pool, case.on(LAYOUTS["one_rank"], BY_ONE, tmp_path), batch, make_plan())[0] for batch in (clean, dirty)
    )
    for own, other in zip(found, expected, strict=True):
        assert own.steps == other.steps
        for name, weights in other.weights.items():
            assert np.array_equal(own.weights[name], weights), name


def test_train_step_without_trainable_token_dp2_is_skipped_without_moving_the_weights(
    megatron_pool: RankPool, make_case: CaseMaker, tmp_path: Path
) -> None:
    case = make_case(PpoConfig()).on(LAYOUTS["dp2"], BY_ONE, tmp_path)
    plan = StepPlan(5, (Step(0, 0, np.array([3])),))
    source = load_file(Path(case.actor_folder) / "model.safetensors")
    actor, critic = _train(megatron_pool, case, make_scored_batch(), plan)[0]
    for role in (actor, critic):
        assert role.steps == [{"skipped": 1.0, "early_stopped": 0.0, "lr": case.lr, "num_tokens": 0.0}]
    assert all(np.array_equal(actor.weights[name], source[name]) for name in source)


def test_train_tp2_only_the_first_tensor_parallel_rank_reports(
    megatron_pool: RankPool, make_case: CaseMaker, tmp_path: Path
) -> None:
    case = make_case(PpoConfig()).on(LAYOUTS["tp2"], BY_ONE, tmp_path)
    first, second = megatron_pool.run(f"{RANKS}:train_actor_steps", world=2, case=case, batch=make_scored_batch(), plan=FIRST)
    assert first[0]["num_tokens"] == make_scored_batch().trainable_tokens[FIRST.steps[0].rows].sum()
    assert second == [{}]


def test_train_cp2_both_ranks_report_their_own_tokens_and_together_all_of_them(
    megatron_pool: RankPool, make_case: CaseMaker, tmp_path: Path
) -> None:
    batch = make_scored_batch()
    one, split = (
        megatron_pool.run(
            f"{RANKS}:train_actor_steps",
            world=LAYOUTS[layout].num_ranks,
            case=make_case(PpoConfig()).on(LAYOUTS[layout], BY_ONE, tmp_path),
            batch=batch,
            plan=FIRST,
        )
        for layout in ("one_rank", "cp2")
    )
    shares = [rank[0] for rank in split]
    assert all(share["entropy_loss"] > 0 for share in shares)
    assert sum(share["entropy_loss"] for share in shares) == pytest.approx(one[0][0]["entropy_loss"], rel=1e-5)
    for share in shares:  # what every rank knows alike is a mean of equal numbers
        assert share["num_tokens"] == one[0][0]["num_tokens"]
        assert share["grad_norm"] == pytest.approx(one[0][0]["grad_norm"], rel=1e-5)


def test_score_cp2_only_the_first_context_parallel_rank_reports_whole_samples(
    megatron_pool: RankPool, make_case: CaseMaker, tmp_path: Path
) -> None:
    case = make_case(PpoConfig()).on(LAYOUTS["cp2"], BY_ONE, tmp_path)
    (columns, stats), second = megatron_pool.run(f"{RANKS}:score", world=2, case=case, batch=make_batch())
    assert columns["old_log_probs"].shape == make_batch().rollout_log_probs.shape and stats
    assert second == ({}, {})


@pytest.fixture(scope="module")
def broken_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose embedding of token 99 is NaN: every state after that token is NaN."""
    folder = make_tiny_llama(tmp_path_factory.mktemp("broken"), tie=False, seed=1)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][99] = np.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def _batch_with_token(row: int) -> RolloutBatch:
    """Token 99 opens the prompt of one sample and stands nowhere else."""
    batch = make_batch()
    prompts = np.where(batch.prompt_ids == 99, 98, batch.prompt_ids)
    prompts[batch.offsets("prompt_token")[row]] = 99
    responses = np.where(batch.response_ids == 99, 98, batch.response_ids)
    return batch.with_columns(prompt_ids=prompts.astype(np.int32), response_ids=responses.astype(np.int32))


@pytest.mark.parametrize("layout", ["one_rank", "dp2", "pp2"])
@pytest.mark.parametrize(("target", "name"), [("log_probs", "old_log_probs"), ("advantages", "values")])
def test_column_nan_at_trainable_token_is_an_error_naming_that_sample_alone(
    megatron_pool: RankPool, make_case: CaseMaker, tmp_path: Path, broken_folder: str, *, target: str, name: str, layout: str
) -> None:
    """All samples share one pack: a NaN that leaked from one into another would name the first."""
    case = make_case(PpoConfig(), tie=False).on(LAYOUTS[layout], BatchSettings(100, None), tmp_path)
    case = replace(case, actor_folder=broken_folder, critic_folder=broken_folder)
    if target == "advantages":  # a head of zeros would hide nothing: 0 * NaN is NaN
        batch = _batch_with_token(4).with_columns(old_log_probs=make_batch().rollout_log_probs)
    else:
        batch = _batch_with_token(4)
    with pytest.raises(RankError, match=rf"NumericsError: {name} of sample 74 is nan at response token 0, which is trainable"):
        megatron_pool.run(f"{RANKS}:{target}", world=case.layout.num_ranks, case=case, batch=batch)


OWN = "tests.dist.backends.own_estimators"
BAD_ADVANTAGES = {
    "token_rewards": (
        PpoConfig(advantage_estimator="reinforce_plus_plus", kl_coef=0.1),
        "NumericsError: token_rewards of sample 75 is -inf at response token 0",
    ),
    "estimate": (
        PpoConfig(advantage_estimator=f"{OWN}.WITH_NAN"),
        "NumericsError: advantages of sample 75 is nan at response token 0",
    ),
    "exception": (PpoConfig(advantage_estimator=f"{OWN}.RAISES"), "KeyError: 'row 5 has no table'"),
}


@pytest.mark.parametrize("name", list(BAD_ADVANTAGES))
def test_advantages_that_fail_on_one_rank_before_whitening_dp2_stop_both_with_the_same_reason(
    megatron_pool: RankPool, make_case: CaseMaker, tmp_path: Path, name: str
) -> None:
    """Row 5 is on the second rank alone."""
    ppo, reason = BAD_ADVANTAGES[name]
    case = make_case(ppo).on(LAYOUTS["dp2"], BY_ONE, tmp_path)
    batch = make_batch().with_columns(old_log_probs=make_batch().rollout_log_probs, ref_log_probs=make_batch().rollout_log_probs)
    batch = _with_value(batch, "ref_log_probs", 5, -np.inf) if name == "token_rewards" else batch
    assert ppo.whitens
    with pytest.raises(RankError, match="failed on 2 of 2 ranks") as caught:
        megatron_pool.run(f"{RANKS}:advantage_columns", world=2, case=case, batch=batch)
    first, second = str(caught.value).split("[rank 1]")
    assert f"EchoedError: another data-parallel rank has stopped: {reason}" in first
    assert reason in second and "EchoedError" not in second


def test_advantages_baseline_of_rewards_at_the_end_of_float32_is_an_error_naming_the_sample(
    megatron_pool: RankPool, make_case: CaseMaker
) -> None:
    """Each reward is finite; 3e38 minus -3e38, that of the other answer, is not."""
    rewards = make_batch().rewards.copy()
    rewards[:2] = 3e38, -3e38
    batch = make_batch().with_columns(old_log_probs=make_batch().rollout_log_probs, rewards=rewards)
    case = make_case(PpoConfig(advantage_estimator="rloo", normalize_advantages=True))
    with pytest.raises(RankError, match="NumericsError: returns of sample 70 is inf at response token 0, which is trainable"):
        megatron_pool.run(f"{RANKS}:advantage_columns", world=1, case=case, batch=batch)


def test_log_probs_nan_at_masked_tokens_only_is_no_error(
    megatron_pool: RankPool, make_case: CaseMaker, tmp_path: Path, broken_folder: str
) -> None:
    """Row 3 has no trainable token."""
    case = replace(make_case(PpoConfig(), tie=False), actor_folder=broken_folder)
    columns = megatron_pool.run(f"{RANKS}:log_probs", world=1, case=case, batch=_batch_with_token(3))[0]
    batch = make_batch()
    bad = np.isnan(columns["old_log_probs"])
    assert bad.sum() == batch.response_lens[3] and not batch.loss_mask[bad].any()
