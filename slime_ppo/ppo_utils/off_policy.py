"""Correction for tokens drawn by another policy than the one that trains (SEMANTICS 12).

Shapes: n response tokens of this rank, S samples; under context parallelism every rank holds a part of each sample and `lens`
are its local counts. With d = old_log_prob - rollout_log_prob of a trainable token:

    token      rho_t = exp(clamp(d_t, +-20))
    sequence   rho   = exp(clamp(sum of d over the sample, +-20))         the importance ratio of the whole sample
    geometric  rho   = exp(clamp(mean of d over the sample, +-20))        for rejection only

First the sum or mean, then one clamp, then exp: of clamped terms or exponentials the sum would be another number.

    tis      w = min(rho, cap)                          Yao et al., "Your efficient RL framework secretly brings you off-policy
                                                        RL training" (2025), truncated importance sampling
    icepop   w = rho where low <= rho <= high, else 0   Ling team, "Every step evolves: scaling reinforcement learning for
                                                        trillion-scale thinking model" (Ring-1T, 2025), the IcePop objective

The weights multiply the token's policy loss after clipping; KL, entropy and value loss do without. Rejection takes a sample out
by weight 0 and a flag, never by its mask: denominators keep it.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from slime_ppo.ppo_utils.cp_ops import sample_sums
from slime_ppo.ppo_utils.kl import LOG_RATIO_LIMIT
from slime_ppo.ppo_utils.off_policy_stats import CorrectionSettings, Mismatch
from slime_ppo.ppo_utils.packed import select

__all__ = ["CorrectionSettings", "Mismatch", "RolloutCorrection", "rollout_correction", "rollout_mismatch"]


@dataclass(frozen=True)
class RolloutCorrection:
    """`weights` [n], detached, 0 where masked or rejected; `rejected` bool [S], the same on every rank of the CP group."""

    weights: Tensor
    rejected: Tensor


@torch.no_grad()
def rollout_correction(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    lens: Tensor,
    settings: CorrectionSettings,
    *,
    cp_group: dist.ProcessGroup | None = None,
) -> RolloutCorrection:
    """Weights of the policy loss and which samples are rejected; once per rollout, before baselines and whitening.

    `old_log_probs`, `rollout_log_probs`, `mask` [n], both log-probs over the support the sampler drew from, finite at trainable
    tokens (packed.require_finite); `lens` [S]. A sample without trainable tokens has no ratio: it is not rejected. Arithmetic
    in float64; weights are float32 (float64 if the log-probs are). With sequence level or rejection one collective over
    `cp_group` (None = samples are whole here), which every rank of it takes part in; otherwise none.
    """
    gap = select(old_log_probs.double() - rollout_log_probs.double(), mask)
    rejected = torch.zeros_like(lens, dtype=torch.bool)
    log_ratio = gap
    if settings.rejection != "none" or (settings.mode != "none" and settings.level == "sequence"):
        totals, counts = _sums_and_counts(gap, mask, lens, cp_group)
        if settings.level == "sequence":
            log_ratio = totals.repeat_interleave(lens)
        if settings.rejection != "none":
            judged = totals if settings.rejection == "sequence" else totals / counts.clamp(min=1.0)
            rejected = (counts > 0) & _outside(_ratio(judged), settings.rejection_low, settings.rejection_high)
    weights = _weights(_ratio(log_ratio), settings)
    kept = mask & ~rejected.repeat_interleave(lens)
    dtype = torch.float64 if old_log_probs.dtype == torch.float64 else torch.float32
    return RolloutCorrection(select(weights, kept).to(dtype), rejected)


def rollout_mismatch(old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> Mismatch:
    """Mismatch of this rank's trainable tokens; all [n]. Merge over ranks and batches. Reads five numbers back, no collective."""
    gap = (old_log_probs.detach().double() - rollout_log_probs.detach().double())[mask]
    if gap.numel() == 0:
        return Mismatch()
    bounded = gap.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    rho = bounded.exp()
    k3 = torch.expm1(bounded) - bounded
    figures = torch.stack([gap.abs().sum(), gap.abs().max(), k3.sum(), rho.sum(), rho.square().sum()])
    return Mismatch(gap.numel(), *figures.tolist())


def _sums_and_counts(gap: Tensor, mask: Tensor, lens: Tensor, cp_group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Sum of `gap` [n] and number of trainable tokens of each whole sample, both float64 [S].

    The counts follow the gaps as S more samples, so that one collective carries both.
    """
    both = sample_sums(torch.cat([gap, mask.to(gap.dtype)]), torch.cat([lens, lens]), cp_group)
    return both[: len(lens)], both[len(lens) :]


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _weights(rho: Tensor, settings: CorrectionSettings) -> Tensor:
    if settings.mode == "tis":
        return rho.clamp(max=settings.cap)
    if settings.mode == "icepop":
        return rho.masked_fill(_outside(rho, settings.low, settings.high), 0.0)
    return torch.ones_like(rho)


def _outside(rho: Tensor, low: float | None, high: float | None) -> Tensor:
    """Where rho is below or above its bounds. A NaN is neither: it stays in the weights, where it is seen."""
    outside = torch.zeros_like(rho, dtype=torch.bool)
    if low is not None:
        outside |= rho < low
    if high is not None:
        outside |= rho > high
    return outside
