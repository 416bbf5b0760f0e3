"""Random packed batches, tiny models, and one PPO iteration composed from the fast functions: the counterpart of reference.py."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from slime_ppo.ppo_utils.advantages import AdvantageInputs, AdvantageSettings, SequenceRewards
from slime_ppo.ppo_utils.aggregate import loss_sum
from slime_ppo.ppo_utils.denominator import Denominator, make_denominator
from slime_ppo.ppo_utils.kl import kl_estimate, kl_loss, unbiased_kl_loss
from slime_ppo.ppo_utils.kl_controller import measure_kl
from slime_ppo.ppo_utils.off_policy import RolloutCorrection, rollout_correction
from slime_ppo.ppo_utils.packed import segment_sum, select
from slime_ppo.ppo_utils.policy_loss import ClipRange, PolicyInputs
from slime_ppo.ppo_utils.reference_types import Model, ReferenceSample, ReferenceSettings, ReferenceStep
from slime_ppo.ppo_utils.registries import load, resolve_estimator, resolve_policy_loss
from slime_ppo.ppo_utils.token_rewards import build_token_rewards
from slime_ppo.ppo_utils.top_p import SupportLogProbs, TokenSupports, support_and_vocab_log_probs
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
        return self.head(self.states(token_ids))

    def states(self, token_ids: Tensor) -> Tensor:
        positions = torch.arange(1, len(token_ids) + 1, dtype=self.hidden.dtype)[:, None]
        return torch.tanh((self.embedding[token_ids].cumsum(0) / positions) @ self.hidden)

    def head(self, states: Tensor) -> Tensor:
        out = states @ self.out
        return out[:, 0] if out.shape[1] == 1 else out

    def keep_columns(self, rank: int, world: int) -> None:
        """Of the output layer hold only the columns of `rank`, the whole width cut into `world` equal parts."""
        self.out = nn.Parameter(self.out.detach().chunk(world, dim=1)[rank].clone())


# (prompt, response) tokens of random_samples
SHAPES = ((3, 5), (1, 1), (2, 7), (4, 3), (2, 6), (3, 4), (1, 2))
_GROUPS = (0, 0, 1, 1, 0, 2, 0, 2, 1)


def random_samples(seed: int, *, restricted: bool, shapes: Sequence[tuple[int, int]] = SHAPES) -> list[ReferenceSample]:
    """Seven samples of six trajectories in three groups: inner masks, one without a trainable token, one cut, process rewards.

    Up to two more `shapes` are trajectories of their own.
    """
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for index, (prompt_len, response_len) in enumerate(shapes):
        ids = torch.randint(0, VOCAB, (prompt_len + response_len,), generator=generator)
        mask = torch.rand(response_len, generator=generator) > 0.3
        mask[0] = True
        if index == 3:
            mask[:] = False
        supports = [torch.randperm(VOCAB, generator=generator)[:4] for _ in range(response_len)]
        process_rewards = torch.randn(response_len, generator=generator).tolist() if index == 4 else None
        rollout_log_probs = -4.5 + torch.randn(response_len, generator=generator, dtype=torch.float64)
        samples.append(
            ReferenceSample(
                prompt_ids=ids[:prompt_len],
                response_ids=ids[prompt_len:],
                loss_mask=mask,
                reward=float(torch.randn((), generator=generator)) if index != 6 else samples[0].reward,
                trajectory_id=0 if index == 6 else index,
                support=[None if i == 1 else ids for i, ids in enumerate(supports)] if restricted else None,
                process_rewards=process_rewards,
                bootstraps=index == 2,
                group_id=_GROUPS[index],
                rollout_log_probs=rollout_log_probs.where(mask, torch.nan).tolist(),
            )
        )
    return samples


@dataclass(frozen=True)
class _Batch:
    """Flat columns of some samples."""

    labels: Tensor
    mask: Tensor
    lens: Tensor
    supports: TokenSupports | None


def _pack(samples: Sequence[ReferenceSample]) -> _Batch:
    return _Batch(
        labels=torch.cat([sample.response_ids for sample in samples]),
        mask=torch.cat([sample.loss_mask for sample in samples]),
        lens=torch.tensor([len(sample.response_ids) for sample in samples]),
        supports=None if samples[0].support is None else _pack_supports(samples),
    )


def _pack_supports(samples: Sequence[ReferenceSample]) -> TokenSupports:
    """Masked tokens get an empty row, which is never read."""
    none = torch.zeros(0, dtype=torch.int64)
    rows, unrestricted = [], []
    for sample in samples:
        for ids, trained in zip(sample.support or (), sample.loss_mask.tolist(), strict=True):
            rows.append(none if ids is None or not trained else ids)
            unrestricted.append(ids is None)
    return TokenSupports(torch.cat(rows), torch.tensor([len(ids) for ids in rows]), torch.tensor(unrestricted))


def _states(model: Model, samples: Sequence[ReferenceSample]) -> Tensor:
    """Outputs at the positions before each response token, packed."""
    return torch.cat([model(sample.token_ids)[len(sample.prompt_ids) - 1 : -1] for sample in samples])


def _log_probs(policy: Model, samples: Sequence[ReferenceSample], settings: ReferenceSettings) -> SupportLogProbs:
    batch, logits = _pack(samples), _states(policy, samples)
    common = {"vocab_size": settings.vocab_size, "temperature": settings.temperature, "group": None, "entropy": "grad"}
    if batch.supports is None:
        full = vocab_log_probs(logits, batch.labels, **common)
        return SupportLogProbs(full.log_probs, full.log_probs, torch.zeros(len(logits)), full.entropy)
    return support_and_vocab_log_probs(logits, batch.labels, batch.supports, entropy_support=settings.entropy_support, **common)


def _for_kl(found: SupportLogProbs, settings: ReferenceSettings) -> Tensor:
    return found.log_probs if settings.kl_support == "sampled" else found.full_log_probs


@dataclass(frozen=True)
class FastReport:
    """What this rank saw of its samples; gradient norms, KL per trajectory and `rejected` (all samples) are global."""

    rewards: Tensor
    returns: Tensor
    rejected: Tensor
    kl: float
    actor_grad_norms: list[float]
    critic_grad_norms: list[float]


def fast_iteration(
    policy: nn.Module,
    reference: nn.Module,
    critic: nn.Module | None,
    samples: Sequence[ReferenceSample],
    settings: ReferenceSettings,
    *,
    steps: Sequence[ReferenceStep],
    actor_optimizer: Optimizer,
    critic_optimizer: Optimizer | None,
    num_micro_batches: int,
    group: dist.ProcessGroup | None = None,
) -> FastReport:
    """One iteration by the fast functions; rank r of `group` holds samples r, r + D, ...; all ranks end with equal weights."""
    rank, world = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    own = list(range(rank, len(samples), world))
    models = _Models(policy, reference, critic)
    scored = _score(models, samples, own, settings, group=group)
    norms: dict[str, list[float]] = {"actor": [], "critic": []}
    for step in steps:
        if not any(bool(samples[row].loss_mask.any()) and not scored.rejected[row] for row in step.rows):
            continue
        denominator = make_denominator(
            [int(samples[row].loss_mask.sum()) for row in step.rows],
            [samples[row].trajectory_id for row in step.rows],
            mode=settings.loss_reduction,
            length_norm=settings.loss_length_norm,
        )
        places = [place for place, row in enumerate(step.rows) if row in own]
        optimizers = [optimizer for optimizer in (actor_optimizer, critic_optimizer) if optimizer is not None]
        for optimizer in optimizers:
            optimizer.zero_grad()
        for chosen in (places[part::num_micro_batches] for part in range(num_micro_batches)):
            if chosen:
                rows = [step.rows[place] for place in chosen]
                fixed = scored.of([own.index(row) for row in rows])
                _backward(models, [samples[row] for row in rows], fixed, settings, denominator=denominator.select(chosen))
        norms["actor"].append(_step(actor_optimizer, step.actor_lr, settings.clip_grad, group))
        if critic_optimizer is not None:
            norms["critic"].append(_step(critic_optimizer, step.critic_lr, settings.clip_grad, group))
    returns = torch.cat([one.returns for one in scored.per_sample])
    return FastReport(scored.rewards, returns, scored.rejected, scored.kl, norms["actor"], norms["critic"])


@dataclass(frozen=True)
class _Models:
    policy: nn.Module
    reference: nn.Module
    critic: nn.Module | None


@dataclass(frozen=True)
class _Fixed:
    """Columns of some samples that do not change while the models train; `kept` bool [N]: trainable and not rejected."""

    old_log_probs: Tensor
    ref_log_probs: Tensor
    old_values: Tensor
    returns: Tensor
    advantages: Tensor
    weights: Tensor
    kept: Tensor


@dataclass(frozen=True)
class _Scored:
    """Token rewards of this rank's samples, whether each sample of the rollout is rejected [G], KL per trajectory."""

    rewards: Tensor
    rejected: Tensor
    kl: float
    per_sample: list[_Fixed]

    def of(self, indices: Sequence[int]) -> _Fixed:
        chosen = [vars(self.per_sample[index]) for index in indices]
        return _Fixed(**{name: torch.cat([columns[name] for columns in chosen]) for name in chosen[0]})


