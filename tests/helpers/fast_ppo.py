"""One PPO iteration composed from the fast functions, on one rank or on many: the counterpart of reference.py.

Shapes: S samples of a micro-batch with N response tokens, n of them on this rank; G samples and all tokens of the rollout.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from slime_ppo.ppo_utils.advantages import AdvantageInputs, AdvantageSettings, SequenceRewards
from slime_ppo.ppo_utils.aggregate import loss_sum, masked_sum
from slime_ppo.ppo_utils.cp_ops import sample_sums
from slime_ppo.ppo_utils.denominator import Denominator, make_denominator
from slime_ppo.ppo_utils.kl import kl_estimate, kl_loss, unbiased_kl_loss
from slime_ppo.ppo_utils.kl_controller import measure_kl
from slime_ppo.ppo_utils.off_policy import RolloutCorrection, rollout_correction
from slime_ppo.ppo_utils.packed import select
from slime_ppo.ppo_utils.policy_loss import ClipRange, PolicyInputs
from slime_ppo.ppo_utils.reference_types import ReferenceSample, ReferenceSettings, ReferenceStep
from slime_ppo.ppo_utils.registries import load, resolve_estimator, resolve_policy_loss
from slime_ppo.ppo_utils.token_rewards import build_token_rewards
from slime_ppo.ppo_utils.top_p import SupportLogProbs, support_and_vocab_log_probs
from slime_ppo.ppo_utils.value_loss import clipped_value_loss
from slime_ppo.ppo_utils.vocab_parallel import vocab_log_probs
from slime_ppo.ppo_utils.whiten import whiten_advantages
from tests.helpers.layouts import ALONE, Batch, Layout, flat, rank_and_size
from tests.helpers.ppo_cases import TinyModel


@dataclass(frozen=True)
class Models:
    """The policies' output layers hold this rank's columns only; everything else is whole on every rank."""

    policy: TinyModel
    reference: TinyModel
    critic: TinyModel | None

    @property
    def all(self) -> list[TinyModel]:
        return [model for model in (self.policy, self.reference, self.critic) if model is not None]

    def split(self, layout: Layout) -> None:
        """Cut whole output layers over the tensor-parallel ranks."""
        for model in (self.policy, self.reference):
            model.keep_columns(*rank_and_size(layout.tensor))


@dataclass(frozen=True)
class StepFigures:
    """This rank's shares of a step's losses, its sums of metrics and numbers of clipped tokens: those of the ranks of
    `Layout.tokens` add up. Gradient norms, before clipping, are global."""

    policy_loss: float
    actor_loss: float
    value_loss: float
    entropy_sum: float
    ppo_kl_sum: float
    num_clipped_low: float
    num_clipped_high: float
    num_clipped_dual: float
    actor_grad_norm: float
    critic_grad_norm: float | None


@dataclass(frozen=True)
class Columns:
    """[n] each: response tokens of this rank (`tokens`: which of all of the rollout) and what stays fixed while models train.

    `advantages` are whitened if the settings say so; `kept`: trainable and not rejected.
    """

    tokens: Tensor
    old_log_probs: Tensor
    ref_log_probs: Tensor
    old_values: Tensor
    weights: Tensor
    rewards: Tensor
    returns: Tensor
    advantages: Tensor
    kept: Tensor

    def split(self, lens: Tensor) -> "list[Columns]":
        return [Columns(*parts) for parts in zip(*(x.split(lens.tolist()) for x in vars(self).values()), strict=True)]

    @staticmethod
    def joined(parts: "Sequence[Columns]") -> "Columns":
        return Columns(*(torch.cat(columns) for columns in zip(*(vars(part).values() for part in parts), strict=True)))


@dataclass(frozen=True)
class FastReport:
    """Columns of this rank's response tokens; `rejected` [G] and the KL per trajectory, the same on every rank."""

    columns: Columns
    rejected: Tensor
    kl: float
    steps: list[StepFigures]


