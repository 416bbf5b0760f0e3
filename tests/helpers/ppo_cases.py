"""Random packed batches, tiny models, and one PPO iteration composed from the fast functions: the counterpart of reference.py."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from slime_ppo.ppo_utils.aggregate import masked_weighted_sum, token_weights
from slime_ppo.ppo_utils.denominator import make_denominator
from slime_ppo.ppo_utils.gae import generalized_advantages
from slime_ppo.ppo_utils.kl import kl_loss
from slime_ppo.ppo_utils.policy_loss import clipped_policy_loss
from slime_ppo.ppo_utils.reference_types import Model, ReferenceSample, ReferenceSettings, ReferenceStep
from slime_ppo.ppo_utils.token_rewards import build_token_rewards
from slime_ppo.ppo_utils.top_p import SupportLogProbs, support_log_probs
from slime_ppo.ppo_utils.value_loss import clipped_value_loss
from slime_ppo.ppo_utils.vocab_parallel import vocab_log_probs
from slime_ppo.ppo_utils.whiten import whiten_advantages

VOCAB = 11


@dataclass(frozen=True)
class Packed:
    """Rewards, values, mask [N] and lens [S] of random samples; masked entries are NaN."""

    rewards: Tensor
    values: Tensor
    mask: Tensor
    lens: Tensor


def random_packed(seed: int, *, lens: Sequence[int], masked: float = 0.3, dtype: torch.dtype = torch.float64) -> Packed:
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(lens)
    mask = torch.rand(num_tokens, generator=generator) >= masked
    rewards, values = (torch.randn(num_tokens, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    return Packed(rewards.where(mask, torch.nan), values.where(mask, torch.nan), mask, torch.tensor(lens, dtype=torch.int64))


class TinyModel(nn.Module):
    """Causal: the state at a position is a function of the mean embedding up to it. num_out = VOCAB + padding, or 1 (values)."""

    def __init__(self, num_out: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        shapes = {"embedding": (VOCAB, 6), "hidden": (6, 8), "out": (8, num_out)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)))

    def forward(self, token_ids: Tensor) -> Tensor:
        positions = torch.arange(1, len(token_ids) + 1, dtype=torch.float64)[:, None]
        state = torch.tanh((self.embedding[token_ids].cumsum(0) / positions) @ self.hidden)
        out = state @ self.out
        return out[:, 0] if out.shape[1] == 1 else out


def random_samples(seed: int, *, restricted: bool) -> list[ReferenceSample]:
    """Seven samples of six trajectories: inner masks, one without a trainable token, one cut, process rewards."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for index, (prompt_len, response_len) in enumerate([(3, 5), (1, 1), (2, 7), (4, 3), (2, 6), (3, 4), (1, 2)]):
        ids = torch.randint(0, VOCAB, (prompt_len + response_len,), generator=generator)
        mask = torch.rand(response_len, generator=generator) > 0.3
        mask[0] = True
        if index == 3:
            mask[:] = False
        supports = [torch.randperm(VOCAB, generator=generator)[:4] for _ in range(response_len)]
        process_rewards = torch.randn(response_len, generator=generator).tolist() if index == 4 else None
        samples.append(
            ReferenceSample(
                prompt_ids=ids[:prompt_len],
                response_ids=ids[prompt_len:],
                loss_mask=mask,
                reward=float(torch.randn((), generator=generator)) if index != 6 else samples[0].reward,
                trajectory_id=0 if index == 6 else index,
                support=supports if restricted else None,
                process_rewards=process_rewards,
                bootstraps=index == 2,
            )
        )
    return samples


@dataclass(frozen=True)
class _Batch:
    """Flat columns of some samples."""

    labels: Tensor
    mask: Tensor
    lens: Tensor
    support_ids: Tensor
    support_counts: Tensor


def _pack(samples: Sequence[ReferenceSample]) -> _Batch:
    supports = [
        ids if trained else ids[:0]
        for sample in samples
        for ids, trained in zip(
            sample.support or [sample.response_ids[:0]] * len(sample.response_ids), sample.loss_mask, strict=True
        )
    ]
    return _Batch(
        labels=torch.cat([sample.response_ids for sample in samples]),
        mask=torch.cat([sample.loss_mask for sample in samples]),
        lens=torch.tensor([len(sample.response_ids) for sample in samples]),
        support_ids=torch.cat(supports),
        support_counts=torch.tensor([len(ids) for ids in supports]),
    )


def _states(model: Model, samples: Sequence[ReferenceSample]) -> Tensor:
    """Outputs at the positions before each response token, packed."""
    return torch.cat([model(sample.token_ids)[len(sample.prompt_ids) - 1 : -1] for sample in samples])


def _log_probs(policy: Model, samples: Sequence[ReferenceSample], settings: ReferenceSettings) -> SupportLogProbs:
    batch, logits = _pack(samples), _states(policy, samples)
    common = {"vocab_size": settings.vocab_size, "temperature": settings.temperature, "group": None}
    if samples[0].support is None:
        full = vocab_log_probs(logits, batch.labels, entropy="grad", **common)
        return SupportLogProbs(full.log_probs, full.log_probs, torch.zeros(len(logits)), full.entropy)
    return support_log_probs(logits, batch.labels, batch.support_ids, batch.support_counts, entropy="grad", **common)


@dataclass(frozen=True)
class FastReport:
    """What this rank saw; gradient norms are global."""

    rewards: Tensor
    returns: Tensor
    actor_grad_norms: list[float]
    critic_grad_norms: list[float]


