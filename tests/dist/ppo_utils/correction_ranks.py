"""What each rank runs in the context-parallel tests of correction and estimators: its part of a random batch, results by pickle."""

from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from slime_ppo.parallel.cp_map import CpMap
from slime_ppo.ppo_utils import advantages as estimators
from slime_ppo.ppo_utils.advantages import AdvantageInputs, AdvantageSettings
from slime_ppo.ppo_utils.cp_ops import ContextShard
from slime_ppo.ppo_utils.off_policy import CorrectionSettings, Mismatch, rollout_correction, rollout_mismatch
from tests.helpers.estimator_cases import LogProbPair, random_advantage_inputs, random_log_probs

NUMBERS = AdvantageSettings(gamma=0.9, lambd=0.8, lambd_critic=0.7)


def correction_case(cp_size: int, dtype: torch.dtype) -> LogProbPair:
    """Responses of every length from 0 to (2 cp)^2 + 8, whose ratios lie on both sides of the bounds."""
    pair = random_log_probs(cp_size, lens=range((2 * cp_size) ** 2 + 9), spread=0.3)
    return replace(pair, old=pair.old.to(dtype), rollout=pair.rollout.to(dtype))


def cp_map(cp_size: int, lens: Tensor) -> CpMap:
    """Prompts of 1 to 5 tokens before responses of `lens` tokens."""
    return CpMap(cp_size, 1 + np.arange(len(lens)) % 5, lens.numpy())


def correction(settings: CorrectionSettings, dtype: torch.dtype) -> tuple[Tensor, Tensor, Mismatch]:
    """(weights of this rank's tokens, which samples are rejected, mismatch of this rank's tokens)."""
    cp_size, rank = dist.get_world_size(), dist.get_rank()
    case = correction_case(cp_size, dtype)
    layout = cp_map(cp_size, case.lens)
    own = torch.from_numpy(layout.response_index(rank))
    lens = torch.from_numpy(layout.local_lens(rank))
    old, rollout, mask = case.old[own], case.rollout[own], case.mask[own]
    found = rollout_correction(old, rollout, mask, lens, settings, cp_group=dist.group.WORLD)
    return found.weights, found.rejected, rollout_mismatch(old, rollout, mask)


def estimator_case() -> AdvantageInputs:
    """About forty samples of 0 to 5 tokens; the last two rows of the rollout belong to another data-parallel rank."""
    inputs, _ = random_advantage_inputs(2, num_trajectories=20)
    counts = inputs.lens[:-2]
    kept = int(counts.sum())
    return AdvantageInputs(
        inputs.token_rewards[:kept], inputs.mask[:kept], counts, inputs.rollout, inputs.rows[:-2], inputs.values[:kept]
    )


def advantages(name: str) -> tuple[Tensor, Tensor]:
    """(advantages, returns) of this rank's tokens by the estimator `name`."""
    case = estimator_case()
    context = ContextShard.of(cp_map(dist.get_world_size(), case.lens), dist.group.WORLD)
    local = replace(case, token_rewards=context.take(case.token_rewards), values=context.take(case.values), context=context)
    found = getattr(estimators, name)(local, NUMBERS)
    return found.advantages, found.returns
