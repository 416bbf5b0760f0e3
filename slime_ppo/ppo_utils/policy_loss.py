"""The clipped PPO objective per token, and what every policy loss takes and gives (SEMANTICS 7).

Shapes: n response tokens of this rank, S samples. A policy loss is a function (PolicyInputs, ClipRange) -> PolicyLoss;
gspo.py and cispo.py hold two more, registries.py their names.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from slime_ppo.errors import ConfigError
from slime_ppo.ppo_utils.kl import LOG_RATIO_LIMIT
from slime_ppo.ppo_utils.packed import select


@dataclass(frozen=True)
class PolicyInputs:
    """What a policy loss sees of a micro-batch, packed [n]; the gradient flows through `log_probs` only.

    `lens` int64 [S]: tokens of each sample on this rank. `cp_group`: the context-parallel ranks that hold the other tokens of
    these samples, None = there are none; only a loss with a ratio per sequence needs it.
    """

    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    mask: Tensor
    lens: Tensor
    cp_group: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class ClipRange:
    """The ratio is clipped to [1 - low, 1 + high]; `low` None = no lower clip (cispo only). `dual` = c of the dual clip, > 1."""

    low: float | None
    high: float
    dual: float | None = None

    def __post_init__(self) -> None:
        if self.low is not None and not self.low >= 0:
            raise ConfigError(f"the lower clip of the ratio is {self.low}; expected a number >= 0 (--eps-clip)")
        if not self.high >= 0:
            raise ConfigError(f"the upper clip of the ratio is {self.high}; expected a number >= 0 (--eps-clip-high)")
        if self.dual is not None and not self.dual > 1:
            raise ConfigError(f"the dual clip is {self.dual}; expected a number > 1 (--eps-clip-c)")


@dataclass(frozen=True)
class PolicyLoss:
    """Each [n], 0 or false where masked: `loss` (with gradient), `ratio` (detached); bool: which clip is the active branch
    of the loss, and where the log-ratio was clamped."""

    loss: Tensor
    ratio: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    clipped_dual: Tensor
    clamped: Tensor


def clipped_policy_loss(inputs: PolicyInputs, clip: ClipRange) -> PolicyLoss:
    """loss_t = max(-A r, -A clip(r, 1 - low, 1 + high)), r = exp(clamp(log_probs - old_log_probs, +-20)).

    Schulman et al., "Proximal policy optimization algorithms" (2017), eq. 7, as a loss. With `dual` = c > 1 and A < 0:
    min(that, -c A), Ye et al., "Mastering complex control in MOBA games" (2020), eq. 3. No gradient beyond the clamp, nor
    where a clip is the active branch. No collective. Reduce with aggregate.loss_sum. Raises ConfigError without a lower clip.
    """
    log_ratio = select(inputs.log_probs - inputs.old_log_probs.detach(), inputs.mask)
    return clipped_surrogate(log_ratio, inputs.advantages, inputs.mask, clip)


def clipped_surrogate(log_ratio: Tensor, advantages: Tensor, mask: Tensor, clip: ClipRange) -> PolicyLoss:
    """The loss of clipped_policy_loss for any log-ratio per token [n] that is finite or infinite, not NaN, where masked."""
    if clip.low is None:
        raise ConfigError("this policy loss has no lower clip of the ratio; expected a number >= 0 (--eps-clip)")
    a = select(advantages.detach(), mask)
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    plain = -a * ratio
    clipped = -a * ratio.clamp(1.0 - clip.low, 1.0 + clip.high)
    loss = torch.maximum(plain, clipped)
    active = clipped > plain
    dual = torch.zeros_like(mask)
    if clip.dual is not None:
        bound = -clip.dual * a
        dual = (a < 0) & (loss > bound)
        loss = torch.where(dual, bound, loss)
    return PolicyLoss(
        loss=select(loss, mask),
        ratio=select(ratio.detach(), mask),
        clipped_low=active & (a < 0),
        clipped_high=active & (a > 0),
        clipped_dual=dual,
        clamped=mask & (log_ratio.detach().abs() > LOG_RATIO_LIMIT),
    )
