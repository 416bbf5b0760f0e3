"""The clipped value loss per token, and how much of the returns the critic explains (SEMANTICS 8). Shapes: N response tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor

from slime_ppo.errors import ConfigError
from slime_ppo.ppo_utils.moments import ExplainedVariance
from slime_ppo.ppo_utils.packed import select
from slime_ppo.ppo_utils.whiten import local_moments


@dataclass(frozen=True)
class ValueLoss:
    """`loss` [N] with gradient, 0 where masked; `clipped` bool [N]: tokens where the clipped branch is strictly larger."""

    loss: Tensor
    clipped: Tensor


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, value_clip: float) -> ValueLoss:
    """loss_t = 0.5 max((V - G)^2, (clip(V, V_old - value_clip, V_old + value_clip) - G)^2); value_clip 0 = 0.5 (V - G)^2.

    All [N]; the gradient flows through `values` only. From the code released with Schulman et al. (2017), made explicit in
    Engstrom et al., "Implementation matters in deep policy gradients" (2020), section 3. Raises ConfigError on value_clip < 0.
    """
    if value_clip < 0:
        raise ConfigError(f"the value clip is {value_clip}; expected 0 (off) or a number > 0 (--value-clip)")
    v, old, target = select(values, mask), select(old_values.detach(), mask), select(returns.detach(), mask)
    plain = (v - target).square()
    if value_clip == 0:
        return ValueLoss(loss=select(0.5 * plain, mask), clipped=torch.zeros_like(mask))
    clipped = (v.clamp(old - value_clip, old + value_clip) - target).square()
    return ValueLoss(loss=select(0.5 * torch.maximum(plain, clipped), mask), clipped=mask & (clipped > plain))


@torch.no_grad()
def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> ExplainedVariance:
    """What 1 - var(G - V_old) / var(G) needs of these tokens [N]; merge over ranks, then read `.value`."""
    kept = returns[mask]
    bounds = (float(kept.min()), float(kept.max())) if kept.numel() else (float("inf"), float("-inf"))
    return ExplainedVariance(
        returns=local_moments(returns, mask),
        residuals=local_moments(returns.double() - values.double(), mask),
        lowest_return=bounds[0],
        highest_return=bounds[1],
    )
