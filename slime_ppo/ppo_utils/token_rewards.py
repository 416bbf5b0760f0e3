"""Token rewards: the sequence reward at the last trainable token, minus the KL penalty on every trainable token (SEMANTICS 4).

Shapes: N response tokens of all samples, n of them on this rank (n = N unless context parallelism splits them), S samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slime_ppo.errors import ConfigError, DataError
from slime_ppo.ppo_utils.cp_ops import ContextShard
from slime_ppo.ppo_utils.kl import KLEstimate, KLKind, kl_estimate
from slime_ppo.ppo_utils.packed import require_layout, sample_index, select, trainable_counts


@dataclass(frozen=True)
class TokenRewards:
    """`rewards` [n]; `kl` [n], the estimate that was charged, before kl_coef; `clamped` bool [n]: tokens where k3's clamp acted.

    All 0 where masked.
    """

    rewards: Tensor
    kl: Tensor
    clamped: Tensor


@torch.no_grad()
def build_token_rewards(
    sequence_rewards: Tensor,
    old_full_log_probs: Tensor,
    ref_log_probs: Tensor | None,
    mask: Tensor,
    lens: Tensor,
    *,
    kl_coef: float,
    kl_kind: KLKind = "k1",
    process_rewards: Tensor | None = None,
    sample_ids: Sequence[int] | Tensor | None = None,
    context: ContextShard | None = None,
) -> TokenRewards:
    """r_t = process reward_t - kl_coef * KL_t, plus the sequence reward at the last trainable token of the sample.

    Ouyang et al., "Training language models to follow instructions with human feedback" (2022), eq. 2. `sequence_rewards`
    [S]; log-probs [n] over the full vocabulary; KL_t = old - ref (k1, unclamped; k2 and k3 give a wrong gradient here).
    `process_rewards` [N]: those on masked tokens are credited, undiscounted, to the nearest trainable token before, so that the
    sum is conserved. Samples without a trainable token get nothing. Built once per rollout; critic and actor see the same.
    In float32, whatever dtype comes in (float64 if the log-probs are).

    With `context`, log-probs and results are those of this rank's n tokens; sequence_rewards, lens [S] and mask,
    process_rewards [N] are of the whole samples, so that every rank knows which token is credited, and the map whose it is. No
    collective. Raises ConfigError when a KL is asked for without a reference; DataError when a process reward has no
    trainable token before it, which names the sample by `sample_ids` [S], without them by its place in the batch, and on shapes
    that do not fit `lens`.
    """
    if ref_log_probs is None and kl_coef != 0:
        raise ConfigError(f"kl_coef is {kl_coef}, but there are no reference log-probs; give a reference model or set --kl-coef 0")
    require_layout(mask, lens, tokens={"process_rewards": process_rewards}, samples={"sequence_rewards": sequence_rewards})
    dtype = torch.promote_types(old_full_log_probs.dtype, torch.float32)
    old = old_full_log_probs.to(dtype)
    paid = _paid(sequence_rewards.to(dtype), process_rewards, mask, lens, sample_ids)
    if context is not None:
        mask, paid = context.take(mask), context.take(paid)
    if ref_log_probs is None:
        estimate = KLEstimate(torch.zeros_like(old), torch.zeros_like(mask))
    else:
        estimate = kl_estimate(kl_kind, old, ref_log_probs.to(dtype), mask)
    rewards = paid - kl_coef * estimate.kl if kl_coef != 0 else paid
    return TokenRewards(rewards=select(rewards, mask), kl=estimate.kl, clamped=estimate.clamped)


def _paid(
    sequence_rewards: Tensor,
    process_rewards: Tensor | None,
    mask: Tensor,
    lens: Tensor,
    sample_ids: Sequence[int] | Tensor | None,
) -> Tensor:
    """Sequence and process rewards at the tokens that they are credited to, [N], in the dtype of the sequence rewards."""
    trained = trainable_counts(mask, lens) > 0
    owner = _last_trainable_up_to(mask)
    paid = sequence_rewards.new_zeros(len(mask))
    if process_rewards is not None:
        paid.index_add_(0, *_credited(process_rewards.to(paid.dtype), owner, trained, lens, sample_ids))
    ends = lens.cumsum(0)[trained] - 1
    return paid.index_add_(0, owner[ends], sequence_rewards[trained])


def _last_trainable_up_to(mask: Tensor) -> Tensor:
    """Flat position of the last trainable token at or before each token, int64 [N]; -1 where there is none at all.

    It runs on across samples: only meaningful where the token's own sample has a trainable token before it.
    """
    position = torch.arange(len(mask), device=mask.device)
    return torch.where(mask, position, -1).cummax(0).values if len(mask) else position


def _credited(
    process_rewards: Tensor, owner: Tensor, trained: Tensor, lens: Tensor, sample_ids: Sequence[int] | Tensor | None
) -> tuple[Tensor, Tensor]:
    """Positions and amounts of the process rewards that are not 0."""
    row = sample_index(lens)
    paid = ((process_rewards != 0) & trained[row]).nonzero()[:, 0]
    first = (lens.cumsum(0) - lens)[row[paid]]
    early = owner[paid] < first
    if bool(early.any()):
        token = paid[early][0]
        place = int(row[token])
        sample = f"sample {place} of the batch" if sample_ids is None else f"sample {int(sample_ids[place])}"
        raise DataError(
            f"response token {int(token - first[early][0])} of {sample} has a process reward of "
            f"{float(process_rewards[token])}, but no trainable token at or before it to credit; expected process rewards "
            "after the first trainable token only"
        )
    return owner[paid], process_rewards[paid]
