"""CISPO: the policy gradient with a clipped importance weight per token (SEMANTICS 13). Shapes: n response tokens."""

import torch
from torch import Tensor

from slime_ppo.errors import ConfigError
from slime_ppo.ppo_utils.kl import LOG_RATIO_LIMIT
from slime_ppo.ppo_utils.packed import select
from slime_ppo.ppo_utils.policy_loss import ClipRange, PolicyInputs, PolicyLoss


def cispo_policy_loss(inputs: PolicyInputs, clip: ClipRange) -> PolicyLoss:
    """loss_t = -sg(clip(r)) A log_prob, r = exp(clamp(log_probs - old_log_probs, +-20)), sg = without gradient.

    MiniMax, "MiniMax-M1: scaling test-time compute efficiently with lightning attention" (2025), eq. 4 and 5: the weight of a
    token is clipped, its gradient never dropped, for either sign of A. r is clipped to at most 1 + high, and to at least
    1 - low only if `low` is set (the paper leaves it off). `clipped_low` and `clipped_high` are the tokens whose weight was
    clipped. Beyond the clamp of the log-ratio the gradient stays: it is that of log_prob, with a bounded weight.
    No collective. Reduce with aggregate.loss_sum. Raises ConfigError with a dual clip.
    """
    if clip.dual is not None:
        raise ConfigError(f"cispo has no dual clip, found {clip.dual}; leave it off (--eps-clip-c) or use policy loss ppo")
    mask = inputs.mask
    log_ratio = select((inputs.log_probs - inputs.old_log_probs).detach(), mask)
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    lowest = None if clip.low is None else 1.0 - clip.low
    weight = ratio.clamp(lowest, 1.0 + clip.high) * select(inputs.advantages.detach(), mask)
    return PolicyLoss(
        loss=-weight * select(inputs.log_probs, mask),
        ratio=select(ratio, mask),
        clipped_low=_none_of(mask) if lowest is None else mask & (ratio < lowest),
        clipped_high=mask & (ratio > 1.0 + clip.high),
        clipped_dual=_none_of(mask),
        clamped=log_ratio.abs() > LOG_RATIO_LIMIT,
    )


def _none_of(mask: Tensor) -> Tensor:
    return torch.zeros_like(mask)
