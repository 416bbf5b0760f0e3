"""One whole PPO iteration on Megatron against `ppo_utils.reference` with transformers' models and torch's AdamW."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from slime_ppo.config.correction import CorrectionConfig
from slime_ppo.config.ppo import PpoConfig
from slime_ppo.parallel.layout import ParallelLayout
from slime_ppo.parallel.worker_settings import BatchSettings
from slime_ppo.ppo_utils.off_policy_stats import CorrectionSettings
from slime_ppo.ppo_utils.reference import ppo_iteration, whitened
from slime_ppo.ppo_utils.reference_types import IterationReport, ReferenceSettings, ReferenceStep, ScoredSample, StepReport
from slime_ppo.types.rollout_batch import RolloutBatch
from tests.dist.backends.cases import RANKS, VOCAB, Case, make_batch, make_plan
from tests.dist.backends.conftest import CaseMaker
from tests.dist.backends.models import Critic, Policy, drawn_nearby, reference_samples
from tests.helpers.rank_pool import RankPool

if TYPE_CHECKING:
    from tests.dist.backends.ranks import Report

TEMPERATURE = 0.8


def _adamw(model: torch.nn.Module, weight_decay: float) -> torch.optim.AdamW:
    """Weight decay on matrices alone, Megatron's rule."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-6)


def _settings(case: Case) -> ReferenceSettings:
    ppo = case.ppo
    return ReferenceSettings(
        vocab_size=VOCAB,
        temperature=case.temperature,
        advantage_estimator=ppo.advantage_estimator,
        std_normalization=ppo.grpo_std_normalization,
        gamma=ppo.gamma,
        lambd=ppo.lambd,
        lambd_critic=ppo.critic_lambd,
        adaptive_lambd=ppo.adaptive_lambd,
        normalize_advantages=ppo.whitens,
        whiten_each_step=ppo.whiten_domain == "step",
        policy_loss=ppo.policy_loss,
        correction=case.correction.settings if case.correction.active else None,
        eps_clip=ppo.clip_low,
        eps_clip_high=ppo.clip_high,
        eps_clip_c=ppo.eps_clip_c,
        value_clip=ppo.value_clip,
        entropy_coef=ppo.entropy_coef,
        entropy_support=ppo.entropy_support,
        kl_support=ppo.kl_support,
        kl_coef=ppo.kl_coef,
        kl_reward_type=ppo.kl_reward_type,
        kl_loss_coef=ppo.kl_loss_coef if ppo.use_kl_loss else 0.0,
        kl_loss_type=ppo.kl_loss_type,
        use_unbiased_kl=ppo.use_unbiased_kl,
        loss_reduction=ppo.reduction,
        loss_length_norm=ppo.loss_length_norm or 1.0,
    )


def _oracle(case: Case, batch: RolloutBatch, **changes: object) -> tuple[IterationReport, Policy, Critic | None]:
    """The reference on the same folders; `changes` are settings in which it departs from the case."""
    policy, critic = Policy(case.actor_folder), Critic(case.critic_folder) if case.ppo.needs_critic else None
    report = ppo_iteration(
        policy,
        Policy(case.ref_folder or case.actor_folder),
        critic,
        reference_samples(batch, bootstrap=case.ppo.truncation_policy == "bootstrap"),
        replace(_settings(case), **changes),
        steps=[ReferenceStep(step.rows.tolist(), case.lr, case.lr) for step in make_plan().steps],
        actor_optimizer=_adamw(policy, case.weight_decay),
        critic_optimizer=None if critic is None else _adamw(critic, case.weight_decay),
    )
    return report, policy, critic


def _flat(scored: Sequence[ScoredSample], name: str) -> np.ndarray:
    return np.array([value for one in scored for value in getattr(one, name)])


SCORED = {
    "old_log_probs": "old_log_probs",
    "ref_log_probs": "ref_log_probs",
    "values": "old_values",
    "token_rewards": "rewards",
    "rollout_weights": "weights",
    "old_full_log_probs": "old_full_log_probs",
}


