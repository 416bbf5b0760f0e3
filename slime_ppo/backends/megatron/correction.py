"""Rollout correction on one rank, and what its pass over log-probs measures (SEMANTICS 10, 12)."""

from collections.abc import Mapping

import numpy as np
import torch

from slime_ppo.backends.megatron.collectives import data_parallel_group, sum_numbers
from slime_ppo.config.correction import CorrectionConfig
from slime_ppo.ppo_utils.off_policy import rollout_correction, rollout_mismatch
from slime_ppo.types.rollout_batch import ColumnPart, RolloutBatch, filled
from slime_ppo.types.stats import Stats


def correction_columns(mine: RolloutBatch, correction: CorrectionConfig) -> Mapping[str, np.ndarray]:
    """`rollout_weights` and `rejected` of these samples, which hold old log-probs; nothing when no correction is chosen."""
    if not correction.active:
        return {}
    found = rollout_correction(
        torch.tensor(filled(mine.old_log_probs)),
        torch.tensor(mine.rollout_log_probs),
        torch.tensor(mine.loss_mask),
        torch.tensor(mine.response_lens),
        correction.settings,
    )
    return {"rollout_weights": found.weights.numpy(), "rejected": found.rejected.numpy()}


def trajectories_of(batch: RolloutBatch, part: ColumnPart, device: torch.device) -> int:
    """This rank's share of the rollout's trajectories: those that have a sample with trainable tokens which was not rejected.

    The samples of a trajectory may lie on several ranks; the rank that holds the first of them counts it. Collective over
    data-parallel ranks when samples can be rejected.
    """
    taking_part = batch.trainable_tokens > 0
    if "rejected" in part.columns:
        own = np.zeros(batch.num_samples)
        own[part.rows] = part.columns["rejected"]
        taking_part &= np.array(sum_numbers(own.tolist(), device, data_parallel_group())) == 0
    rows = np.flatnonzero(taking_part)
    first = rows[np.unique(batch.trajectory_ids[rows], return_index=True)[1]]
    return int(np.isin(part.rows, first).sum())


def add_mismatch(stats: Stats, mine: RolloutBatch) -> None:
    """How far the engine is from the old policy, over the trainable tokens of these samples, and how many samples that cost."""
    mask = torch.tensor(mine.loss_mask)
    found = rollout_mismatch(torch.tensor(filled(mine.old_log_probs)), torch.tensor(mine.rollout_log_probs), mask)
    stats.add_mean("logprob_gap_mean", found.abs_sum, found.num_tokens)
    stats.add_mean("mismatch_k3", found.k3_sum, found.num_tokens)
    if found.num_tokens:
        stats.add_max("logprob_gap_max", found.max_abs)
    if mine.rollout_full_log_probs is not None and mine.old_full_log_probs is not None:
        full = rollout_mismatch(torch.tensor(mine.old_full_log_probs), torch.tensor(mine.rollout_full_log_probs), mask)
        stats.add_mean("logprob_gap_full_mean", full.abs_sum, full.num_tokens)
        if full.num_tokens:
            stats.add_max("logprob_gap_full_max", full.max_abs)
    # mean ratio and effective sample size are quotients of these, known once all ranks are added up
    stats.add_total("ess_rho", found.rho_sum)
    stats.add_total("ess_rho2", found.rho_square_sum)
    stats.add_total("ess_n", found.num_tokens)
    if mine.rejected is not None:
        stats.add_total("rejected_samples", mine.rejected.sum())


def add_reference_kl(stats: Stats, mine: RolloutBatch, num_trajectories: int) -> None:
    """KL of the old policy to the reference: token mean and mean over trajectories, rejected samples out.

    `num_trajectories` is this rank's share of the rollout's.
    """
    kept = mine.kept_mask
    kl = (mine.kl_log_probs - filled(mine.ref_log_probs))[kept].sum(dtype=np.float64)
    stats.add_mean("kl", kl, kept.sum())
    stats.add_mean("kl_trajectory", kl, num_trajectories)
