"""The oracle: its parts against hand-computed values, and the whole iteration against the fast functions composed."""

import copy
import dataclasses
import math

import pytest
import torch

from slime_ppo.ppo_utils import reference
from slime_ppo.ppo_utils.off_policy_stats import CorrectionSettings
from slime_ppo.ppo_utils.reference_types import IterationReport, ReferenceSample, ReferenceSettings, ReferenceStep
from slime_ppo.ppo_utils.registries import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from tests.helpers.fast_ppo import FastReport, Models, fast_iteration
from tests.helpers.ppo_cases import VOCAB, TinyModel, random_samples

STEPS = [
    ReferenceStep([4, 0, 6, 2], 0.05, 0.03),
    ReferenceStep([1, 3, 5], 0.04, 0.02),
    ReferenceStep([0, 1, 2, 3, 4, 5, 6], 0.05, 0.03),
]
TWO_STEPS = [STEPS[0], ReferenceStep([1, 3, 6, 4], 0.04, 0.02)]


def _settings(**changes: object) -> ReferenceSettings:
    base = {
        "vocab_size": VOCAB,
        "temperature": 0.8,
        "gamma": 0.98,
        "lambd": 0.9,
        "lambd_critic": 0.95,
        "kl_coef": 0.1,
        "eps_clip_c": 3.0,
    }
    base |= {"entropy_coef": 0.01, "eps_clip_high": 0.28, "clip_grad": 0.5}
    return ReferenceSettings(**(base | changes))


def test_gae_matches_hand_value() -> None:
    assert reference.gae([1.0, 2.0], [0.5, 0.25], gamma=0.5, lambd=0.5) == [1.0625, 1.75]
    assert reference.gae([1.0], [1.0], gamma=0.5, lambd=0.9, after=4.0) == [2.0]


def test_log_probs_are_read_one_position_before_the_token() -> None:
    table = torch.tensor([[0.0, 1.0], [2.0, 0.0], [0.0, 0.0]])
    mask = torch.tensor([True])
    sample = ReferenceSample(torch.tensor([0, 1]), torch.tensor([0]), mask, 0.0, 0)
    log_probs, _, _ = reference.log_probs_and_entropy(lambda ids: table, sample, ReferenceSettings(vocab_size=2))
    assert log_probs.item() == pytest.approx(2 - math.log(math.exp(2) + 1), rel=1e-6)
    values, last = reference.values_of(lambda ids: torch.tensor([1.0, 2.0, 3.0]), sample)
    assert values.tolist() == [2.0] and last.item() == 3.0


def test_next_kl_coef_matches_hand_value() -> None:
    settings = _settings(kl_target=1.0, kl_horizon=100)
    assert reference.next_kl_coef(1.1, 50, settings) == pytest.approx(0.1 * (1 + 0.1 * 0.5), rel=1e-12)
    assert reference.next_kl_coef(1.1, 50, _settings()) == 0.1


def test_policy_losses_match_hand_values() -> None:
    """Ratios e^0.1 and e^0.5, A = 1 and -1, eps 0.2 and 0.28; gspo's ratio is e^0.3 > 1.28 at both."""
    log_probs = torch.tensor([-0.9, -1.5], dtype=torch.float64)
    found = {
        name: [float(x) for x in reference.policy_losses(log_probs, [-1.0, -2.0], [1.0, -1.0], _settings(policy_loss=name))]
        for name in ("ppo", "gspo", "cispo")
    }
    assert found["ppo"] == pytest.approx([-math.exp(0.1), math.exp(0.5)], rel=1e-12)
    assert found["gspo"] == pytest.approx([-1.28, math.exp(0.3)], rel=1e-12)
    assert found["cispo"] == pytest.approx([math.exp(0.1) * 0.9, -1.28 * 1.5], rel=1e-12)


def test_sampled_entropy_and_kl_are_those_of_the_support() -> None:
    """Logits log (1, 2, 5) at temperature 1, the support {0, 1}, token 1: 2/3 of the support, 2/8 of the vocabulary."""
    table = torch.tensor([[1.0, 2.0, 5.0]], dtype=torch.float64).log().expand(2, 3)
    sample = ReferenceSample(torch.tensor([0]), torch.tensor([1]), torch.tensor([True]), 0.0, 0, support=[torch.tensor([0])])
    settings = ReferenceSettings(vocab_size=3, entropy_support="sampled", kl_support="sampled")
    on_support, full, entropy = reference.log_probs_and_entropy(lambda ids: table, sample, settings)
    assert (on_support.exp().item(), full.exp().item()) == pytest.approx((2 / 3, 2 / 8), rel=1e-12)
    assert entropy.item() == pytest.approx(math.log(3) - 2 / 3 * math.log(2), rel=1e-12)
    assert reference.kl_log_probs(on_support, full, settings) is on_support
    assert reference.kl_log_probs(on_support, full, ReferenceSettings(vocab_size=3)) is full


TIS = CorrectionSettings(mode="tis", cap=1.5)
GEOMETRIC = CorrectionSettings(mode="tis", level="sequence", cap=3.0, rejection="geometric", rejection_low=0.3, rejection_high=5.0)
ICEPOP = CorrectionSettings(mode="icepop", low=0.2, high=20.0, rejection="sequence", rejection_low=1e-2, rejection_high=1e2)

