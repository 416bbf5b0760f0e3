"""Per-token estimates of KL(p || q) from samples of p (SEMANTICS 10).

Shapes: N response tokens. Schulman, "Approximating KL divergence" (2020). With lr = log p - log q:

    k1 = lr        k2 = lr^2 / 2        k3 = e^(-lr) - 1 + lr        low_var_kl = k3 with its output clamped to +-10

k3 clamps lr to +-20 before the exponential, so that one token cannot overflow; k1 and k2 are unclamped.
As a *loss* on-policy, k2 has the gradient of the reverse KL, k3 that of the forward KL, and k1 a gradient whose expectation
is exactly zero. Times the ratio of the sampling policy (unbiased_kl_loss) each becomes unbiased.
"""

from dataclasses import dataclass
from typing import Literal, assert_never

import torch
from torch import Tensor

from slime_ppo.errors import ConfigError
from slime_ppo.ppo_utils.packed import select

KLKind = Literal["k1", "k2", "k3", "low_var_kl"]

LOG_RATIO_LIMIT = 20.0
LOW_VAR_LIMIT = 10.0


@dataclass(frozen=True)
class KLEstimate:
    """`kl` [N], 0 where masked; `clamped` bool [N]: trainable tokens where a clamp changed the estimate (what was clamped has
    no gradient there)."""

    kl: Tensor
    clamped: Tensor


def kl_estimate(kind: KLKind, log_probs: Tensor, other_log_probs: Tensor, mask: Tensor) -> KLEstimate:
    """Estimate of KL(p || q) at every trainable token, from log p = `log_probs` and log q = `other_log_probs`, each [N].

    p is the distribution the tokens were sampled from: (actor, reference) for the penalty, (old, current) for how far the
    actor moved. Differentiable in both.
    """
    log_ratio = select(log_probs - other_log_probs, mask)
    never = torch.zeros_like(mask)
    if kind == "k1":
        return KLEstimate(log_ratio, never)
    if kind == "k2":
        return KLEstimate(0.5 * log_ratio.square(), never)
    if kind == "k3" or kind == "low_var_kl":
        bounded = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        k3 = torch.expm1(-bounded) + bounded
        clamped = log_ratio.abs() > LOG_RATIO_LIMIT
        if kind == "k3":
            return KLEstimate(k3, clamped)
        return KLEstimate(k3.clamp(-LOW_VAR_LIMIT, LOW_VAR_LIMIT), clamped | (k3.abs() > LOW_VAR_LIMIT))
    assert_never(kind)


def kl_loss(kind: KLKind, log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor) -> KLEstimate:
    """Per-token KL loss of the actor to the reference, with gradient through `log_probs` only.

    Both are full-vocabulary log-probs: over a sampler's support the estimate is blind to what lies outside.
    Raises ConfigError for k1, whose gradient is zero in expectation: it would only add noise.
    """
    if kind == "k1":
        raise ConfigError(
            "k1 as a KL loss has a gradient of zero in expectation; choose k2, k3 or low_var_kl (--kl-loss-type), "
            "weigh it with the ratio (--use-unbiased-kl), or put the KL into the reward (--kl-coef)"
        )
    return kl_estimate(kind, log_probs, ref_log_probs.detach(), mask)


def unbiased_kl_loss(kind: KLKind, log_probs: Tensor, ref_log_probs: Tensor, log_ratio: Tensor, mask: Tensor) -> KLEstimate:
    """kl_estimate times r = exp(clamp(log_ratio, +-20)), per token [N]: the KL of the actor as it is now, from old samples.

    `log_ratio` [N] = current - old log-prob of the policy that sampled, over its support, never clipped. Its gradient counts:
    E_old[r k1] and E_old[r k3] equal KL(p || p_ref) as a function of the parameters, so their gradient is its gradient. For
    k2 the ratio is detached: E_old[r k2] is not the KL, but r times the gradient of k2 is r lr grad(log p), whose
    expectation is the gradient of the KL. DeepSeek-AI, "DeepSeek-V3.2" (2025), section 3.1, "Unbiased KL estimate".
    Gradient through `log_probs` and `log_ratio`, none through `ref_log_probs`; none of the ratio beyond its clamp.
    """
    estimate = kl_estimate(kind, log_probs, ref_log_probs.detach(), mask)
    kept = select(log_ratio.detach() if kind == "k2" else log_ratio, mask)
    ratio = kept.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return KLEstimate(estimate.kl * ratio, estimate.clamped | (kept.abs() > LOG_RATIO_LIMIT))