def _column_names(case: Case, batch: RolloutBatch) -> set[str]:
    """What the product is to make of this case."""
    names = {"old_log_probs", "entropy", "token_rewards", "returns", "advantages"}
    names |= {"ref_log_probs"} if case.ppo.needs_reference else set()
    names |= {"values"} if case.ppo.needs_critic else set()
    names |= {"bootstrap_values"} if case.ppo.truncation_policy == "bootstrap" else set()
    names |= {"rollout_weights", "rejected"} if case.correction.active else set()
    return names | ({"old_full_log_probs"} if batch.support_ids is not None and case.ppo.kl_support == "full" else set())


def _assert_columns_equal(found: Mapping[str, np.ndarray], scored: Sequence[ScoredSample], case: Case, batch: RolloutBatch) -> None:
    """At the trainable tokens; advantages and returns at those of samples that were not rejected, whose are not used."""
    assert found.keys() == _column_names(case, batch)
    for column in found.keys() & SCORED.keys():
        assert found[column][batch.loss_mask] == pytest.approx(_flat(scored, SCORED[column]), rel=1e-5, abs=1e-5), column
    rejected = np.array([one.rejected for one in scored])
    if "rejected" in found:
        assert found["rejected"].tolist() == rejected.tolist()
    kept = batch.with_columns(rejected=rejected).kept_mask
    once = case.ppo.whitens and case.ppo.whiten_domain == "rollout"
    wanted = [one for one in (whitened(scored) if once else scored) if not one.rejected]
    assert found["returns"][kept] == pytest.approx(_flat(wanted, "returns"), rel=1e-5, abs=1e-5)
    assert found["advantages"][kept] == pytest.approx(_flat(wanted, "advantages"), rel=1e-5, abs=1e-5)
    assert not found["advantages"][~kept].any()


@dataclass(frozen=True)
class OracleCase:
    """`without`: settings with which the reference alone must come out elsewhere, or the case would not test them; `rejected`:
    the rows that the case is made to reject."""

    ppo: PpoConfig
    without: Mapping[str, object]
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    rejected: tuple[int, ...] = ()
    restricted: bool = False
    process_rewards: bool = False
    tie: bool = False
    lr: float = 1e-3


