"""Options of the algorithm that a run does not use: a warning each, and none where they are used."""

import pytest

from slime_ppo.config.checks import check_config, config_warnings
from slime_ppo.config.fields import Value
from slime_ppo.ppo_utils.registries import EstimatorSpec
from tests.helpers.configs import make_config

Values = dict[str, Value]
GRPO: Values = {"ppo__advantage_estimator": "grpo", "rollout__n_samples_per_prompt": 2}
REINFORCE: Values = {"ppo__advantage_estimator": "reinforce_plus_plus"}
KL_LOSS: Values = {"ppo__use_kl_loss": True, "ppo__kl_loss_coef": 0.1}
WITHOUT_CRITIC = EstimatorSpec(
    "package.module.estimator", needs_critic=False, whitens=False, uses_token_rewards=True, uses_groups=False
)
_CRITIC = "used only with an --advantage-estimator that has a critic (gae)"


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({**GRPO, "ppo__value_clip": 0.1}, ("--value-clip 0.1 has no effect", _CRITIC)),
        ({**GRPO, "critic__lr": 1e-3}, ("--critic-lr 0.001 has no effect", _CRITIC)),
        ({**GRPO, "critic__load": "trunk"}, ("--critic-load trunk has no effect", _CRITIC)),
        ({**GRPO, "ppo__lambd": 0.9}, ("--lambd 0.9 has no effect", _CRITIC)),
        ({**REINFORCE, "ppo__lambd_critic": 0.9}, ("--lambd-critic 0.9 has no effect", _CRITIC)),
        ({**REINFORCE, "ppo__adaptive_lambd": 2.0}, ("--adaptive-lambd 2.0 has no effect", _CRITIC)),
        ({**GRPO, "ppo__gamma": 0.9}, ("--gamma 0.9 has no effect", "reads token rewards")),
        ({**GRPO, "ppo__whiten_domain": "step"}, ("--whiten-domain step has no effect", "--normalize-advantages")),
        ({"ppo__grpo_std_normalization": False}, ("--no-grpo-std-normalization has no effect", "--advantage-estimator grpo")),
        ({"ppo__masked_in_baseline": True, "ppo__truncation_policy": "mask"}, ("--masked-in-baseline has no", "compares a group")),
        ({**GRPO, "ppo__masked_in_baseline": True}, ("--masked-in-baseline has no effect", "--truncation-policy mask")),
        ({**KL_LOSS, "ppo__kl_support": "sampled"}, ("--kl-support sampled has no effect", "a restricted sampler")),
        (
            {"ppo__kl_support": "sampled", "rollout__rollout_top_p": 0.9},
            ("--kl-support sampled has no effect", "--kl-coef above 0 or --use-kl-loss"),
        ),
        ({**KL_LOSS, "ppo__allow_double_kl": True}, ("--allow-double-kl has no effect", "--kl-coef above 0 together with")),
        ({"ppo__kl_coef": 0.1, "ppo__allow_double_kl": True}, ("--allow-double-kl has no effect", "--use-kl-loss")),
        ({"ppo__entropy_support": "sampled"}, ("--entropy-support sampled has no effect", "a restricted sampler")),
        (
            {"batch__micro_batch_size": 4, "batch__use_dynamic_batch_size": True, "batch__max_tokens_per_gpu": 100},
            ("--micro-batch-size 4 has no effect", "--no-use-dynamic-batch-size"),
        ),
        ({"cluster__colocate": False, "cluster__offload": False}, ("--no-offload has no effect", "that are shared (--colocate)")),
        ({"correction__cap": 3.0}, ("--rollout-correction-cap 3.0 has no effect", "--rollout-correction tis")),
        ({"correction__mode": "tis", "correction__low": 0.1}, ("--rollout-correction-low 0.1 has no effect", "icepop")),
        ({"correction__mode": "tis", "correction__high": 9.0}, ("--rollout-correction-high 9.0 has no effect", "icepop")),
        ({"correction__level": "sequence"}, ("--rollout-correction-level sequence has no effect", "tis or icepop")),
        ({"correction__rejection_low": 0.1}, ("--rollout-rejection-low 0.1 has no effect", "--rollout-rejection sequence")),
        ({"correction__rejection_high": 9.0}, ("--rollout-rejection-high 9.0 has no effect", "or geometric")),
        (
            {"correction__use_rollout_log_probs": True, "rollout__max_logprob_gap": 0.1},
            ("--max-logprob-gap 0.1 has no effect", "--no-use-rollout-log-probs"),
        ),
    ],
)
def test_unused_options_are_warned_of_and_the_run_goes_on(values: Values, parts: tuple[str, ...]) -> None:
    check_config(make_config(**values))
    [warning] = config_warnings(make_config(**values))
    assert [part for part in parts if part not in warning] == [], warning


@pytest.mark.parametrize(
    "values",
    [
        {**GRPO, "ppo__grpo_std_normalization": False, "ppo__masked_in_baseline": True, "ppo__truncation_policy": "mask"},
        {**GRPO, "ppo__normalize_advantages": True, "ppo__whiten_domain": "step"},
        {**REINFORCE, "ppo__gamma": 0.9, "ppo__whiten_domain": "step"},
        {"ppo__advantage_estimator": f"{__name__}.WITHOUT_CRITIC", "ppo__gamma": 0.9, "ppo__lambd": 0.9},
        {"ppo__kl_support": "sampled", "ppo__entropy_support": "sampled", "ppo__kl_coef": 0.1, "rollout__rollout_min_p": 0.1},
        {"correction__mode": "tis", "correction__cap": 3.0, "correction__level": "sequence"},
        {"correction__mode": "icepop", "correction__low": 0.1, "correction__high": 3.0},
        {"correction__rejection": "geometric", "correction__rejection_low": 0.9, "correction__rejection_high": 1.1},
        {"correction__use_rollout_log_probs": True},
        {"critic__lr": 1e-3, "ppo__value_clip": 0.1},
        {"cluster__colocate": False},
        {**KL_LOSS, "ppo__kl_coef": 0.1, "ppo__allow_double_kl": True},
    ],
)
def test_unused_options_are_silent_about_options_in_use(values: Values) -> None:
    check_config(make_config(**values))
    assert config_warnings(make_config(**values)) == ()
