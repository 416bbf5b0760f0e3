"""GSPO: one ratio per sample, its geometric mean over tokens (SEMANTICS 13). Shapes: n response tokens of this rank, S samples."""

import torch
from torch import Tensor

from slime_ppo.errors import ConfigError
from slime_ppo.ppo_utils.cp_ops import sample_sums
from slime_ppo.ppo_utils.packed import sample_index, select
from slime_ppo.ppo_utils.policy_loss import ClipRange, PolicyInputs, PolicyLoss, clipped_surrogate


def gspo_policy_loss(inputs: PolicyInputs, clip: ClipRange) -> PolicyLoss:
    """loss_t = max(-A s, -A clip(s, 1 - low, 1 + high)), s = exp(clamp(mean over the sample's trainable log-ratios, +-20)).

    Zheng et al., "Group sequence policy optimization" (2025), eq. 5 and 7: s = (p(y) / p_old(y))^(1/|y|). Every token of a
    sample has the same ratio, and the gradient flows through the mean to all of them, so with equal advantages in a sample
    and the reducer seq-mean-token-mean this is the paper's objective. No gradient beyond the clamp, nor where the clip is
    the active branch. Every rank of `cp_group` calls, those without a token too: one all-reduce of 2 S numbers in forward and
    one in backward. Raises ConfigError with a dual clip, or without a lower one.
    """
    if clip.dual is not None:
        raise ConfigError(f"gspo has no dual clip, found {clip.dual}; leave it off (--eps-clip-c) or use policy loss ppo")
    log_ratio = select(inputs.log_probs - inputs.old_log_probs.detach(), inputs.mask)
    means = _sample_means(log_ratio, inputs).to(log_ratio.dtype)
    return clipped_surrogate(means[sample_index(inputs.lens)], inputs.advantages, inputs.mask, clip)


def _sample_means(x: Tensor, inputs: PolicyInputs) -> Tensor:
    """Mean of `x` [n] over each sample's trainable tokens on all ranks, float64 [S]; 0 where a sample has none.

    Sums and counts travel as 2 S samples in one collective. In float64, because a float32 sum over a long response depends
    on its order by as much as gspo's clip range is wide.
    """
    sums, counts = sample_sums(torch.cat([x, inputs.mask]).double(), torch.cat([inputs.lens] * 2), inputs.cp_group).chunk(2)
    return sums / counts.detach().clamp(min=1.0)
