"""The mathematics of PPO for language models: pure functions of tensors, numbers and process groups.

Importable alone, with torch only. Names are resolved on first use, because the driver, which has no torch, uses registries,
kl_controller, lr_schedule, denominator, moments, off_policy_stats, reward_shaping and support_checks from here.

Layout of every function: per-response-token values of all samples in one flat tensor [N], in sample order, with
`lens` int64 [S] saying how many belong to each sample (sum = N). No padding, no [S, max_len] tensor. Under context
parallelism a rank holds n of the N tokens, and `lens` counts those; every rank of the group knows the same S samples.

    reference.py         the whole update on unsharded tensors: start reading here (estimators in reference_estimators.py)
    vocab_parallel.py    log-probs and entropy from logits whose vocabulary is split over ranks (vocab_rows.py: its equations;
                         triton_kernels/: the same for CUDA tensors)
    top_p.py             the same, renormalised over the ids the sampler could have drawn (support_rows.py: its equations)
    linear_logprob.py    both, from hidden states and the lm-head's weight, without the logits (linear_loss.py: a loss on them;
                         linear_supports.py, linear_blocks.py, linear_gather.py: its parts)
    cp_ops.py            gathers, shares and sums over sequences that are split over ranks
    token_rewards.py, reward_shaping.py, kl.py, kl_controller.py
    gae.py, group_baselines.py, advantages.py, whiten.py, off_policy.py
    policy_loss.py, gspo.py, cispo.py, value_loss.py
    denominator.py, aggregate.py   what a loss is divided by; how tokens are summed
    registries.py        the names of the estimators and policy losses
    packed.py, moments.py, off_policy_stats.py, support_checks.py, lr_schedule.py   what several of these share, and the driver
"""

import importlib
from typing import Any

_MODULE_OF = {
    "ADVANTAGE_ESTIMATORS": "registries",
    "AdaptiveKL": "kl_controller",
    "AdvantageInputs": "advantages",
    "AdvantageSettings": "advantages",
    "Advantages": "gae",
    "BlockPlan": "linear_blocks",
    "ClipRange": "policy_loss",
    "ContextShard": "cp_ops",
    "CorrectionSettings": "off_policy_stats",
    "Denominator": "denominator",
    "EstimatorSpec": "registries",
    "ExplainedVariance": "moments",
    "FixedKL": "kl_controller",
    "KLEstimate": "kl",
    "MeasuredKL": "kl_controller",
    "Mismatch": "off_policy_stats",
    "Moments": "moments",
    "POLICY_LOSSES": "registries",
    "PolicyInputs": "policy_loss",
    "PolicyLoss": "policy_loss",
    "PolicyLossSpec": "registries",
    "RolloutCorrection": "off_policy",
    "SequenceRewards": "group_baselines",
    "SupportLogProbs": "top_p",
    "TokenLogProbs": "vocab_parallel",
    "TokenLoss": "linear_loss",
    "TokenRewards": "token_rewards",
    "TokenSupports": "support_rows",
    "ValueLoss": "value_loss",
    "build_token_rewards": "token_rewards",
    "cispo_policy_loss": "cispo",
    "clipped_policy_loss": "policy_loss",
    "clipped_value_loss": "value_loss",
    "explained_variance": "value_loss",
    "gae_advantages": "advantages",
    "generalized_advantages": "gae",
    "grpo_advantages": "advantages",
    "gspo_policy_loss": "gspo",
    "informative_groups": "reward_shaping",
    "kl_estimate": "kl",
    "kl_loss": "kl",
    "learning_rate": "lr_schedule",
    "linear_log_probs": "linear_logprob",
    "linear_support_log_probs": "linear_logprob",
    "linear_token_loss": "linear_logprob",
    "load": "registries",
    "loss_sum": "aggregate",
    "make_denominator": "denominator",
    "masked_sum": "aggregate",
    "measure_kl": "kl_controller",
    "overlong_penalty": "reward_shaping",
    "reinforce_plus_plus_advantages": "advantages",
    "reinforce_plus_plus_baseline_advantages": "advantages",
    "require_finite": "packed",
    "resolve_estimator": "registries",
    "resolve_policy_loss": "registries",
    "rloo_advantages": "advantages",
    "rollout_correction": "off_policy",
    "rollout_mismatch": "off_policy",
    "sample_sums": "cp_ops",
    "segment_sum": "packed",
    "support_and_vocab_log_probs": "top_p",
    "support_log_probs": "top_p",
    "unbiased_kl_loss": "kl",
    "validate_support": "support_checks",
    "vocab_log_probs": "vocab_parallel",
    "whiten_advantages": "whiten",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted(_MODULE_OF)