CASES = {
    "token-mean": ({}, False),
    "support": ({"kl_coef": 0.0, "kl_loss_coef": 0.2}, True),
    "seq-mean-token-mean": ({"loss_reduction": "seq-mean-token-mean", "adaptive_lambd": 0.7, "value_clip": 0.0}, False),
    "seq-mean-token-sum": ({"loss_reduction": "seq-mean-token-sum", "kl_loss_coef": 0.1, "kl_loss_type": "k2"}, True),
    "seq-mean-token-sum-norm": ({"loss_reduction": "seq-mean-token-sum-norm", "loss_length_norm": 5.0, "value_clip": 0.05}, False),
    "not whitened": ({"normalize_advantages": False}, False),
    "kl on the support": ({"kl_support": "sampled", "kl_target": 0.1}, True),
    "kl loss and entropy on the support": (
        {"kl_coef": 0.0, "kl_loss_coef": 0.2, "kl_support": "sampled", "entropy_support": "sampled", "entropy_coef": 0.1},
        True,
    ),
    "unbiased k1": ({"kl_coef": 0.0, "kl_loss_coef": 0.2, "kl_loss_type": "k1", "use_unbiased_kl": True}, True),
    "unbiased k2": ({"kl_coef": 0.0, "kl_loss_coef": 0.2, "kl_loss_type": "k2", "use_unbiased_kl": True}, False),
    "unbiased k3": ({"kl_coef": 0.0, "kl_loss_coef": 0.2, "kl_loss_type": "k3", "use_unbiased_kl": True}, True),
    "rejection, per trajectory": ({"correction": GEOMETRIC, "loss_reduction": "seq-mean-token-mean", "kl_loss_coef": 0.1}, True),
}


def _models(settings: ReferenceSettings) -> Models:
    needs_critic = ADVANTAGE_ESTIMATORS.entries[settings.advantage_estimator].needs_critic
    return Models(TinyModel(VOCAB + 3, 0), TinyModel(VOCAB + 3, 1), TinyModel(1, 2) if needs_critic else None)


def _optimizers(models: Models) -> dict[str, torch.optim.Optimizer | None]:
    critic = None if models.critic is None else torch.optim.Adam(models.critic.parameters())
    return {"actor_optimizer": torch.optim.Adam(models.policy.parameters()), "critic_optimizer": critic}


def _both(
    settings: ReferenceSettings, samples: list[ReferenceSample], steps: list[ReferenceStep], num_micro_batches: int
) -> tuple[FastReport, IterationReport, float]:
    """Reports of the fast functions and of the reference, and how far the weights they end with are apart."""
    models = _models(settings)
    twins = copy.deepcopy(models)
    fast = fast_iteration(models, samples, settings, steps, num_micro_batches=num_micro_batches, **_optimizers(models))
    plain = reference.ppo_iteration(
        twins.policy, twins.reference, twins.critic, samples, settings, steps=steps, **_optimizers(twins)
    )
    pairs = [pair for a, b in zip(models.all, twins.all, strict=True) for pair in zip(a.parameters(), b.parameters(), strict=True)]
    return fast, plain, max(float((a - b).detach().abs().max()) for a, b in pairs)


def _require_equal(
    settings: ReferenceSettings, samples: list[ReferenceSample], steps: list[ReferenceStep], num_micro_batches: int
) -> IterationReport:
    fast, plain, distance = _both(settings, samples, steps, num_micro_batches)
    for found, step in zip(fast.steps, plain.steps, strict=True):
        assert step.actor is not None
        assert found.actor_grad_norm == pytest.approx(step.actor.grad_norm, rel=1e-10)
        assert (found.critic_grad_norm is None) == (step.critic is None)
        if step.critic is not None:
            assert found.critic_grad_norm == pytest.approx(step.critic.grad_norm, rel=1e-10)
    assert fast.kl == pytest.approx(plain.kl, rel=1e-10)
    assert fast.rejected.tolist() == [one.rejected for one in plain.scored]
    mask = torch.cat([s.loss_mask for s in samples])
    assert fast.columns.rewards[mask].tolist() == pytest.approx([r for one in plain.scored for r in one.rewards], rel=1e-10)
    counted = torch.cat([s.loss_mask & one.counts for s, one in zip(samples, plain.scored, strict=True)])
    assert torch.equal(fast.columns.kept, counted)
    expected_returns = [g for one in plain.scored if one.counts for g in one.returns]
    assert fast.columns.returns[counted].tolist() == pytest.approx(expected_returns, rel=1e-10)
    assert distance <= 1e-10
    return plain


@pytest.mark.parametrize(
    ("case", "num_micro_batches"), [(case, 2) for case in CASES] + [(case, parts) for case in list(CASES)[:5] for parts in (1, 7)]
)
def test_iteration_of_the_fast_functions_equals_the_reference(case: str, num_micro_batches: int) -> None:
    changes, restricted = CASES[case]
    _require_equal(_settings(**changes), random_samples(3, restricted=restricted), STEPS, num_micro_batches)