CASES = {
    "reward_kl": OracleCase(
        PpoConfig(kl_coef=0.1, gamma=0.97, lambd_critic=1.0, truncation_policy="bootstrap"),
        {"kl_coef": 0.0, "gamma": 1.0, "lambd_critic": 0.95},
    ),
    "loss_kl_on_supports": OracleCase(
        PpoConfig(
            use_kl_loss=True,
            kl_loss_coef=0.2,
            entropy_coef=0.01,
            loss_reduction="seq-mean-token-mean",
            adaptive_lambd=0.5,
            eps_clip_high=0.28,
        ),
        {"kl_loss_coef": 0.0, "entropy_coef": 0.0, "loss_reduction": "token-mean", "adaptive_lambd": None},
        restricted=True,
        tie=True,
    ),
    "reward_kl_on_supports": OracleCase(
        PpoConfig(
            kl_coef=0.5,
            kl_reward_type="k2",
            whiten_domain="step",
            eps_clip_c=1.05,
            loss_reduction="seq-mean-token-sum-norm",
            loss_length_norm=7.0,
        ),
        {
            "kl_reward_type": "k1",
            "whiten_each_step": False,
            "normalize_advantages": False,
            "eps_clip_c": None,
            "loss_length_norm": 14.0,
        },
        restricted=True,
        lr=3e-3,
    ),
    "loss_kl_k2": OracleCase(
        PpoConfig(use_kl_loss=True, kl_loss_coef=1.0, kl_loss_type="k2", normalize_advantages=False, value_clip=0.0),
        {"kl_loss_type": "k3", "normalize_advantages": True},
        tie=True,
    ),
    "grpo": OracleCase(
        PpoConfig(advantage_estimator="grpo"),
        {"advantage_estimator": "rloo", "std_normalization": False, "normalize_advantages": True},
        tie=True,
    ),
    "gspo": OracleCase(
        PpoConfig(advantage_estimator="rloo", policy_loss="gspo"),
        {
            "advantage_estimator": "reinforce_plus_plus_baseline",
            "policy_loss": "ppo",
            "eps_clip": 0.2,
            "loss_reduction": "token-mean",
        },
    ),
    "cispo_process_rewards": OracleCase(
        PpoConfig(
            advantage_estimator="reinforce_plus_plus", policy_loss="cispo", eps_clip=0.1, eps_clip_high=0.05, kl_coef=0.1, gamma=0.9
        ),
        {"policy_loss": "ppo", "eps_clip": None, "eps_clip_high": 0.5, "kl_coef": 0.0, "gamma": 1.0},
        process_rewards=True,
        lr=3e-3,
    ),
    "tis_and_rejection": OracleCase(
        PpoConfig(kl_coef=0.1, entropy_coef=0.01),
        {
            "correction": CorrectionSettings("tis", cap=1.3),
            "kl_coef": 0.0,
            "entropy_coef": 0.0,
        },
        correction=CorrectionConfig(mode="tis", cap=1.3, rejection="sequence"),
        rejected=(5, 6),
    ),
    "icepop_and_geometric_rejection": OracleCase(
        PpoConfig(advantage_estimator="reinforce_plus_plus", whiten_domain="step"),
        {
            "correction": CorrectionSettings("icepop", low=0.7, high=1.6),
            "whiten_each_step": False,
        },
        correction=CorrectionConfig(
            mode="icepop", low=0.7, high=1.6, rejection="geometric", rejection_low=0.5, rejection_high=1.25
        ),
        rejected=(5,),
        tie=True,
    ),
    "loss_kl_unbiased": OracleCase(
        PpoConfig(
            advantage_estimator="reinforce_plus_plus_baseline",
            use_kl_loss=True,
            kl_loss_coef=1.0,
            kl_loss_type="k1",
            use_unbiased_kl=True,
        ),
        {"use_unbiased_kl": False, "kl_loss_type": "k2"},
        tie=True,
    ),
    "reward_kl_over_the_supports": OracleCase(
        PpoConfig(kl_coef=0.5, kl_support="sampled", entropy_coef=0.02, entropy_support="sampled"),
        {"kl_support": "full", "entropy_support": "full"},
        restricted=True,
    ),
}


def _on_one_rank(make_case: CaseMaker, one: OracleCase, folder: Path) -> tuple[Case, RolloutBatch]:
    case = make_case(one.ppo, tie=one.tie, correction=one.correction, temperature=TEMPERATURE, lr=one.lr)
    batch = make_batch(restricted=one.restricted)
    if one.correction.active:
        batch = drawn_nearby(batch, case.actor_folder, TEMPERATURE)
    if one.process_rewards:
        rng = np.random.default_rng(3)
        paid = np.where(rng.random(len(batch.loss_mask)) < 0.5, rng.standard_normal(len(batch.loss_mask)), 0.0)
        assert paid[~batch.loss_mask].any()
        batch = batch.with_columns(process_rewards=paid.astype(np.float32))
    return case.on(ParallelLayout(1), BatchSettings(3, None), folder), batch


def _figures(steps: Sequence[StepReport]) -> list[dict[str, float]]:
    """What the reference reports of each step, by the product's names."""
    return [
        {
            "pg_loss": step.actor.policy_loss,
            "loss": step.actor.loss,
            "entropy": step.actor.entropy,
            "ppo_kl": step.actor.ppo_kl,
            "grad_norm": step.actor.grad_norm,
        }
        | ({} if step.critic is None else {"value_loss": step.critic.value_loss, "critic_grad_norm": step.critic.grad_norm})
        for step in steps
    ]


