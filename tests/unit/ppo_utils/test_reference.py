"""The oracle: its parts against hand-computed values, and the whole iteration against the fast functions composed."""

import copy
import math

import pytest
import torch

from slime_ppo.ppo_utils import reference
from slime_ppo.ppo_utils.reference_types import ReferenceSample, ReferenceSettings, ReferenceStep
from tests.helpers.ppo_cases import VOCAB, TinyModel, fast_iteration, random_samples

STEPS = [
    ReferenceStep([4, 0, 6, 2], 0.05, 0.03),
    ReferenceStep([1, 3, 5], 0.04, 0.02),
    ReferenceStep([0, 1, 2, 3, 4, 5, 6], 0.05, 0.03),
]


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


CASES = {
    "token-mean": ({}, False),
    "support": ({"kl_coef": 0.0, "kl_loss_coef": 0.2}, True),
    "seq-mean-token-mean": ({"loss_reduction": "seq-mean-token-mean", "adaptive_lambd": 0.7, "value_clip": 0.0}, False),
    "seq-mean-token-sum": ({"loss_reduction": "seq-mean-token-sum", "kl_loss_coef": 0.1, "kl_loss_type": "k2"}, True),
    "seq-mean-token-sum-norm": ({"loss_reduction": "seq-mean-token-sum-norm", "loss_length_norm": 5.0, "value_clip": 0.05}, False),
}


@pytest.mark.parametrize("num_micro_batches", [1, 2, 7])
@pytest.mark.parametrize("case", CASES)
def test_iteration_of_the_fast_functions_equals_the_reference(case: str, num_micro_batches: int) -> None:
    changes, restricted = CASES[case]
    settings, samples = _settings(**changes), random_samples(3, restricted=restricted)
    models = {"policy": TinyModel(VOCAB + 3, 0), "reference": TinyModel(VOCAB + 3, 1), "critic": TinyModel(1, 2)}
    twins = copy.deepcopy(models)
    optimizers = [
        {
            "actor_optimizer": torch.optim.Adam(side["policy"].parameters()),
            "critic_optimizer": torch.optim.Adam(side["critic"].parameters()),
        }
        for side in (models, twins)
    ]
    fast = fast_iteration(
        **models, samples=samples, settings=settings, steps=STEPS, num_micro_batches=num_micro_batches, **optimizers[0]
    )
    plain = reference.ppo_iteration(**twins, samples=samples, settings=settings, steps=STEPS, **optimizers[1])
    assert fast.actor_grad_norms == pytest.approx([s.actor.grad_norm for s in plain.steps if s.actor is not None], rel=1e-10)
    assert fast.critic_grad_norms == pytest.approx([s.critic.grad_norm for s in plain.steps], rel=1e-10)
    mask = torch.cat([s.loss_mask for s in samples])
    assert fast.rewards[mask].tolist() == pytest.approx([r for one in plain.scored for r in one.rewards], rel=1e-10)
    for role in ("policy", "critic"):
        for name, parameter in models[role].named_parameters():
            assert torch.allclose(parameter, dict(twins[role].named_parameters())[name], rtol=0, atol=1e-10), (role, name)


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