def fast_iteration(
    policy: nn.Module,
    reference: nn.Module,
    critic: nn.Module,
    samples: Sequence[ReferenceSample],
    settings: ReferenceSettings,
    *,
    steps: Sequence[ReferenceStep],
    actor_optimizer: Optimizer,
    critic_optimizer: Optimizer,
    num_micro_batches: int,
    group: dist.ProcessGroup | None = None,
) -> FastReport:
    """One iteration by the fast functions; rank r of `group` holds samples r, r + D, ...; all ranks end with equal weights."""
    rank, world = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    own = list(range(rank, len(samples), world))
    local = [samples[row] for row in own]
    scored = _score(policy, reference, critic, local, settings, group=group)
    norms: dict[str, list[float]] = {"actor": [], "critic": []}
    for step in steps:
        denominator = make_denominator(
            [int(samples[row].loss_mask.sum()) for row in step.rows],
            [samples[row].trajectory_id for row in step.rows],
            mode=settings.loss_reduction,
            length_norm=settings.loss_length_norm,
        )
        mine = [(place, own.index(row)) for place, row in enumerate(step.rows) if row in own]
        actor_optimizer.zero_grad()
        critic_optimizer.zero_grad()
        for chosen in (mine[part::num_micro_batches] for part in range(num_micro_batches)):
            if chosen:
                fixed = [torch.cat(column) for column in zip(*(scored.per_sample[index] for _, index in chosen), strict=True)]
                weights = torch.from_numpy(denominator.sample_weights)[[place for place, _ in chosen]]
                _backward(policy, critic, [local[index] for _, index in chosen], fixed, settings, sample_weights=weights)
        norms["actor"].append(_step(actor_optimizer, step.actor_lr, settings.clip_grad, group))
        norms["critic"].append(_step(critic_optimizer, step.critic_lr, settings.clip_grad, group))
    return FastReport(scored.rewards, scored.returns, norms["actor"], norms["critic"])


@dataclass(frozen=True)
class _Scored:
    """`per_sample`: (old log-probs, ref log-probs, old values, returns, whitened advantages) of each sample."""

    rewards: Tensor
    returns: Tensor
    per_sample: list[tuple[Tensor, ...]]


@torch.no_grad()
def _score(
    policy: nn.Module,
    reference: nn.Module,
    critic: nn.Module,
    samples: Sequence[ReferenceSample],
    settings: ReferenceSettings,
    *,
    group: dist.ProcessGroup | None,
) -> _Scored:
    batch = _pack(samples)
    old = _log_probs(policy, samples, settings)
    ref = _log_probs(reference, samples, settings).full_log_probs
    old_values = _states(critic, samples)
    process_rewards = [x for s in samples for x in s.process_rewards or [0.0] * len(s.response_ids)]
    rewards = build_token_rewards(
        torch.tensor([s.reward for s in samples], dtype=torch.float64),
        old.full_log_probs,
        ref,
        batch.mask,
        batch.lens,
        kl_coef=settings.kl_coef,
        process_rewards=torch.tensor(process_rewards, dtype=torch.float64),
    ).rewards
    found = generalized_advantages(
        rewards,
        old_values,
        batch.mask,
        batch.lens,
        gamma=settings.gamma,
        lambd=settings.lambd,
        lambd_critic=settings.lambd_critic,
        adaptive=settings.adaptive_lambd,
        bootstrap_values=torch.stack([critic(s.token_ids)[-1] * (1.0 if s.bootstraps else 0.0) for s in samples]),
    )
    columns = [old.log_probs, ref, old_values, found.returns, whiten_advantages(found.advantages, batch.mask, group=group)]
    lens = batch.lens.tolist()
    return _Scored(rewards, found.returns, list(zip(*(torch.split(column, lens) for column in columns), strict=True)))


def _backward(
    policy: nn.Module,
    critic: nn.Module,
    samples: Sequence[ReferenceSample],
    fixed: Sequence[Tensor],
    settings: ReferenceSettings,
    *,
    sample_weights: Tensor,
) -> None:
    old_log_probs, ref, old_values, returns, advantages = fixed
    batch = _pack(samples)
    weights = token_weights(sample_weights, batch.lens)
    current = _log_probs(policy, samples, settings)
    clips = {"eps_clip_low": settings.eps_clip, "eps_clip_high": settings.eps_clip_high, "eps_clip_c": settings.eps_clip_c}
    loss = clipped_policy_loss(current.log_probs, old_log_probs, advantages, batch.mask, **clips).loss
    loss = loss - settings.entropy_coef * current.entropy
    loss = loss + settings.kl_loss_coef * kl_loss(settings.kl_loss_type, current.full_log_probs, ref, batch.mask).kl
    masked_weighted_sum(loss, batch.mask, weights).backward()
    value = clipped_value_loss(_states(critic, samples), old_values, returns, batch.mask, value_clip=settings.value_clip)
    masked_weighted_sum(value.loss, batch.mask, weights).backward()


def _step(optimizer: Optimizer, lr: float, clip_grad: float, group: dist.ProcessGroup | None) -> float:
    parameters = [parameter for part in optimizer.param_groups for parameter in part["params"]]
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if group is not None:
            dist.all_reduce(parameter.grad, group=group)
    for part in optimizer.param_groups:
        part["lr"] = lr
    norm = float(torch.nn.utils.clip_grad_norm_(parameters, clip_grad))
    optimizer.step()
    return norm