def fast_iteration(
    models: Models,
    samples: Sequence[ReferenceSample],
    settings: ReferenceSettings,
    steps: Sequence[ReferenceStep],
    *,
    actor_optimizer: Optimizer,
    critic_optimizer: Optimizer | None,
    num_micro_batches: int,
    layout: Layout = ALONE,
    shares: Sequence[Sequence[int]] | None = None,
) -> FastReport:
    """One iteration by the fast functions. `shares`: the samples of each data-parallel rank; None = r, r + D, ... for rank r."""
    rank, world = rank_and_size(layout.data)
    own = list(range(rank, len(samples), world)) if shares is None else list(shares[rank])
    scored = _score(models, samples, own, settings, layout)
    per_sample = dict(zip(own, scored.columns.split(scored.lens), strict=True))
    figures = []
    for step in steps:
        if not any(bool(samples[row].loss_mask.any()) and not scored.rejected[row] for row in step.rows):
            continue
        denominator = make_denominator(
            [int(samples[row].loss_mask.sum()) for row in step.rows],
            [samples[row].trajectory_id for row in step.rows],
            mode=settings.loss_reduction,
            length_norm=settings.loss_length_norm,
        )
        for optimizer in (actor_optimizer, critic_optimizer):
            if optimizer is not None:
                optimizer.zero_grad()
        places = [place for place, row in enumerate(step.rows) if row in own]
        sums = torch.zeros(len(fields(StepFigures)) - 2, dtype=torch.float64)
        for chosen in (places[part::num_micro_batches] for part in range(num_micro_batches)):
            if chosen:
                rows = [step.rows[place] for place in chosen]
                batch = Batch.of([samples[row] for row in rows], layout)
                fixed = Columns.joined([per_sample[row] for row in rows])
                sums += _backward(models, batch, fixed, settings, denominator=denominator.select(chosen))
        norms = [_optimize(models.policy, actor_optimizer, step.actor_lr, settings.clip_grad, layout), None]
        if models.critic is not None and critic_optimizer is not None:
            norms[1] = _optimize(models.critic, critic_optimizer, step.critic_lr, settings.clip_grad, layout)
        figures.append(StepFigures(*sums.tolist(), *norms))
    return FastReport(scored.columns, scored.rejected, scored.kl, figures)


def _log_probs(policy: TinyModel, batch: Batch, settings: ReferenceSettings) -> SupportLogProbs:
    logits = batch.at_response(policy)
    common = {
        "vocab_size": settings.vocab_size,
        "temperature": settings.temperature,
        "group": batch.layout.tensor,
        "entropy": "grad",
    }
    if batch.supports is None:
        full = vocab_log_probs(logits, batch.labels, **common)
        return SupportLogProbs(full.log_probs, full.log_probs, torch.zeros(len(logits)), full.entropy)
    return support_and_vocab_log_probs(logits, batch.labels, batch.supports, entropy_support=settings.entropy_support, **common)


def _for_kl(found: SupportLogProbs, settings: ReferenceSettings) -> Tensor:
    return found.log_probs if settings.kl_support == "sampled" else found.full_log_probs


@dataclass(frozen=True)
class _Scored:
    """Columns of this rank's samples, `lens` [S] tokens of each; whether each sample of the rollout is rejected [G]; KL."""

    columns: Columns
    lens: Tensor
    rejected: Tensor
    kl: float


def _everywhere(x: Tensor, own: Sequence[int], num_samples: int, group: dist.ProcessGroup | None) -> Tensor:
    """`x`, a number per sample of this data-parallel rank, of all samples of the rollout: float64 [G] on every rank."""
    whole = torch.zeros(num_samples, dtype=torch.float64)
    whole[list(own)] = x.double()
    if group is not None:
        dist.all_reduce(whole, group=group)
    return whole


@torch.no_grad()
def _score(
    models: Models, samples: Sequence[ReferenceSample], own: Sequence[int], settings: ReferenceSettings, layout: Layout
) -> _Scored:
    batch = Batch.of([samples[row] for row in own], layout)
    lens, num_samples = batch.shard.lens, len(samples)
    old = _log_probs(models.policy, batch, settings)
    ref = _for_kl(_log_probs(models.reference, batch, settings), settings)
    corrected = _correction(old, batch, settings)
    rejected = _everywhere(corrected.rejected, own, num_samples, layout.data) > 0
    counted = torch.tensor([bool(s.loss_mask.any()) for s in samples]) & ~rejected
    rewards = _token_rewards(batch, _for_kl(old, settings), ref, settings)
    old_values = torch.zeros_like(ref) if models.critic is None else batch.at_response(models.critic)
    inputs = AdvantageInputs(
        token_rewards=rewards,
        mask=batch.all_mask,
        lens=batch.all_lens,
        rollout=_sequence_rewards(samples, counted),
        rows=torch.tensor(own, dtype=torch.int64),
        values=None if models.critic is None else old_values,
        bootstrap_values=None if models.critic is None else _bootstrap_values(models.critic, batch),
        context=batch.context,
    )
    estimator = load(resolve_estimator(settings.advantage_estimator, origin="the test").path)
    numbers = (settings.gamma, settings.lambd, settings.lambd_critic, settings.adaptive_lambd, settings.std_normalization)
    found = estimator(inputs, AdvantageSettings(*numbers))
    kept = batch.mask & counted[list(own)].repeat_interleave(lens)
    advantages = found.advantages
    if settings.normalize_advantages:
        advantages = whiten_advantages(advantages, kept, group=layout.tokens)
    first = torch.tensor([0, *(len(s.response_ids) for s in samples)]).cumsum(0)
    tokens = torch.cat([torch.arange(0), *(torch.arange(int(first[row]), int(first[row + 1])) for row in own)])[batch.shard.index]
    kl = sample_sums(kl_estimate("k1", _for_kl(old, settings), ref, kept).kl, lens, layout.context)
    measured = measure_kl(
        _everywhere(kl, own, num_samples, layout.data).tolist(),
        [int(s.loss_mask.sum()) * int(c) for s, c in zip(samples, counted, strict=True)],
        [s.trajectory_id for s in samples],
    )
    columns = Columns(tokens, old.log_probs, ref, old_values, corrected.weights, rewards, found.returns, advantages, kept)
    return _Scored(columns, lens, rejected, measured.per_trajectory)