def _everywhere(x: Tensor, own: Sequence[int], num_samples: int, group: dist.ProcessGroup | None) -> Tensor:
    """`x`, a number per sample of this rank, of all samples of the rollout: float64 [G] on every rank."""
    whole = torch.zeros(num_samples, dtype=torch.float64)
    whole[list(own)] = x.double()
    if group is not None:
        dist.all_reduce(whole, group=group)
    return whole


@torch.no_grad()
def _score(
    models: _Models,
    samples: Sequence[ReferenceSample],
    own: Sequence[int],
    settings: ReferenceSettings,
    *,
    group: dist.ProcessGroup | None,
) -> _Scored:
    local = [samples[row] for row in own]
    batch = _pack(local)
    old = _log_probs(models.policy, local, settings)
    ref = _for_kl(_log_probs(models.reference, local, settings), settings)
    corrected = _correction(old, local, batch, settings)
    rejected = _everywhere(corrected.rejected, own, len(samples), group) > 0
    rewards = _token_rewards(local, batch, _for_kl(old, settings), ref, settings)
    old_values = torch.zeros_like(ref) if models.critic is None else _states(models.critic, local)
    counted = torch.tensor([bool(s.loss_mask.any()) for s in samples]) & ~rejected
    estimator = load(resolve_estimator(settings.advantage_estimator, origin="the test").path)
    inputs = AdvantageInputs(
        token_rewards=rewards,
        mask=batch.mask,
        lens=batch.lens,
        rollout=_sequence_rewards(samples, counted),
        rows=torch.tensor(own),
        values=None if models.critic is None else old_values,
        bootstrap_values=_bootstrap_values(models.critic, local),
    )
    numbers = (settings.gamma, settings.lambd, settings.lambd_critic, settings.adaptive_lambd, settings.std_normalization)
    found = estimator(inputs, AdvantageSettings(*numbers))
    kept = batch.mask & counted[list(own)].repeat_interleave(batch.lens)
    advantages = whiten_advantages(found.advantages, kept, group=group) if settings.normalize_advantages else found.advantages
    columns = (old.log_probs, ref, old_values, found.returns, advantages, corrected.weights, kept)
    per_sample = zip(*(torch.split(column, batch.lens.tolist()) for column in columns), strict=True)
    kl = segment_sum(kl_estimate("k1", _for_kl(old, settings), ref, kept).kl, batch.lens)
    measured = measure_kl(
        _everywhere(kl, own, len(samples), group).tolist(),
        [int(s.loss_mask.sum()) * int(c) for s, c in zip(samples, counted, strict=True)],
        [s.trajectory_id for s in samples],
    )
    return _Scored(rewards, rejected, measured.per_trajectory, [_Fixed(*one) for one in per_sample])


