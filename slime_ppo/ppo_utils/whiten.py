"""Whitening of advantages over all ranks (SEMANTICS 6). Shapes: N response tokens of this rank."""

import torch
import torch.distributed as dist
from torch import Tensor

from slime_ppo.ppo_utils.moments import Moments, merge_moments
from slime_ppo.ppo_utils.packed import select

EPSILON = 1e-8


def local_moments(x: Tensor, mask: Tensor) -> Moments:
    """Moments of the trainable entries of `x` [N], in two float64 passes. Reads three numbers back from the device."""
    kept = x.detach()[mask].double()
    if kept.numel() == 0:
        return Moments()
    mean = kept.mean()
    return Moments(float(kept.numel()), float(mean), float((kept - mean).square().sum()))


def global_moments(x: Tensor, mask: Tensor, group: dist.ProcessGroup | None) -> Moments:
    """Moments over all ranks of `group`, merged in rank order, the same on each. One all-gather of three doubles."""
    own = local_moments(x, mask)
    if group is None:
        return own
    part = torch.tensor([own.count, own.mean, own.m2], dtype=torch.float64, device=x.device)
    whole = part.new_empty(3 * dist.get_world_size(group))
    dist.all_gather_into_tensor(whole, part, group=group)
    return merge_moments(Moments(*row) for row in whole.view(-1, 3).tolist())


@torch.no_grad()
def whiten_advantages(advantages: Tensor, mask: Tensor, *, group: dist.ProcessGroup | None = None) -> Tensor:
    """(A - mean) / sqrt(var + 1e-8) on trainable tokens, 0 elsewhere; unbiased variance over the tokens of all ranks.

    `group` spans the ranks that hold different tokens (data x context parallel); each of them calls, those without a token
    too. None = no other rank. With fewer than two tokens, or equal ones, the result is centred only, never NaN.
    Context: Andrychowicz et al., "What matters in on-policy reinforcement learning?" (2021), choice C67.
    """
    moments = global_moments(advantages, mask, group)
    scale = (moments.variance + EPSILON) ** 0.5
    return select((advantages.double() - moments.mean) / scale, mask).to(advantages.dtype)
