"""What each rank runs in the sharded tests: its slice of a random case, results back by pickle."""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from slime_ppo.ppo_utils.cispo import cispo_policy_loss
from slime_ppo.ppo_utils.gspo import gspo_policy_loss
from slime_ppo.ppo_utils.off_policy import CorrectionSettings, rollout_correction
from slime_ppo.ppo_utils.policy_loss import ClipRange, PolicyInputs, clipped_policy_loss
from slime_ppo.ppo_utils.top_p import TokenSupports, support_and_vocab_log_probs
from slime_ppo.ppo_utils.vocab_parallel import vocab_log_probs
from slime_ppo.ppo_utils.whiten import whiten_advantages
from tests.helpers.dispatch import Collectives

NUM_TOKENS = 9


def vocab_case(dtype: torch.dtype, width: int, vocab_size: int) -> dict[str, Tensor]:
    """Logits over `width` columns, labels, supports (some without their label, one empty), upstream gradients."""
    generator = torch.Generator().manual_seed(width)
    counts = torch.tensor([3, 0, 1, 5, 2, 4, 1, 2, 3])
    ids = torch.cat([torch.randperm(vocab_size, generator=generator)[:count] for count in counts.tolist()])
    return {
        "logits": (3 * torch.randn((NUM_TOKENS, width), generator=generator, dtype=torch.float64)).to(dtype),
        "labels": torch.randint(0, vocab_size, (NUM_TOKENS,), generator=generator),
        "support_ids": ids,
        "support_counts": counts,
        "upstream": torch.randn((3, NUM_TOKENS), generator=generator, dtype=torch.float64).to(dtype),
    }


def _own_logits(logits: Tensor) -> Tensor:
    shard = logits.chunk(dist.get_world_size(), dim=1)[dist.get_rank()]
    return shard.clone().requires_grad_()


def vocab(dtype: torch.dtype, width: int, vocab_size: int, temperature: float) -> list[Tensor]:
    """(log_probs, entropy, gradient of this rank's columns)."""
    case = vocab_case(dtype, width, vocab_size)
    logits = _own_logits(case["logits"])
    out = vocab_log_probs(
        logits, case["labels"], vocab_size=vocab_size, temperature=temperature, group=dist.group.WORLD, entropy="grad"
    )
    (out.log_probs @ case["upstream"][0] + out.entropy @ case["upstream"][1]).backward()
    return [out.log_probs.detach(), out.entropy.detach(), logits.grad]


def support(dtype: torch.dtype, width: int, vocab_size: int, temperature: float) -> list[Tensor]:
    """(log_probs, full_log_probs, outside_mass, entropy, gradient of this rank's columns)."""
    case = vocab_case(dtype, width, vocab_size)
    logits = _own_logits(case["logits"])
    supports = TokenSupports(case["support_ids"], case["support_counts"])
    options = {"vocab_size": vocab_size, "temperature": temperature, "group": dist.group.WORLD}
    out = support_and_vocab_log_probs(logits, case["labels"], supports, entropy="grad", **options)
    (torch.stack([out.log_probs, out.full_log_probs, out.entropy]) * case["upstream"]).sum().backward()
    return [x.detach() for x in (out.log_probs, out.full_log_probs, out.outside_mass, out.entropy)] + [logits.grad]


def whiten(sizes: list[int], dtype: torch.dtype) -> Tensor:
    """This rank's part of 1000 + 0.01 x, cut into `sizes` tokens, whitened over all ranks."""
    x, mask = whiten_case(sum(sizes), dtype)
    rank = dist.get_rank()
    return whiten_advantages(x.split(sizes)[rank], mask.split(sizes)[rank], group=dist.group.WORLD)


def whiten_case(num_tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = (1000 + 0.01 * torch.randn(num_tokens, generator=generator, dtype=torch.float64)).to(dtype)
    mask = torch.rand(num_tokens, generator=generator) > 0.3
    return x.where(mask, torch.nan), mask


def collectives() -> dict[str, list[int]]:
    """How many collectives each function runs forward and backward on this rank, of tokens that all ranks hold a part of."""
    lens = torch.tensor([2, 0, 3])
    x = torch.linspace(-0.2, 0.2, 5).requires_grad_()
    fixed, mask, group = torch.zeros(5), torch.ones(5, dtype=torch.bool), dist.group.WORLD
    inputs = PolicyInputs(x, fixed, torch.linspace(-1, 1, 5), mask, lens, group)
    correct = partial(rollout_correction, x, fixed, mask, lens, cp_group=group)
    calls = {
        "ppo": lambda: clipped_policy_loss(inputs, ClipRange(0.2, 0.2)).loss,
        "cispo": lambda: cispo_policy_loss(inputs, ClipRange(None, 0.2)).loss,
        "gspo": lambda: gspo_policy_loss(inputs, ClipRange(0.2, 0.2)).loss,
        "correction per token": lambda: correct(CorrectionSettings("tis", cap=2.0)).weights,
        "correction per sequence": lambda: correct(CorrectionSettings("tis", "sequence", cap=2.0)).weights,
        "rejection": lambda: (
            correct(CorrectionSettings("tis", "sequence", cap=2.0, rejection="geometric", rejection_low=0.1)).weights
        ),
        "whitening": lambda: whiten_advantages(x, mask, group=group),
    }
    return {name: [*_counted(call)] for name, call in calls.items()}


def _counted(call: Callable[[], Tensor]) -> tuple[int, int]:
    with Collectives() as forward:
        out = call()
    with Collectives() as backward:
        if out.requires_grad:
            out.sum().backward()
    return len(forward.names), len(backward.names)
