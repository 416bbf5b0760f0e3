"""What each context-parallel rank runs: its share of one batch that holds every length, results back by pickle."""

from dataclasses import dataclass
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from slime_ppo.parallel.cp_map import CpMap
from slime_ppo.ppo_utils.cp_ops import ContextShard, sample_sums
from slime_ppo.ppo_utils.gae import generalized_advantages
from slime_ppo.ppo_utils.packed import sample_index
from slime_ppo.ppo_utils.token_rewards import build_token_rewards
from slime_ppo.ppo_utils.whiten import whiten_advantages

KL_COEF = 0.3
GAE = {"gamma": 0.97, "lambd": 0.9, "lambd_critic": 0.95}


@dataclass(frozen=True)
class CpCase:
    """A whole batch: [N] columns, NaN where masked (values after the response: NaN where not cut), and [S] columns."""

    cp_map: CpMap
    lens: Tensor
    mask: Tensor
    old: Tensor
    ref: Tensor
    process_rewards: Tensor
    values: Tensor
    sequence_rewards: Tensor
    bootstrap_values: Tensor
    upstream: Tensor


def every_length(cp_size: int) -> list[tuple[int, int]]:
    """(P, R) for all R from 1 to (2 cp)^2 + 8, with prompts shorter and longer than a chunk."""
    return [(p, r) for p in (1, 2, 2 * cp_size + 1, 11) for r in range(1, (2 * cp_size) ** 2 + 9)]


def cp_case(cp_size: int, sizes: list[tuple[int, int]], dtype: torch.dtype) -> CpCase:
    generator = torch.Generator().manual_seed(cp_size)
    prompt_lens, response_lens = np.array(sizes, np.int64).reshape(-1, 2).T
    lens = torch.from_numpy(response_lens.copy())
    num_tokens, num_samples = int(lens.sum()), len(lens)
    mask = torch.rand(num_tokens, generator=generator) > 0.3
    old, ref, process, values = torch.randn((4, num_tokens), generator=generator, dtype=torch.float64).to(dtype)
    started = torch.cat([m.cumsum(0) > 0 for m in torch.split(mask, lens.tolist())]) if num_samples else mask
    sequence, after = torch.randn((2, num_samples), generator=generator, dtype=torch.float64).to(dtype)
    cut = torch.rand(num_samples, generator=generator) > 0.5
    return CpCase(
        cp_map=CpMap(cp_size, prompt_lens, response_lens),
        lens=lens,
        mask=mask,
        old=old.where(mask, torch.nan),
        ref=ref.where(mask, torch.nan),
        process_rewards=process.where(started, 0.0),
        values=values.where(mask, torch.nan),
        sequence_rewards=sequence,
        bootstrap_values=after.where(cut, 0.0),
        upstream=torch.randn((3, num_tokens), generator=generator, dtype=torch.float64).to(dtype),
    )


def context_parallel(sizes: list[tuple[int, int]], dtype: torch.dtype) -> dict[str, Tensor]:
    """Everything that is split over context-parallel ranks, as this rank has it; `collectives` counts those of each part."""
    case = cp_case(dist.get_world_size(), sizes, dtype)
    context = ContextShard.of(case.cp_map, dist.group.WORLD)
    old, ref, values = (context.take(x) for x in (case.old, case.ref, case.values))
    counts: list[int] = []
    with (
        patch.object(dist, "all_gather_into_tensor", wraps=dist.all_gather_into_tensor) as gathers,
        patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduces,
    ):

        def mark() -> None:
            counts.append(gathers.call_count + reduces.call_count)

        mark()
        gathered = context.gather(*(context.take(x) for x in case.upstream), values)
        mark()
        built = build_token_rewards(
            case.sequence_rewards,
            old,
            ref,
            case.mask,
            case.lens,
            kl_coef=KL_COEF,
            process_rewards=case.process_rewards,
            context=context,
        )
        mark()
        owned = torch.zeros_like(case.bootstrap_values, dtype=torch.bool)
        owned[context.last_rows] = True
        after = context.share_last(case.bootstrap_values.where(owned, torch.nan))
        mark()
        found = generalized_advantages(built.rewards, values, case.mask, case.lens, bootstrap_values=after, context=context, **GAE)
        mark()
        x = context.take(case.upstream[0]).requires_grad_()
        sums = sample_sums(x, context.lens, dist.group.WORLD)
        mark()
        (sums.square()[sample_index(context.lens)] * context.take(case.upstream[1])).sum().backward()
        mark()
    assert x.grad is not None
    return {
        "gathered": torch.stack(gathered),
        "rewards": built.rewards,
        "bootstrap_values": after,
        "advantages": found.advantages,
        "returns": found.returns,
        "sums": sums.detach(),
        "gradient": x.grad,
        "collectives": torch.tensor(counts).diff(),
    }


def whiten_over_cp_and_dp(cp_size: int, sizes: list[tuple[int, int]], dtype: torch.dtype) -> Tensor:
    """Whitened values of this rank's tokens, of its context-parallel share of its data-parallel samples; ranks are dp x cp."""
    dp_rank, cp_rank = divmod(dist.get_rank(), cp_size)
    context, tokens = data_parallel_share(cp_size, sizes, dp_rank, dist.get_world_size() // cp_size, cp_rank=cp_rank)
    case = cp_case(cp_size, sizes, dtype)
    x, mask = (context.take(column[tokens]) for column in (1000 + 0.01 * case.values, case.mask))
    return whiten_advantages(x, mask, group=dist.group.WORLD)


def data_parallel_share(
    cp_size: int, sizes: list[tuple[int, int]], dp_rank: int, dp_size: int, *, cp_rank: int
) -> tuple[ContextShard, Tensor]:
    """Samples dp_rank, dp_rank + dp_size, ...: the share of a context-parallel rank in them, and their tokens among all."""
    prompt_lens, response_lens = np.array(sizes, np.int64).T
    rows = np.arange(dp_rank, len(sizes), dp_size)
    cp_map = CpMap(cp_size, prompt_lens[rows], response_lens[rows])
    of_rank = np.repeat(np.arange(len(sizes)) % dp_size, response_lens) == dp_rank
    return ContextShard.of_rank(cp_map, cp_rank, group=None), torch.from_numpy(np.flatnonzero(of_rank))