def _reported(report: "Report", names: Sequence[str]) -> list[dict[str, float]]:
    """The same of the product, for the steps that ran."""
    critic_steps = [{}] * len(report.actor.steps) if report.critic is None else report.critic.steps
    found = []
    for actor, critic in zip(report.actor.steps, critic_steps, strict=True):
        if actor["skipped"]:
            assert critic == {} or critic["skipped"]
            continue
        values = {} if not critic else {"value_loss": critic["value_loss"], "critic_grad_norm": critic["grad_norm"]}
        found.append({name: actor[name] for name in names if name in actor} | values)
    return found


@pytest.mark.parametrize("name", list(CASES))
def test_iteration_one_rank_equals_the_reference_with_transformers_models(
    megatron_pool: RankPool, make_case: CaseMaker, tmp_path: Path, name: str
) -> None:
    case, batch = _on_one_rank(make_case, CASES[name], tmp_path)
    report = megatron_pool.run(f"{RANKS}:iteration", world=1, case=case, batch=batch, plan=make_plan())[0]
    expected, policy, critic = _oracle(case, batch)
    _assert_columns_equal(report.columns, expected.scored, case, batch)
    counting = [one for one in expected.scored if one.counts]
    assert report.advantage_stats["advantages"] == pytest.approx(_flat(counting, "advantages").mean(), rel=1e-5, abs=1e-6)
    assert ("explained_variance" in report.advantage_stats) == case.ppo.needs_critic
    if case.ppo.needs_critic:
        assert report.advantage_stats["explained_variance"] == pytest.approx(expected.explained_variance, rel=1e-5)
    assert ("kl_trajectory" in report.log_prob_stats) == case.ppo.needs_reference
    if case.ppo.needs_reference:
        assert report.log_prob_stats["kl_trajectory"] == pytest.approx(expected.kl, rel=1e-5, abs=1e-6)
    wanted_steps = _figures(expected.steps)
    pairs = zip(_reported(report, list(wanted_steps[0])), wanted_steps, strict=True)
    for index, (found, wanted) in enumerate(pairs):
        # the first step starts from equal weights, the others from weights that differ by what Adam makes of rounding
        assert found == pytest.approx(wanted, rel=1e-5 if index == 0 else 1e-4, abs=1e-6), index
    assert (sum(step.get("pg_clipfrac_dual", 0.0) for step in report.actor.steps) > 0) == (case.ppo.eps_clip_c is not None)
    modules = {"actor": policy.hf.state_dict()} | ({} if critic is None else {"critic": critic.state_dict()})
    for role, module in modules.items():
        for tensor, weights in getattr(report, role).weights.items():
            error = np.abs(module[tensor].numpy() - weights).max()
            assert error <= 1e-2 * case.lr * len(expected.steps), f"{role} {tensor}"
    moved = np.abs(
        policy.hf.state_dict()["model.norm.weight"].numpy()
        - load_file(Path(case.actor_folder) / "model.safetensors")["model.norm.weight"].numpy()
    )
    assert moved.max() > case.lr


@pytest.mark.parametrize("name", list(CASES))
def test_iteration_reference_without_a_setting_of_the_case_comes_out_elsewhere(
    make_case: CaseMaker, tmp_path: Path, name: str
) -> None:
    """The comparison above notices a product that ignores the setting: ten times its tolerance lies between."""
    case, batch = _on_one_rank(make_case, CASES[name], tmp_path)
    report, _, _ = _oracle(case, batch)
    for setting, value in CASES[name].without.items():
        other, _, _ = _oracle(case, batch, **{setting: value})
        steps = zip(_figures(other.steps), _figures(report.steps), strict=True)
        assert any(found != pytest.approx(wanted, rel=1e-3, abs=1e-5) for found, wanted in steps), setting
    assert tuple(row for row, one in enumerate(report.scored) if one.rejected) == CASES[name].rejected
    if CASES[name].restricted:
        gap = _flat(report.scored, "old_full_log_probs") - _flat(report.scored, "old_log_probs")
        assert np.abs(gap).max() > 1  # so that a KL over the support would be another one
