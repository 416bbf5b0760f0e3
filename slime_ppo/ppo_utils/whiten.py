"""Whitening of advantages over all ranks (SEMANTICS 6).

Shapes: N response tokens of this rank, W ranks. Statistics travel as (count, mean, M2 = sum (x - mean)^2) in float64: sums of
squares would cancel when the mean is large against the spread. They stay on the device; nothing is read back.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from slime_ppo.ppo_utils.moments import Moments
from slime_ppo.ppo_utils.packed import select

EPSILON = 1e-8


def local_statistics(x: Tensor, mask: Tensor) -> Tensor:
    """(count, mean, M2) of the trainable entries of `x` [N], float64 [3], in two passes. All 0 where there is none."""
    kept = select(x.detach().double(), mask)
    count = mask.sum(dtype=torch.float64)
    mean = kept.sum() / count.clamp(min=1)
    return torch.stack([count, mean, select(kept - mean, mask).square().sum()])


def merged_statistics(parts: Tensor) -> Tensor:
    """(count, mean, M2) of all parts [W, 3] together, float64 [3].

    Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances" (1979), eq. 2.1, for W
    parts at once: M2 = sum_w M2_w + count_w (mean_w - mean)^2. A part without entries weighs nothing.
    """
    counts, means, m2 = parts.unbind(-1)
    count = counts.sum()
    mean = (counts * means).sum() / count.clamp(min=1)
    return torch.stack([count, mean, (m2 + counts * (means - mean).square()).sum()])


def local_moments(x: Tensor, mask: Tensor) -> Moments:
    """The same of this rank as numbers, for metrics. Reads them back from the device."""
    return Moments(*local_statistics(x, mask).tolist())


@torch.no_grad()
def whiten_advantages(advantages: Tensor, mask: Tensor, *, group: dist.ProcessGroup | None = None) -> Tensor:
    """(A - mean) / sqrt(var + 1e-8) on trainable tokens, 0 elsewhere; unbiased variance over the tokens of all ranks.

    `group` spans the ranks that hold different tokens (data x context parallel), each token on exactly one of them; each of
    them calls, those without a token too: one all-gather of three doubles. None = no other rank. With fewer than two tokens, or
    equal ones, the result is centred only, never NaN.
    Context: Andrychowicz et al., "What matters in on-policy reinforcement learning?" (2021), choice C67.
    """
    own = local_statistics(advantages, mask)
    parts = own
    if group is not None:
        parts = own.new_empty(3 * dist.get_world_size(group))
        dist.all_gather_into_tensor(parts, own, group=group)
    count, mean, m2 = merged_statistics(parts.view(-1, 3)).unbind()
    scale = (m2 / (count - 1).clamp(min=1) + EPSILON).sqrt()
    return select((advantages.double() - mean) / scale, mask).to(advantages.dtype)
