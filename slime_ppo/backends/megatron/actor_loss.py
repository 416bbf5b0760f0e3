"""The actor's loss on one micro-batch: policy loss, entropy and KL to the reference (SEMANTICS 7, 9, 10, 12)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from slime_ppo.backends.megatron.role import add_token_means
from slime_ppo.config.ppo import PpoConfig
from slime_ppo.ppo_utils.aggregate import loss_sum
from slime_ppo.ppo_utils.denominator import Denominator
from slime_ppo.ppo_utils.kl import KLEstimate, kl_estimate, kl_loss, unbiased_kl_loss
from slime_ppo.ppo_utils.policy_loss import ClipRange, PolicyInputs, PolicyLoss
from slime_ppo.ppo_utils.registries import load
from slime_ppo.ppo_utils.top_p import SupportLogProbs
from slime_ppo.types.micro_batch import MicroBatch
from slime_ppo.types.stats import Stats


@dataclass(frozen=True)
class ActorLoss:
    """policy loss - entropy_coef * entropy + kl_loss_coef * KL, every term over the step's one denominator.

    The policy loss is that of the run (--policy-loss), times the weights of the rollout correction where one is chosen. A
    rejected sample leaves it, and stays in entropy and KL, which are the same with and without a correction.
    """

    ppo: PpoConfig
    policy_loss: Callable[[PolicyInputs, ClipRange], PolicyLoss]
    clip: ClipRange

    @staticmethod
    def of(ppo: PpoConfig) -> "ActorLoss":
        """Imports the function of the run's policy loss."""
        clip = ClipRange(low=ppo.clip_low, high=ppo.clip_high, dual=ppo.eps_clip_c)
        return ActorLoss(ppo, load(ppo.policy_loss_spec.path), clip)

    def __call__(self, micro_batch: MicroBatch, found: SupportLogProbs, denominator: Denominator, stats: Stats) -> torch.Tensor:
        """This micro-batch's share of the step's loss, with gradient through `found`; what it saw goes to `stats`.

        `denominator` is that of the step, seen by these samples. A loss with a ratio per sequence (gspo) is collective over
        context-parallel ranks, forward and backward; the others are not.
        """
        mask, lens = micro_batch.column("loss_mask"), micro_batch.lens
        old, entropy = micro_batch.column("old_log_probs"), present(found.entropy)
        policy_share = self._policy_share(micro_batch, found.log_probs, denominator, stats)
        entropy_share = loss_sum(entropy, mask, lens, denominator)
        objective = policy_share - self.ppo.entropy_coef * entropy_share
        if self.ppo.use_kl_loss:
            kl = self._kl(micro_batch, found)
            kl_share = loss_sum(kl.kl, mask, lens, denominator)
            objective = objective + self.ppo.kl_loss_coef * kl_share
            stats.add_total("kl_loss", kl_share.item())
            add_token_means(stats, mask, {"kl_ref": kl.kl, "kl_clamped": kl.clamped})
        stats.add_total("entropy_loss", entropy_share.item())
        stats.add_total("loss", objective.item())
        moved = kl_estimate("k3", old, found.log_probs.detach(), mask).kl
        add_token_means(stats, mask, {"ppo_kl": moved, "entropy": entropy})
        return objective

    def _policy_share(
        self, micro_batch: MicroBatch, log_probs: torch.Tensor, denominator: Denominator, stats: Stats
    ) -> torch.Tensor:
        kept, lens = micro_batch.column("kept_mask"), micro_batch.lens
        old, advantages = micro_batch.column("old_log_probs"), micro_batch.column("advantages")
        cp_group = None if micro_batch.context is None else micro_batch.context.group
        policy = self.policy_loss(PolicyInputs(log_probs, old, advantages, kept, lens, cp_group=cp_group), self.clip)
        # after clipping: a weight inside the ratio would move the clip's bounds
        weighted = micro_batch.batch.rollout_weights is not None
        losses = policy.loss * micro_batch.column("rollout_weights") if weighted else policy.loss
        share = loss_sum(losses, kept, lens, denominator)
        stats.add_total("pg_loss", share.item())
        add_token_means(
            stats,
            kept,
            {
                "pg_clipfrac": policy.clipped_low | policy.clipped_high | policy.clipped_dual,
                "pg_clipfrac_low": policy.clipped_low,
                "pg_clipfrac_high": policy.clipped_high,
                "pg_clipfrac_dual": policy.clipped_dual,
                "ratio_clamped": policy.clamped,
            },
        )
        return share

    def _kl(self, micro_batch: MicroBatch, found: SupportLogProbs) -> KLEstimate:
        """KL to the reference at each token, the estimate that is charged in the loss."""
        ppo, mask, reference = self.ppo, micro_batch.column("loss_mask"), micro_batch.column("ref_log_probs")
        current = kl_side(found, ppo)
        if not ppo.use_unbiased_kl:
            return kl_loss(ppo.kl_loss_type, current, reference, mask)
        log_ratio = found.log_probs - micro_batch.column("old_log_probs")
        return unbiased_kl_loss(ppo.kl_loss_type, current, reference, log_ratio, mask)


def kl_side(found: SupportLogProbs, ppo: PpoConfig) -> torch.Tensor:
    """The log-probs that the KL to the reference compares, the same ones of both models (--kl-support)."""
    return found.full_log_probs if ppo.kl_support == "full" else found.log_probs


def present(entropy: torch.Tensor | None) -> torch.Tensor:
    """The entropy, which must have been asked for."""
    if entropy is None:
        raise ValueError("the entropy was not asked for")
    return entropy