def _correction(
    old: SupportLogProbs, samples: Sequence[ReferenceSample], batch: _Batch, settings: ReferenceSettings
) -> RolloutCorrection:
    if settings.correction is None:
        return RolloutCorrection(batch.mask.double(), torch.zeros(len(samples), dtype=torch.bool))
    rollout = torch.tensor([x for s in samples for x in s.rollout_log_probs or ()], dtype=torch.float64)
    return rollout_correction(old.log_probs, rollout, batch.mask, batch.lens, settings.correction)


def _token_rewards(
    samples: Sequence[ReferenceSample], batch: _Batch, old: Tensor, ref: Tensor, settings: ReferenceSettings
) -> Tensor:
    process_rewards = [x for s in samples for x in s.process_rewards or [0.0] * len(s.response_ids)]
    return build_token_rewards(
        torch.tensor([s.reward for s in samples], dtype=torch.float64),
        old,
        ref,
        batch.mask,
        batch.lens,
        kl_coef=settings.kl_coef,
        process_rewards=torch.tensor(process_rewards, dtype=torch.float64),
    ).rewards


def _sequence_rewards(samples: Sequence[ReferenceSample], counted: Tensor) -> SequenceRewards:
    return SequenceRewards(
        rewards=torch.tensor([s.reward for s in samples], dtype=torch.float64),
        group_ids=torch.tensor([s.group_id for s in samples]),
        trajectory_ids=torch.tensor([s.trajectory_id for s in samples]),
        counted=counted,
    )


def _bootstrap_values(critic: nn.Module | None, samples: Sequence[ReferenceSample]) -> Tensor | None:
    if critic is None:
        return None
    return torch.stack([critic(s.token_ids)[-1] * (1.0 if s.bootstraps else 0.0) for s in samples])


def _backward(
    models: _Models,
    samples: Sequence[ReferenceSample],
    fixed: _Fixed,
    settings: ReferenceSettings,
    *,
    denominator: Denominator,
) -> None:
    batch = _pack(samples)
    mask = batch.mask
    current = _log_probs(models.policy, samples, settings)
    policy_loss = load(resolve_policy_loss(settings.policy_loss, origin="the test").path)
    clip = ClipRange(settings.eps_clip, settings.eps_clip_high, settings.eps_clip_c)
    inputs = PolicyInputs(current.log_probs, fixed.old_log_probs, fixed.advantages, mask, batch.lens)
    loss = policy_loss(inputs, clip).loss * fixed.weights
    assert current.entropy is not None
    loss = loss - settings.entropy_coef * current.entropy
    kl_inputs = (settings.kl_loss_type, _for_kl(current, settings), fixed.ref_log_probs)
    if settings.use_unbiased_kl:
        kl = unbiased_kl_loss(*kl_inputs, current.log_probs - fixed.old_log_probs, mask)
    else:
        kl = kl_loss(*kl_inputs, mask)
    loss_sum(loss + settings.kl_loss_coef * select(kl.kl, mask), mask, batch.lens, denominator).backward()
    if models.critic is not None:
        values = _states(models.critic, samples)
        value = clipped_value_loss(values, fixed.old_values, fixed.returns, fixed.kept, value_clip=settings.value_clip)
        loss_sum(value.loss, fixed.kept, batch.lens, denominator).backward()


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
