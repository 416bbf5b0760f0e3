"""One whole PPO iteration on Megatron against `ppo_utils.reference` with transformers' models and torch's AdamW."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaModel

from slime_ppo.config.ppo import PpoConfig
from slime_ppo.parallel.layout import ParallelLayout
from slime_ppo.parallel.worker_settings import BatchSettings
from slime_ppo.ppo_utils.reference import ppo_iteration, whitened
from slime_ppo.ppo_utils.reference_types import (
    IterationReport,
    ReferenceSample,
    ReferenceSettings,
    ReferenceStep,
    ScoredSample,
    StepReport,
)
from slime_ppo.types.rollout_batch import FINISH_CODES, RolloutBatch
from slime_ppo.types.sample import FinishReason
from tests.dist.backends.cases import RANKS, VOCAB, Case, make_batch, make_plan
from tests.dist.backends.conftest import CaseMaker
from tests.helpers.rank_pool import RankPool


class Policy(torch.nn.Module):
    """Token ids [T] -> logits [T, V] by transformers."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.hf(ids[None]).logits[0]


class Critic(torch.nn.Module):
    """Token ids [T] -> values [T]: transformers' trunk and a linear head."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        weights = load_file(Path(folder) / "model.safetensors")
        self.model = LlamaModel(LlamaConfig.from_pretrained(folder))
        trunk = {name.removeprefix("model."): tensor for name, tensor in weights.items() if name.startswith("model.")}
        self.model.load_state_dict(trunk)
        self.score = torch.nn.Linear(64, 1, bias=False)
        self.score.load_state_dict({"weight": weights["score.weight"]})

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.score(self.model(ids[None]).last_hidden_state[0])[:, 0]


def _adamw(model: torch.nn.Module, weight_decay: float) -> torch.optim.AdamW:
    """Weight decay on matrices alone, Megatron's rule."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-6)


def _reference_samples(batch: RolloutBatch, *, bootstrap: bool) -> list[ReferenceSample]:
    samples = []
    for row in range(batch.num_samples):
        one = batch.select([row])
        support = None
        if one.support_ids is not None:
            support = [torch.tensor(ids) for ids in np.split(one.support_ids, np.cumsum(one.support_counts)[:-1])]
        samples.append(
            ReferenceSample(
                prompt_ids=torch.tensor(one.prompt_ids).long(),
                response_ids=torch.tensor(one.response_ids).long(),
                loss_mask=torch.tensor(one.loss_mask),
                reward=float(one.rewards[0]),
                trajectory_id=int(one.trajectory_ids[0]),
                support=support,
                bootstraps=bootstrap and FINISH_CODES[one.finish[0]] is FinishReason.LENGTH,
            )
        )
    return samples


def _settings(ppo: PpoConfig, temperature: float) -> ReferenceSettings:
    return ReferenceSettings(
        vocab_size=VOCAB,
        temperature=temperature,
        gamma=ppo.gamma,
        lambd=ppo.lambd,
        lambd_critic=ppo.critic_lambd,
        adaptive_lambd=ppo.adaptive_lambd,
        normalize_advantages=ppo.normalize_advantages,
        whiten_each_step=ppo.whiten_domain == "step",
        eps_clip=ppo.eps_clip,
        eps_clip_high=ppo.clip_high,
        eps_clip_c=ppo.eps_clip_c,
        value_clip=ppo.value_clip,
        entropy_coef=ppo.entropy_coef,
        kl_coef=ppo.kl_coef,
        kl_reward_type=ppo.kl_reward_type,
        kl_loss_coef=ppo.kl_loss_coef if ppo.use_kl_loss else 0.0,
        kl_loss_type=ppo.kl_loss_type,
        loss_reduction=ppo.loss_reduction,
        loss_length_norm=ppo.loss_length_norm or 1.0,
    )


def _oracle(case: Case, batch: RolloutBatch, **changes: object) -> tuple[IterationReport, Policy, Critic]:
    """The reference on the same folders; `changes` are settings in which it departs from the case."""
    policy, critic = Policy(case.actor_folder), Critic(case.critic_folder)
    report = ppo_iteration(
        policy,
        Policy(str(case.ref_folder)),
        critic,
        _reference_samples(batch, bootstrap=case.ppo.truncation_policy == "bootstrap"),
        replace(_settings(case.ppo, case.temperature), **changes),
        steps=[ReferenceStep(step.rows.tolist(), case.lr, case.lr) for step in make_plan().steps],
        actor_optimizer=_adamw(policy, case.weight_decay),
        critic_optimizer=_adamw(critic, case.weight_decay),
    )
    return report, policy, critic


