"""What each rank runs in the tests of policy losses under context parallelism: its tokens of a random case."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from slime_ppo.ppo_utils.aggregate import loss_sum
from slime_ppo.ppo_utils.denominator import make_denominator
from slime_ppo.ppo_utils.policy_loss import ClipRange, PolicyInputs
from slime_ppo.ppo_utils.registries import POLICY_LOSSES, load

LENS = (3, 1, 40, 2, 9, 4)
CLIPS = {"ppo": ClipRange(0.2, 0.3, 1.5), "gspo": ClipRange(0.05, 0.05), "cispo": ClipRange(0.3, 0.2)}


@dataclass(frozen=True)
class Case:
    """Whole columns [N], and which of `world` ranks owns each token; masked entries are NaN, sample 3 has none trainable."""

    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    mask: Tensor
    owner: Tensor


def make_case(dtype: torch.dtype, world: int) -> Case:
    """Random owners; the last rank of four owns nothing."""
    generator = torch.Generator().manual_seed(7)
    num_tokens = sum(LENS)
    mask = torch.rand(num_tokens, generator=generator) > 0.25
    start = sum(LENS[:3])
    mask[start : start + LENS[3]] = False
    columns = 0.3 * torch.randn((3, num_tokens), generator=generator, dtype=torch.float64)
    owner = torch.randint(0, min(world, 3), (num_tokens,), generator=generator)
    return Case(*columns.where(mask, torch.nan).to(dtype), mask, owner)


def loss_and_gradient(name: str, case: Case, rank: int, cp_group: dist.ProcessGroup | None) -> tuple[float, Tensor, Tensor]:
    """(loss, gradient at this rank's tokens, which tokens were clipped) of the tokens that `rank` owns."""
    own = case.owner == rank
    log_probs = case.log_probs[own].requires_grad_()
    lens = torch.tensor([int(part.sum()) for part in own.split(list(LENS))])
    inputs = PolicyInputs(log_probs, case.old_log_probs[own], case.advantages[own], case.mask[own], lens, cp_group)
    found = load(POLICY_LOSSES.entries[name].path)(inputs, CLIPS[name])
    counts = [int(part.sum()) for part in case.mask.split(list(LENS))]
    denominator = make_denominator(counts, range(len(LENS)), mode="seq-mean-token-mean")
    loss = loss_sum(found.loss, case.mask[own], lens, denominator)
    loss.backward()
    assert log_probs.grad is not None
    return loss.item(), log_probs.grad, found.clipped_low | found.clipped_high


def policy_loss(name: str, dtype: torch.dtype) -> tuple[float, Tensor, Tensor]:
    return loss_and_gradient(name, make_case(dtype, dist.get_world_size()), dist.get_rank(), dist.group.WORLD)
