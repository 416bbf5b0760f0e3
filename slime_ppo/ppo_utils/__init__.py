"""The mathematics of PPO for language models: pure functions of tensors, numbers and process groups.

Importable alone, with torch only. Names are resolved on first use, because the driver, which has no torch, uses
kl_controller, lr_schedule, denominator, moments and support_checks from here.

Layout of every function: per-response-token values of all samples in one flat tensor [N], in sample order, with
`lens` int64 [S] saying how many belong to each sample (sum = N). No padding, no [S, max_len] tensor.

    reference.py       the whole update on unsharded tensors: start reading here
    vocab_parallel.py  log-probs and entropy from logits whose vocabulary is split over ranks
    top_p.py           the same, renormalised over the ids the sampler could have drawn
    kl.py, kl_controller.py, token_rewards.py, gae.py, whiten.py, policy_loss.py, value_loss.py
    denominator.py, aggregate.py   what a loss is divided by; how tokens are summed
"""

import importlib
from typing import Any

_MODULE_OF = {
    "AdaptiveKL": "kl_controller",
    "Advantages": "gae",
    "Denominator": "denominator",
    "ExplainedVariance": "moments",
    "FixedKL": "kl_controller",
    "MeasuredKL": "kl_controller",
    "Moments": "moments",
    "PolicyLoss": "policy_loss",
    "SupportLogProbs": "top_p",
    "TokenLogProbs": "vocab_parallel",
    "TokenRewards": "token_rewards",
    "ValueLoss": "value_loss",
    "build_token_rewards": "token_rewards",
    "clipped_policy_loss": "policy_loss",
    "clipped_value_loss": "value_loss",
    "explained_variance": "value_loss",
    "generalized_advantages": "gae",
    "kl_estimate": "kl",
    "kl_loss": "kl",
    "learning_rate": "lr_schedule",
    "make_denominator": "denominator",
    "masked_sum": "aggregate",
    "masked_weighted_sum": "aggregate",
    "measure_kl": "kl_controller",
    "require_finite": "packed",
    "segment_sum": "packed",
    "support_log_probs": "top_p",
    "token_weights": "aggregate",
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
