"""Every combination of estimator, policy loss, KL and correction that is refused, with the parts its message must have."""

import pytest

from slime_ppo.config.checks import check_config
from slime_ppo.config.fields import Value
from slime_ppo.errors import ConfigError
from slime_ppo.ppo_utils.registries import EstimatorSpec, PolicyLossSpec
from tests.helpers.configs import make_config

Values = dict[str, Value]
KL_LOSS: Values = {"ppo__use_kl_loss": True, "ppo__kl_loss_coef": 0.1}
BYPASS: Values = {"correction__use_rollout_log_probs": True}
CLIP_FREE = PolicyLossSpec("package.module.loss", eps_clip=None, eps_clip_high=None, dual_clip=False, reduction="token-mean")
WITHOUT_CRITIC = EstimatorSpec(
    "package.module.estimator", needs_critic=False, whitens=False, uses_token_rewards=True, uses_groups=False
)
NO_SPEC = 3


def by(estimator: str, **values: Value) -> Values:
    return {"ppo__advantage_estimator": estimator, "rollout__n_samples_per_prompt": 2} | values


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        (by("grppo"), ("config: ppo.advantage_estimator", "'grppo'", "did you mean 'grpo'?", "Known: gae, grpo")),
        ({"ppo__policy_loss": "gppo"}, ("config: ppo.policy_loss", "'gppo'", "Known: cispo, gspo, ppo")),
        (by("my_package.MINE"), ("ppo.advantage_estimator: my_package.MINE cannot be used", "No module named")),
        (by(f"{__name__}.NO_SPEC"), ("NO_SPEC is a int", "expected an object of type EstimatorSpec")),
        ({"ppo__policy_loss": f"{__name__}.WITHOUT_CRITIC"}, ("expected an object of type PolicyLossSpec",)),
        (
            by("rloo", ppo__truncation_policy="bootstrap"),
            (
                "--truncation-policy bootstrap",
                "--advantage-estimator rloo has no critic",
                "Use --truncation-policy terminal or mask",
            ),
        ),
        (
            by(f"{__name__}.WITHOUT_CRITIC", ppo__truncation_policy="bootstrap"),
            ("--truncation-policy bootstrap", "WITHOUT_CRITIC has no critic"),
        ),
        (
            by("grpo", ppo__num_critic_only_steps=1),
            ("--num-critic-only-steps 1", "--advantage-estimator grpo has no critic", "Use --num-critic-only-steps 0"),
        ),
        *(
            (
                by(name, ppo__kl_coef=0.1),
                ("--kl-coef 0.1 charges the KL in the token rewards", f"--advantage-estimator {name} does not", "Use --kl-coef 0"),
            )
            for name in ("grpo", "rloo", "reinforce_plus_plus_baseline")
        ),
        (
            by("grpo", ppo__kl_controller="adaptive", ppo__kl_target=1.0, ppo__kl_horizon=10),
            ("--kl-controller adaptive steers", "--advantage-estimator grpo does not read", "Use --kl-controller fixed"),
        ),
        (
            by("grpo", rollout__n_samples_per_prompt=1),
            ("--advantage-estimator grpo compares", "--n-samples-per-prompt 1", "Use --n-samples-per-prompt 2 or more"),
        ),
        (
            {"ppo__policy_loss": "gspo", "ppo__eps_clip_c": 3.0},
            ("--eps-clip-c 3.0 is the dual clip, which --policy-loss gspo does not have", "Leave it out"),
        ),
        ({"ppo__policy_loss": "cispo", "ppo__eps_clip_c": 3.0}, ("--policy-loss cispo does not have",)),
        ({"ppo__policy_loss": f"{__name__}.CLIP_FREE"}, ("CLIP_FREE has no default clip", "Set --eps-clip-high")),
        (
            {"ppo__policy_loss": "gspo", "ppo__loss_length_norm": 8.0},
            ("--loss-length-norm 8.0", "found --loss-reduction seq-mean-token-mean (default of --policy-loss gspo)"),
        ),
        ({**KL_LOSS, "ppo__kl_loss_type": "k1"}, ("--kl-loss-type k1", "gradient of exactly zero", "or add --use-unbiased-kl; or")),
        (
            by("grpo", **KL_LOSS, ppo__kl_loss_type="k1"),
            ("--kl-loss-type k1", "Use k2 (reverse-KL gradient), k3 or low_var_kl, or add --use-unbiased-kl"),
        ),
        ({"ppo__use_unbiased_kl": True}, ("--use-unbiased-kl is used only with --use-kl-loss",)),
        ({"correction__mode": "tis", "correction__cap": 0.5}, ("correction.cap is 0.5", ">= 1", "a range without 1")),
        ({"correction__low": 1.5}, ("correction.low is 1.5", ">= 0 and <= 1")),
        ({"correction__rejection_high": 0.9}, ("correction.rejection_high is 0.9", ">= 1")),
        (
            {"correction__mode": "icepop", "correction__low": 1.0, "correction__high": 1.0},
            ("--rollout-correction-low 1.0 and --rollout-correction-high 1.0 keep the ratio inside [1, 1]", "Move one"),
        ),
        (
            {"correction__rejection": "sequence", "correction__rejection_low": 1, "correction__rejection_high": 1},
            ("--rollout-rejection-low 1 and --rollout-rejection-high 1", "Move one"),
        ),
        (
            {**BYPASS, "correction__mode": "tis"},
            ("--use-rollout-log-probs takes the engine's", "--rollout-correction tis would do nothing", "Drop one"),
        ),
        ({**BYPASS, "correction__rejection": "sequence"}, ("--rollout-rejection sequence would do nothing",)),
        (
            {**BYPASS, "ppo__kl_coef": 0.1, "rollout__rollout_top_p": 0.9, "rollout__rollout_min_p": 0.1},
            (
                "--use-rollout-log-probs with --kl-coef 0.1",
                "(--rollout-top-p 0.9 and --rollout-min-p 0.1)",
                "--kl-support sampled",
            ),
        ),
    ],
)
def test_check_config_refuses_with_reason_and_fix(values: Values, parts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        check_config(make_config(**values))
    assert [part for part in parts if part not in str(caught.value)] == [], str(caught.value)


@pytest.mark.parametrize(
    "values",
    [
        by("grpo"),
        by("grpo", **KL_LOSS),
        by("rloo", ppo__truncation_policy="mask"),
        by("reinforce_plus_plus", ppo__kl_coef=0.1, rollout__n_samples_per_prompt=1),
        by("reinforce_plus_plus", ppo__kl_coef=0.1, ppo__kl_controller="adaptive", ppo__kl_target=1.0, ppo__kl_horizon=10),
        by(f"{__name__}.WITHOUT_CRITIC", ppo__kl_coef=0.1, rollout__n_samples_per_prompt=1),
        {"ppo__policy_loss": "ppo", "ppo__eps_clip_c": 3.0},
        {"ppo__policy_loss": f"{__name__}.CLIP_FREE", "ppo__eps_clip_high": 0.2},
        {"ppo__policy_loss": "gspo"},
        {"ppo__policy_loss": "gspo", "ppo__loss_reduction": "seq-mean-token-sum-norm", "ppo__loss_length_norm": 8.0},
        {"ppo__policy_loss": "cispo", "ppo__eps_clip": 0.5},
        {**KL_LOSS, "ppo__kl_loss_type": "k1", "ppo__use_unbiased_kl": True},
        {"correction__mode": "tis", "correction__level": "sequence", "correction__rejection": "geometric"},
        {"correction__mode": "icepop", "correction__low": 1.0},
        BYPASS,
        {**BYPASS, "ppo__kl_coef": 0.1},
        {**BYPASS, "ppo__kl_coef": 0.1, "rollout__rollout_top_k": -1},
        {**BYPASS, "ppo__kl_coef": 0.1, "rollout__rollout_top_p": 0.9, "ppo__kl_support": "sampled"},
        {**BYPASS, **KL_LOSS, "rollout__rollout_top_p": 0.9},
    ],
)
def test_check_config_accepts_what_can_run(values: Values) -> None:
    check_config(make_config(**values))


def test_check_config_unknown_estimator_names_the_line_or_the_flag_that_gave_it() -> None:
    config = make_config(ppo__advantage_estimator="rlo")
    origins = dict.fromkeys(config.values(), "default")
    for origin, start in (
        ("a.yaml:3", "a.yaml:3: ppo.advantage_estimator: no"),
        ("--advantage-estimator", "--advantage-estimator: no"),
    ):
        with pytest.raises(ConfigError) as caught:
            check_config(config, origins=origins | {"ppo.advantage_estimator": origin})
        assert str(caught.value).startswith(start)
