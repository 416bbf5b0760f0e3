"""What each rank runs in the sharded tests: its slice of a random case, results back by pickle."""

import torch
import torch.distributed as dist
from torch import Tensor

from slime_ppo.ppo_utils.reference_types import ReferenceSettings, ReferenceStep
from slime_ppo.ppo_utils.top_p import support_log_probs
from slime_ppo.ppo_utils.vocab_parallel import vocab_log_probs
from slime_ppo.ppo_utils.whiten import whiten_advantages
from tests.helpers.ppo_cases import VOCAB, TinyModel, fast_iteration, random_samples

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
    rows = (case["support_ids"], case["support_counts"])
    options = {"vocab_size": vocab_size, "temperature": temperature, "group": dist.group.WORLD}
    out = support_log_probs(logits, case["labels"], *rows, entropy="grad", **options)
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


def iteration(settings: ReferenceSettings, steps: list[ReferenceStep], restricted: bool, num_micro_batches: int) -> list[Tensor]:
    """All weights after one data-parallel iteration."""
    policy, critic = TinyModel(VOCAB + 3, 0), TinyModel(1, 2)
    fast_iteration(
        policy,
        TinyModel(VOCAB + 3, 1),
        critic,
        random_samples(3, restricted=restricted),
        settings,
        steps=steps,
        actor_optimizer=torch.optim.Adam(policy.parameters()),
        critic_optimizer=torch.optim.Adam(critic.parameters()),
        num_micro_batches=num_micro_batches,
        group=dist.group.WORLD,
    )
    return [parameter.detach() for model in (policy, critic) for parameter in model.parameters()]