def _correction(old: SupportLogProbs, batch: Batch, settings: ReferenceSettings) -> RolloutCorrection:
    if settings.correction is None:
        return RolloutCorrection(batch.mask.to(old.log_probs.dtype), torch.zeros(len(batch.samples), dtype=torch.bool))
    rollout = batch.shard.take(flat(batch.samples, "rollout_log_probs", old.log_probs.dtype))
    lens, group = batch.shard.lens, batch.layout.context
    return rollout_correction(old.log_probs, rollout, batch.mask, lens, settings.correction, cp_group=group)


def _token_rewards(batch: Batch, old: Tensor, ref: Tensor, settings: ReferenceSettings) -> Tensor:
    return build_token_rewards(
        torch.tensor([s.reward for s in batch.samples], dtype=torch.float64),
        old,
        ref,
        batch.all_mask,
        batch.all_lens,
        kl_coef=settings.kl_coef,
        process_rewards=flat(batch.samples, "process_rewards", torch.float64),
        context=batch.context,
    ).rewards


def _sequence_rewards(samples: Sequence[ReferenceSample], counted: Tensor) -> SequenceRewards:
    return SequenceRewards(
        rewards=torch.tensor([s.reward for s in samples], dtype=torch.float64),
        group_ids=torch.tensor([s.group_id for s in samples]),
        trajectory_ids=torch.tensor([s.trajectory_id for s in samples]),
        counted=counted,
    )


def _bootstrap_values(critic: TinyModel, batch: Batch) -> Tensor:
    cut = torch.tensor([s.bootstraps for s in batch.samples], dtype=torch.bool)
    return select(batch.after_response(critic), cut)


def _backward(models: Models, batch: Batch, fixed: Columns, settings: ReferenceSettings, *, denominator: Denominator) -> Tensor:
    """Gradients of the micro-batch's losses, added up in the models; its share of the step's figures, in their order."""
    mask, lens = batch.mask, batch.shard.lens
    current = _log_probs(models.policy, batch, settings)
    assert current.entropy is not None
    policy_loss = load(resolve_policy_loss(settings.policy_loss, origin="the test").path)
    clip = ClipRange(settings.eps_clip, settings.eps_clip_high, settings.eps_clip_c)
    inputs = PolicyInputs(current.log_probs, fixed.old_log_probs, fixed.advantages, mask, lens, batch.layout.context)
    policy = policy_loss(inputs, clip)
    kl_inputs = (settings.kl_loss_type, _for_kl(current, settings), fixed.ref_log_probs)
    if settings.use_unbiased_kl:
        kl = unbiased_kl_loss(*kl_inputs, current.log_probs - fixed.old_log_probs, mask)
    else:
        kl = kl_loss(*kl_inputs, mask)
    weighted = policy.loss * fixed.weights
    loss = weighted - settings.entropy_coef * current.entropy + settings.kl_loss_coef * kl.kl
    actor_loss, value_loss = loss_sum(loss, mask, lens, denominator), torch.zeros(())
    actor_loss.backward()
    if models.critic is not None:
        values = batch.at_response(models.critic)
        value = clipped_value_loss(values, fixed.old_values, fixed.returns, fixed.kept, value_clip=settings.value_clip)
        value_loss = loss_sum(value.loss, fixed.kept, lens, denominator)
        value_loss.backward()
    moved = kl_estimate("k3", fixed.old_log_probs, current.log_probs, mask).kl
    metrics = (current.entropy, moved, policy.clipped_low, policy.clipped_high, policy.clipped_dual)
    losses = [loss_sum(weighted, mask, lens, denominator).item(), actor_loss.item(), value_loss.item()]
    return torch.tensor([*losses, *(masked_sum(x, mask)[0] for x in metrics)], dtype=torch.float64)


def _optimize(model: TinyModel, optimizer: Optimizer, lr: float, clip_grad: float, layout: Layout) -> float:
    """Add up the ranks' gradients, clip by the global norm, step; the norm before clipping.

    Of a split output layer each rank has the gradient of its own columns, and of what lies below it the part that came through
    those columns. A critic is whole on every tensor-parallel rank, and so is its gradient.
    """
    for part in optimizer.param_groups:
        part["lr"] = lr
    split = model.out.shape[1] > 1
    squares, sharded_squares = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        group = layout.everyone if split and name != "out" else layout.tokens
        if group is not None:
            dist.all_reduce(parameter.grad, group=group)
        norm_square = parameter.grad.double().square().sum()
        if split and name == "out":
            sharded_squares += norm_square
        else:
            squares += norm_square
    if layout.tensor is not None and split:
        dist.all_reduce(sharded_squares, group=layout.tensor)
    norm = (squares + sharded_squares).sqrt()
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), clip_grad, norm)
    optimizer.step()
    return float(norm)