@pytest.mark.parametrize("correction", [None, TIS, GEOMETRIC, ICEPOP], ids=["none", "tis", "geometric", "icepop"])
@pytest.mark.parametrize("policy_loss", POLICY_LOSSES.names())
@pytest.mark.parametrize("estimator", ADVANTAGE_ESTIMATORS.names())
def test_iteration_estimator_loss_and_correction_equal_the_reference(
    estimator: str, policy_loss: str, correction: CorrectionSettings | None
) -> None:
    spec = POLICY_LOSSES.entries[policy_loss]
    settings = _settings(
        advantage_estimator=estimator,
        normalize_advantages=ADVANTAGE_ESTIMATORS.entries[estimator].whitens,
        policy_loss=policy_loss,
        correction=correction,
        eps_clip=spec.eps_clip,
        eps_clip_c=3.0 if spec.dual_clip else None,
        loss_reduction=spec.reduction,
    )
    plain = _require_equal(settings, random_samples(3, restricted=True), TWO_STEPS, 2)
    rejected = sum(one.rejected for one in plain.scored)
    assert (0 < rejected < 5) == (correction is not None and correction.rejection != "none")
    assert (plain.explained_variance is None) == (estimator != "gae")


def test_iteration_without_normalization_by_the_std_equals_the_reference() -> None:
    plain = _require_equal(
        _settings(advantage_estimator="grpo", std_normalization=False, normalize_advantages=False),
        random_samples(3, restricted=False),
        TWO_STEPS,
        2,
    )
    assert any(a != 0 for one in plain.scored for a in one.advantages)


def test_iteration_step_of_rejected_samples_only_runs_no_optimizer_step() -> None:
    """A rejection that no sample passes: nothing moves, on either side."""
    settings = _settings(correction=CorrectionSettings(rejection="geometric", rejection_high=1e-8))
    fast, plain, _ = _both(settings, random_samples(3, restricted=False), STEPS, 2)
    assert plain.steps == () and fast.steps == []
    assert (plain.kl, fast.kl) == (0.0, 0.0)


def test_iteration_rejected_sample_teaches_neither_role_but_keeps_its_share_of_the_denominator() -> None:
    """Sample 4 rejected: its reward and values are without effect, and the loss is not that of the step without it."""
    samples = random_samples(3, restricted=False)
    far = dataclasses.replace(samples[4], rollout_log_probs=[-1e3] * len(samples[4].response_ids))
    settings = _settings(correction=CorrectionSettings(rejection="geometric", rejection_high=1e6), entropy_coef=0.0)
    step = [ReferenceStep([0, 1, 4, 5], 0.05, 0.03)]

    def run(fourth: ReferenceSample, steps: list[ReferenceStep]) -> IterationReport:
        policy, critic = TinyModel(VOCAB, 0), TinyModel(1, 2)
        return reference.ppo_iteration(
            policy,
            TinyModel(VOCAB, 1),
            critic,
            [*samples[:4], fourth, *samples[5:]],
            settings,
            steps=steps,
            actor_optimizer=torch.optim.Adam(policy.parameters()),
            critic_optimizer=torch.optim.Adam(critic.parameters()),
        )

    one, other = run(far, step), run(dataclasses.replace(far, reward=100.0, process_rewards=None), step)
    without = run(far, [ReferenceStep([0, 1, 5], 0.05, 0.03)])
    assert [s.rejected for s in one.scored] == [False] * 4 + [True] + [False] * 2
    assert one.steps == other.steps and one.kl == other.kl
    share = sum(len(samples[row].trainable) for row in (0, 1, 5)) / sum(len(samples[row].trainable) for row in (0, 1, 4, 5))
    for role in ("actor", "critic"):
        found, alone = (getattr(report.steps[0], role).grad_norm for report in (one, without))
        assert found == pytest.approx(share * alone, rel=1e-10)


def _critic_only_or_stopped(kl_early_stop: float | None, train_actor: bool) -> list[bool]:
    """Whether the actor stepped in each of three planned steps."""
    policy, critic = TinyModel(VOCAB, 0), TinyModel(1, 2)
    report = reference.ppo_iteration(
        policy,
        TinyModel(VOCAB, 1),
        critic,
        random_samples(3, restricted=False),
        _settings(kl_early_stop=kl_early_stop, kl_target=1e-3, clip_grad=10.0),
        steps=STEPS,
        actor_optimizer=torch.optim.Adam(policy.parameters()) if train_actor else None,
        critic_optimizer=torch.optim.Adam(critic.parameters()),
    )
    assert (report.next_kl_coef == 0.1) is not train_actor
    return [step.actor is not None for step in report.steps]


def test_iteration_early_stop_skips_the_remaining_actor_steps_but_never_the_first() -> None:
    assert _critic_only_or_stopped(None, True) == [True, True, True]
    assert _critic_only_or_stopped(1e-9, True) == [True, False, False]


def test_iteration_critic_only_leaves_actor_and_beta_alone() -> None:
    assert _critic_only_or_stopped(None, False) == [False, False, False]
