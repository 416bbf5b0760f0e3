"""The clipped PPO objective per token (SEMANTICS 7). Shapes: N response tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor

from slime_ppo.errors import ConfigError
from slime_ppo.ppo_utils.kl import LOG_RATIO_LIMIT
from slime_ppo.ppo_utils.packed import select


@dataclass(frozen=True)
class PolicyLoss:
    """Each [N], 0 or false where masked: `loss` (with gradient), `ratio` (detached); bool: which clip is the active branch
    of the loss, and where the log-ratio was clamped."""

    loss: Tensor
    ratio: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    clipped_dual: Tensor
    clamped: Tensor


def clipped_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    eps_clip_low: float,
    eps_clip_high: float,
    eps_clip_c: float | None = None,
) -> PolicyLoss:
    """loss_t = max(-A r, -A clip(r, 1 - eps_clip_low, 1 + eps_clip_high)), r = exp(clamp(log_probs - old_log_probs, +-20)).

    Schulman et al., "Proximal policy optimization algorithms" (2017), eq. 7, as a loss. With `eps_clip_c` = c > 1 and A < 0:
    min(that, -c A), Ye et al., "Mastering complex control in MOBA games" (2020), eq. 3. All [N]; the gradient flows through
    log_probs only, and not beyond the clamp. Reduce with aggregate.masked_weighted_sum. Raises ConfigError on c <= 1.
    """
    if eps_clip_c is not None and not eps_clip_c > 1:
        raise ConfigError(f"the dual clip is {eps_clip_c}; expected a number > 1 (--eps-clip-c)")
    log_ratio = select(log_probs - old_log_probs.detach(), mask)
    a = select(advantages.detach(), mask)
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    plain = -a * ratio
    clipped = -a * ratio.clamp(1.0 - eps_clip_low, 1.0 + eps_clip_high)
    loss = torch.maximum(plain, clipped)
    active = clipped > plain
    dual = torch.zeros_like(mask)
    if eps_clip_c is not None:
        bound = -eps_clip_c * a
        dual = (a < 0) & (loss > bound)
        loss = torch.where(dual, bound, loss)
    return PolicyLoss(
        loss=select(loss, mask),
        ratio=select(ratio.detach(), mask),
        clipped_low=active & (a < 0),
        clipped_high=active & (a > 0),
        clipped_dual=dual,
        clamped=log_ratio.abs() > LOG_RATIO_LIMIT,
    )