def _flat(scored: Sequence[ScoredSample], name: str) -> np.ndarray:
    return np.array([value for one in scored for value in getattr(one, name)])


SCORED = {
    "old_log_probs": "old_log_probs",
    "ref_log_probs": "ref_log_probs",
    "values": "old_values",
    "token_rewards": "rewards",
    "returns": "returns",
}


def _columns(scored: Sequence[ScoredSample], ppo: PpoConfig, *, restricted: bool) -> dict[str, np.ndarray]:
    """The reference's columns at the trainable tokens, by the product's names."""
    columns = {column: _flat(scored, field) for column, field in SCORED.items()}
    if restricted:
        columns["old_full_log_probs"] = _flat(scored, "old_full_log_probs")
    once = ppo.normalize_advantages and ppo.whiten_domain == "rollout"
    return columns | {"advantages": _flat(whitened(scored) if once else scored, "advantages")}


@dataclass(frozen=True)
class OracleCase:
    """`without`: settings with which the reference alone must come out elsewhere, or the case would not test them."""

    ppo: PpoConfig
    without: Mapping[str, object]
    restricted: bool = False
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
}


def _on_one_rank(make_case: CaseMaker, one: OracleCase, folder: Path) -> tuple[Case, RolloutBatch]:
    case = make_case(one.ppo, tie=one.tie, temperature=0.8, lr=one.lr).on(ParallelLayout(1), BatchSettings(3, None), folder)
    return case, make_batch(restricted=one.restricted)


def _figures(steps: Sequence[StepReport]) -> list[dict[str, float]]:
    """What the reference reports of each step, by the product's names."""
    return [
        {
            "pg_loss": step.actor.policy_loss,
            "loss": step.actor.loss,
            "entropy": step.actor.entropy,
            "ppo_kl": step.actor.ppo_kl,
            "grad_norm": step.actor.grad_norm,
            "value_loss": step.critic.value_loss,
            "critic_grad_norm": step.critic.grad_norm,
        }
        for step in steps
    ]


@pytest.mark.parametrize("name", list(CASES))
def test_iteration_one_rank_equals_the_reference_with_transformers_models(
    megatron_pool: RankPool, make_case: CaseMaker, tmp_path: Path, name: str
) -> None:
    case, batch = _on_one_rank(make_case, CASES[name], tmp_path)
    report = megatron_pool.run(f"{RANKS}:iteration", world=1, case=case, batch=batch, plan=make_plan())[0]
    expected, policy, critic = _oracle(case, batch)
    for column, wanted_column in _columns(expected.scored, case.ppo, restricted=CASES[name].restricted).items():
        assert report.columns[column][batch.loss_mask] == pytest.approx(wanted_column, rel=1e-5, abs=1e-5), column
    assert report.advantage_stats["advantages"] == pytest.approx(_flat(expected.scored, "advantages").mean(), rel=1e-5)
    assert report.advantage_stats["explained_variance"] == pytest.approx(expected.explained_variance, rel=1e-5)
    assert report.log_prob_stats["kl_trajectory"] == pytest.approx(expected.kl, rel=1e-5, abs=1e-6)
    pairs = zip(report.actor.steps, report.critic.steps, _figures(expected.steps), strict=True)
    for index, (actor, value, wanted) in enumerate(pairs):
        found = {name: actor[name] for name in wanted if name in actor}
        found |= {"value_loss": value["value_loss"], "critic_grad_norm": value["grad_norm"]}
        # the first step starts from equal weights, the others from weights that differ by what Adam makes of rounding
        assert found == pytest.approx(wanted, rel=1e-5 if index == 0 else 1e-4, abs=1e-6), index
    assert (sum(step["pg_clipfrac_dual"] for step in report.actor.steps) > 0) == (case.ppo.eps_clip_c is not None)
    modules = {"actor": policy.hf.state_dict(), "critic": critic.state_dict()}
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
    if CASES[name].restricted:
        gap = _flat(report.scored, "old_full_log_probs") - _flat(report.scored, "old_log_probs")
        assert np.abs(gap).max() > 1  # so that a KL over the support would be another one
