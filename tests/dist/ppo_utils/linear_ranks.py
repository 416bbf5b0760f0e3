"""What each rank runs in the tests of the sharded lm-head: its rows of the weight, all states or its slice of them."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime_ppo.ppo_utils.linear_blocks import BlockPlan
from slime_ppo.ppo_utils.linear_logprob import linear_log_probs, linear_support_log_probs, linear_token_loss
from slime_ppo.ppo_utils.top_p import TokenSupports
from slime_ppo.ppo_utils.vocab_parallel import TokenLogProbs

WIDTH = 16
TEMPERATURE = 0.7


def linear_case(dtype: torch.dtype, vocab_size: int, *, num_positions: int = 9) -> dict[str, Any]:
    """12 states of which some are scored, in any order; a weight of 16 rows, of which those from `vocab_size` on are padding
    that holds NaN."""
    generator = torch.Generator().manual_seed(vocab_size)
    counts = torch.tensor([3, 0, 1, 5, 0, 4, 1, 2, 3])[:num_positions]
    ids = [torch.randperm(vocab_size, generator=generator)[:count] for count in counts.tolist()]
    unrestricted = torch.zeros(num_positions, dtype=torch.bool)
    unrestricted[4:5] = True
    states = torch.randn((12, 6), generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn((WIDTH, 6), generator=generator, dtype=torch.float64).to(dtype)
    weight[vocab_size:] = float("nan")
    return {
        "hidden": states,
        "weight": weight,
        "positions": torch.randperm(12, generator=generator)[:num_positions],
        "labels": torch.randint(0, vocab_size, (num_positions,), generator=generator),
        "supports": TokenSupports(torch.cat(ids) if ids else torch.zeros(0, dtype=torch.int64), counts, unrestricted),
        "upstream": torch.randn((3, num_positions), generator=generator, dtype=torch.float64).to(dtype),
    }


def token_loss(log_probs: Tensor, entropy: Tensor, weights: Tensor) -> Tensor:
    """A loss of each token that is linear in neither figure."""
    return log_probs.exp() * weights[0] + entropy.square() * weights[1]


def _leaves(case: dict[str, Any], sequence_parallel: bool) -> tuple[Tensor, Tensor]:
    rank, world = dist.get_rank(), dist.get_world_size()
    hidden = case["hidden"].chunk(world)[rank] if sequence_parallel else case["hidden"]
    return hidden.clone().requires_grad_(), case["weight"].chunk(world)[rank].clone().requires_grad_()


def linear(dtype: torch.dtype, vocab_size: int, sequence_parallel: bool, num_positions: int) -> dict[str, list[Tensor]]:
    """By function: its results, then this rank's gradients of states and weight."""
    case = linear_case(dtype, vocab_size, num_positions=num_positions)
    upstream, labels = case["upstream"], case["labels"]
    options = {
        "vocab_size": vocab_size,
        "temperature": TEMPERATURE,
        "group": dist.group.WORLD,
        "entropy": "grad",
        "positions": case["positions"],
        "sequence_parallel": sequence_parallel,
        "plan": BlockPlan(4, 3, 5, dtype),
    }
    found = {}
    leaves = _leaves(case, sequence_parallel)
    plain = linear_log_probs(*leaves, labels, **options)
    (plain.log_probs @ upstream[0] + plain.entropy @ upstream[1]).backward()
    found["plain"] = [plain.log_probs.detach(), plain.entropy.detach(), *(x.grad for x in leaves)]

    leaves = _leaves(case, sequence_parallel)
    both = linear_support_log_probs(*leaves, labels, case["supports"], **options)
    (torch.stack([both.log_probs, both.full_log_probs, both.entropy]) * upstream).sum().backward()
    columns = (both.log_probs, both.full_log_probs, both.outside_mass, both.entropy)
    found["support"] = [*(x.detach() for x in columns), *(x.grad for x in leaves)]

    leaves = _leaves(case, sequence_parallel)
    restricted = TokenSupports(case["supports"].ids, case["supports"].counts)
    sampled = linear_support_log_probs(*leaves, labels, restricted, entropy_support="sampled", **options)
    (sampled.log_probs @ upstream[0] + sampled.entropy @ upstream[1]).backward()
    found["support_only"] = [sampled.log_probs.detach(), sampled.entropy.detach(), *(x.grad for x in leaves)]

    leaves = _leaves(case, sequence_parallel)

    def loss(rows: slice, scored: TokenLogProbs) -> Tensor:
        assert scored.entropy is not None
        return token_loss(scored.log_probs, scored.entropy, upstream[:, rows])

    token = linear_token_loss(*leaves, labels, loss, **options)
    (3.0 * token.loss).backward()
    found["token"] = [token.loss.detach(), token.log_probs, token.entropy, *(x.grad for x in leaves)]
    return found
