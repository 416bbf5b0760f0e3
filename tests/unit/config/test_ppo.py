"""Defaults of section ppo that depend on the estimator and the policy loss."""

from dataclasses import replace

import pytest

from slime_ppo.config.fields import Value
from slime_ppo.config.ppo import PpoConfig
from slime_ppo.errors import ConfigError
from slime_ppo.ppo_utils.denominator import make_denominator
from slime_ppo.ppo_utils.registries import EstimatorSpec, PolicyLossSpec
from tests.helpers.configs import make_config

CLIP_FREE = PolicyLossSpec("package.module.loss", eps_clip=None, eps_clip_high=None, dual_clip=False, reduction="token-mean")
WITHOUT_CRITIC = EstimatorSpec(
    "package.module.estimator", needs_critic=False, whitens=False, uses_token_rewards=True, uses_groups=False
)


@pytest.mark.parametrize(
    ("name", "needs_critic", "whitens"),
    [
        ("gae", True, True),
        ("grpo", False, False),
        ("rloo", False, False),
        ("reinforce_plus_plus", False, True),
        ("reinforce_plus_plus_baseline", False, False),
        (f"{__name__}.WITHOUT_CRITIC", False, False),
    ],
)
def test_estimator_decides_critic_and_whitening_and_a_given_whitening_wins(name: str, needs_critic: bool, whitens: bool) -> None:
    ppo = PpoConfig(advantage_estimator=name)
    assert (ppo.needs_critic, ppo.whitens) == (needs_critic, whitens)
    assert [replace(ppo, normalize_advantages=given).whitens for given in (True, False)] == [True, False]


@pytest.mark.parametrize(
    ("policy_loss", "given", "clips"),
    [
        ("ppo", (None, None), (0.2, 0.2)),
        ("ppo", (0.3, None), (0.3, 0.3)),
        ("ppo", (None, 0.28), (0.2, 0.28)),
        ("gspo", (None, None), (3e-4, 4e-4)),
        ("gspo", (1e-3, None), (1e-3, 1e-3)),
        ("gspo", (None, 1e-3), (3e-4, 1e-3)),
        ("cispo", (None, None), (None, 0.2)),
        ("cispo", (None, 5.0), (None, 5.0)),
        ("cispo", (0.5, 5.0), (0.5, 5.0)),
        (f"{__name__}.CLIP_FREE", (None, 2.0), (None, 2.0)),
    ],
)
def test_clips_default_to_those_of_the_policy_loss(
    policy_loss: str, given: tuple[float | None, float | None], clips: tuple[float | None, float]
) -> None:
    ppo = PpoConfig(policy_loss=policy_loss, eps_clip=given[0], eps_clip_high=given[1])
    assert (ppo.clip_low, ppo.clip_high) == clips


def test_clip_high_of_a_loss_without_any_default_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no default clip. Set --eps-clip-high"):
        _ = PpoConfig(policy_loss=f"{__name__}.CLIP_FREE").clip_high


@pytest.mark.parametrize(
    ("policy_loss", "expected"), [("ppo", "token-mean"), ("gspo", "seq-mean-token-mean"), ("cispo", "token-mean")]
)
def test_reduction_defaults_to_that_of_the_policy_loss(policy_loss: str, expected: str) -> None:
    assert PpoConfig(policy_loss=policy_loss).reduction == expected
    assert PpoConfig(policy_loss=policy_loss, loss_reduction="seq-mean-token-sum").reduction == "seq-mean-token-sum"


@pytest.mark.parametrize("reduction", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"])
def test_every_reduction_that_the_flag_takes_makes_a_denominator(reduction: str) -> None:
    values: dict[str, Value] = {"ppo__loss_reduction": reduction, "ppo__loss_length_norm": 4.0}
    ppo = make_config(**values).ppo
    assert make_denominator([2, 2], [0, 1], mode=ppo.reduction, length_norm=ppo.loss_length_norm).mode == reduction
