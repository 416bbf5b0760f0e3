"""The whole PPO update on unsharded tensors, one sample at a time: to be read from top to bottom, and the oracle of the tests.

Nothing here is shared with the fast functions of this folder; loops are plain, and whatever is masked is never looked at.
The types are in reference_types.py, what does without a critic and the rollout correction in reference_estimators.py.
One iteration:

    1. score     log-probs of the actor as it is now ("old") and of the reference, values of the critic
    2. correct   weights for samples that another policy drew; some are rejected
    3. reward    sequence reward at the last trainable token, minus beta * KL per token
    4. advantage GAE over trainable tokens, or a critic-free estimator; whitening for the actor
    5. train     steps over the samples: clipped value loss for the critic, a policy loss for the actor
    6. adapt     beta follows the measured KL

Shapes: P prompt and R response tokens of one sample, n trainable response tokens, V vocabulary.
The policy is a module that maps token ids [P + R] to logits [P + R, >= V], the critic one that maps them to values [P + R].
Python floats are float64; tensors keep the dtype of the modules.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.optim import Optimizer

from slime_ppo.ppo_utils.reference_estimators import ReferenceOutcome, correction_weights, critic_free_advantages, is_rejected
from slime_ppo.ppo_utils.reference_types import (
    ActorReport,
    CriticReport,
    IterationReport,
    Model,
    ReferenceSample,
    ReferenceSettings,
    ReferenceStep,
    ScoredSample,
    StepReport,
)

# 1. Scores of the models. Response token i is predicted at sequence position P + i - 1: the only shift by one there is.


def log_probs_and_entropy(policy: Model, sample: ReferenceSample, settings: ReferenceSettings) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probs over the support, log-probs over the vocabulary, entropy) at the trainable tokens, each [n], with gradient.

    The entropy is that of the vocabulary, or of the support (entropy_support).
    """
    num_prompt = len(sample.prompt_ids)
    positions = [num_prompt + i - 1 for i in sample.trainable]
    logits = policy(sample.token_ids)[positions, : settings.vocab_size] / settings.temperature
    labels = sample.response_ids[sample.trainable]
    log_probs, full_log_probs, entropies = [], [], []
    for row, i, label in zip(logits, sample.trainable, labels.tolist(), strict=True):
        recorded = None if sample.support is None else sample.support[i]
        support = list(range(settings.vocab_size)) if recorded is None else sorted({*recorded.tolist(), label})
        restricted, full = row[support].log_softmax(0), row.log_softmax(0)
        log_probs.append(restricted[support.index(label)])
        full_log_probs.append(full[label])
        chosen = restricted if settings.entropy_support == "sampled" else full
        entropies.append(-(chosen.exp() * chosen).sum())
    log_p, full_log_p, entropy = (torch.stack(x) if x else logits.sum(-1) for x in (log_probs, full_log_probs, entropies))
    return log_p, full_log_p, entropy


def kl_log_probs(log_probs: Tensor, full_log_probs: Tensor, settings: ReferenceSettings) -> Tensor:
    """Which of the two the KL to the reference compares: over the support it is blind to what lies outside."""
    return log_probs if settings.kl_support == "sampled" else full_log_probs


def values_of(critic: Model, sample: ReferenceSample) -> tuple[Tensor, Tensor]:
    """Values before each trainable token [n], and the value after the whole response (a scalar)."""
    num_prompt = len(sample.prompt_ids)
    values = critic(sample.token_ids)
    return values[[num_prompt + i - 1 for i in sample.trainable]], values[-1]


# 2. Correction, in reference_estimators.py, and 3. token rewards.


def correction(sample: ReferenceSample, old: Sequence[float], settings: ReferenceSettings) -> tuple[list[float], bool]:
    """What the policy loss of each trainable token is multiplied by, and whether the sample is rejected."""
    if settings.correction is None:
        return [1.0] * len(old), False
    if sample.rollout_log_probs is None:
        raise AssertionError("a rollout correction needs the log-probs the engine drew the sample with")
    rollout = [sample.rollout_log_probs[i] for i in sample.trainable]
    return correction_weights(old, rollout, settings.correction), is_rejected(old, rollout, settings.correction)


def kl_estimate(log_ratio: Tensor, kind: str) -> Tensor:
    """k1 = lr, k2 = lr^2 / 2, k3 = e^-lr - 1 + lr, or low_var_kl = k3 clamped to +-10, of one token; lr = log p - log p_ref."""
    if kind == "k1":
        return log_ratio
    if kind == "k2":
        return log_ratio**2 / 2
    log_ratio = log_ratio.clamp(-20, 20)
    k3 = (-log_ratio).exp() - 1 + log_ratio
    return k3.clamp(-10, 10) if kind == "low_var_kl" else k3


def token_rewards(sample: ReferenceSample, old: Sequence[float], ref: Sequence[float], settings: ReferenceSettings) -> list[float]:
    """r_t = process reward_t - kl_coef KL_t of old and reference, plus the sequence reward at the last trainable token."""
    log_ratios = torch.tensor(old, dtype=torch.float64) - torch.tensor(ref, dtype=torch.float64)
    rewards = [-settings.kl_coef * kl_estimate(log_ratio, settings.kl_reward_type).item() for log_ratio in log_ratios]
    if not rewards:
        return rewards
    for i, process_reward in enumerate(sample.process_rewards or ()):
        if process_reward != 0:
            before = [k for k, token in enumerate(sample.trainable) if token <= i]
            rewards[before[-1]] += process_reward
    rewards[-1] += sample.reward
    return rewards


# 4. Advantages.


def gae(rewards: Sequence[float], values: Sequence[float], *, gamma: float, lambd: float, after: float = 0.0) -> list[float]:
    """A_i = delta_i + gamma lambd A_{i+1}, delta_i = r_i + gamma V_{i+1} - V_i, from the last token back; V_{n} = `after`."""
    advantages = [0.0] * len(rewards)
    next_value, next_advantage = after, 0.0
    for i in reversed(range(len(rewards))):
        delta = rewards[i] + gamma * next_value - values[i]
        advantages[i] = delta + gamma * lambd * next_advantage
        next_value, next_advantage = values[i], advantages[i]
    return advantages


def advantages_and_returns(
    rewards: Sequence[float], values: Sequence[float], after: float, settings: ReferenceSettings
) -> tuple[list[float], list[float]]:
    """Advantages with lambd (or its length-adaptive form) and returns with lambd_critic, before whitening."""
    lambd = settings.lambd
    if settings.adaptive_lambd is not None and len(rewards) > 0:
        lambd = min(max(1 - 1 / (settings.adaptive_lambd * len(rewards)), 0.0), 1.0)
    advantages = gae(rewards, values, gamma=settings.gamma, lambd=lambd, after=after)
    critic_side = gae(rewards, values, gamma=settings.gamma, lambd=settings.lambd_critic, after=after)
    return advantages, [v + a for v, a in zip(values, critic_side, strict=True)]


def variance(numbers: Sequence[float]) -> float:
    """Unbiased variance; 0 for fewer than two numbers."""
    if len(numbers) < 2:
        return 0.0
    mean = math.fsum(numbers) / len(numbers)
    return math.fsum((x - mean) ** 2 for x in numbers) / (len(numbers) - 1)


def with_advantages(scored: Sequence[ScoredSample], settings: ReferenceSettings) -> list[ScoredSample]:
    """The same samples with advantages and returns of the estimator, before whitening."""
    estimator = settings.advantage_estimator
    if estimator == "gae":
        pairs = [advantages_and_returns(one.rewards, one.old_values, one.value_after, settings) for one in scored]
    else:
        rewards = [one.rewards for one in scored]
        outcomes = [
            ReferenceOutcome(one.sample.reward, one.sample.group_id, one.sample.trajectory_id, one.counts) for one in scored
        ]
        with_std = settings.std_normalization
        free = critic_free_advantages(estimator, outcomes, rewards, gamma=settings.gamma, std_normalization=with_std)
        pairs = [(a, a) for a in free]
    return [replace(one, advantages=a, returns=g) for one, (a, g) in zip(scored, pairs, strict=True)]


def whitened(scored: Sequence[ScoredSample]) -> list[ScoredSample]:
    """The same samples with (A - mean) / sqrt(var + 1e-8) over all trainable tokens of those that count."""
    everything = [a for one in scored if one.counts for a in one.advantages]
    mean = math.fsum(everything) / max(len(everything), 1)
    scale = math.sqrt(variance(everything) + 1e-8)
    return [replace(one, advantages=[(a - mean) / scale for a in one.advantages]) for one in scored]


def score(
    policy: Model, reference: Model, critic: Model | None, samples: Sequence[ReferenceSample], settings: ReferenceSettings
) -> list[ScoredSample]:
    """Steps 1 to 4 for every sample, without whitening."""
    scored = []
    for sample in samples:
        with torch.no_grad():
            log_probs, full, _ = log_probs_and_entropy(policy, sample, settings)
            ref = kl_log_probs(*log_probs_and_entropy(reference, sample, settings)[:2], settings).tolist()
            values, last_value = (torch.zeros(len(ref)), torch.zeros(())) if critic is None else values_of(critic, sample)
        old, old_full = log_probs.tolist(), full.tolist()
        rewards = token_rewards(sample, kl_log_probs(log_probs, full, settings).tolist(), ref, settings)
        after = last_value.item() if sample.bootstraps else 0.0
        weights, rejected = correction(sample, old, settings)
        scored.append(
            ScoredSample(sample, old, old_full, ref, values.tolist(), after, weights, rejected, rewards, returns=[], advantages=[])
        )
    return with_advantages(scored, settings)


# 5. Losses. What a token counts depends on the whole step, never on how it is cut.


def sample_weights(samples: Sequence[ReferenceSample], mode: str, length_norm: float) -> list[float]:
    """What one trainable token of each sample counts in the step's loss."""
    tokens_of: dict[int, int] = defaultdict(int)
    for sample in samples:
        tokens_of[sample.trajectory_id] += len(sample.trainable)
    num_tokens = sum(tokens_of.values())
    num_trajectories = sum(1 for tokens in tokens_of.values() if tokens > 0)
    divisors = [
        {
            "token-mean": num_tokens,
            "seq-mean-token-mean": num_trajectories * tokens_of[sample.trajectory_id],
            "seq-mean-token-sum": num_trajectories,
            "seq-mean-token-sum-norm": num_trajectories * length_norm,
        }[mode]
        for sample in samples
    ]
    return [1.0 / divisor if sample.trainable else 0.0 for sample, divisor in zip(samples, divisors, strict=True)]


def clipped_loss(ratio: Tensor, advantage: float, settings: ReferenceSettings) -> Tensor:
    """max(-A r, -A clip(r)) of one token; with the dual clip, at most -c A where A < 0."""
    if settings.eps_clip is None:
        raise AssertionError(f"policy loss {settings.policy_loss} needs eps_clip")
    loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - settings.eps_clip, 1 + settings.eps_clip_high))
    if settings.eps_clip_c is not None and advantage < 0:
        loss = loss.clamp(max=-settings.eps_clip_c * advantage)
    return loss


def policy_losses(
    log_probs: Tensor, old_log_probs: Sequence[float], advantages: Sequence[float], settings: ReferenceSettings
) -> list[Tensor]:
    """Policy loss of each trainable token of one sample, [n].

    ppo: clipped_loss of the token's ratio. gspo: of the sample's ratio, the geometric mean over its tokens. cispo: the token's
    log-prob, weighted by its clipped ratio as a constant.
    """
    log_ratios = log_probs - torch.tensor(old_log_probs, dtype=log_probs.dtype)
    if settings.policy_loss == "gspo":
        log_ratios = log_ratios.mean().expand(len(log_ratios))
    losses = []
    for log_prob, log_ratio, advantage in zip(log_probs, log_ratios, advantages, strict=True):
        ratio = log_ratio.clamp(-20, 20).exp()
        if settings.policy_loss == "cispo":
            lowest = 0.0 if settings.eps_clip is None else 1 - settings.eps_clip
            losses.append(-ratio.detach().clamp(lowest, 1 + settings.eps_clip_high) * advantage * log_prob)
        else:
            losses.append(clipped_loss(ratio, advantage, settings))
    return losses


def kl_losses(log_probs: Tensor, full_log_probs: Tensor, one: ScoredSample, settings: ReferenceSettings) -> list[Tensor]:
    """KL of current and reference policy at each trainable token, [n]; if unbiased, times the ratio of current and old."""
    losses = []
    compared = kl_log_probs(log_probs, full_log_probs, settings)
    for current, ref, log_prob, old in zip(compared, one.ref_log_probs, log_probs, one.old_log_probs, strict=True):
        kl = kl_estimate(current - ref, settings.kl_loss_type)
        ratio = (log_prob - old).clamp(-20, 20).exp()
        if settings.use_unbiased_kl:
            kl = kl * (ratio.detach() if settings.kl_loss_type == "k2" else ratio)
        losses.append(kl)
    return losses


def value_loss(value: Tensor, old_value: float, target: float, settings: ReferenceSettings) -> Tensor:
    """0.5 max((V - G)^2, (V moved at most value_clip from V_old, minus G)^2) of one token."""
    if settings.value_clip == 0:
        return 0.5 * (value - target) ** 2
    clipped = value.clamp(old_value - settings.value_clip, old_value + settings.value_clip)
    return 0.5 * torch.maximum((value - target) ** 2, (clipped - target) ** 2)


def _optimize(loss: Tensor, optimizer: Optimizer, lr: float, clip_grad: float) -> float:
    """One optimizer step, left out when the gradient is not finite; the gradient norm before clipping."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    norm = float(torch.nn.utils.clip_grad_norm_(parameters, clip_grad))
    if math.isfinite(norm):
        optimizer.step()
    return norm


def critic_step(
    critic: Model, optimizer: Optimizer, batch: Sequence[ScoredSample], lr: float, settings: ReferenceSettings
) -> CriticReport:
    """One step of the critic on the samples of the step; rejected ones have no loss, but their weight is not given away."""
    weights = sample_weights([one.sample for one in batch], settings.loss_reduction, settings.loss_length_norm)
    terms = []
    for one, weight in zip(batch, weights, strict=True):
        if one.rejected:
            continue
        values, _ = values_of(critic, one.sample)
        for value, old, target in zip(values, one.old_values, one.returns, strict=True):
            terms.append(weight * value_loss(value, old, target, settings))
    loss = torch.stack(terms).sum()
    return CriticReport(value_loss=loss.item(), grad_norm=_optimize(loss, optimizer, lr, settings.clip_grad))


def actor_step(
    policy: Model, optimizer: Optimizer, batch: Sequence[ScoredSample], lr: float, settings: ReferenceSettings, *, stop_above: float
) -> ActorReport | None:
    """One step of the actor; None, with nothing changed, when its KL from the old policy is above `stop_above`.

    loss = correction * policy loss - entropy_coef * entropy + kl_loss_coef * KL, every term with the same weights.
    """
    weights = sample_weights([one.sample for one in batch], settings.loss_reduction, settings.loss_length_norm)
    policy_terms, all_terms, entropies, moved = [], [], [], []
    for one, weight in zip(batch, weights, strict=True):
        log_probs, full, entropy = log_probs_and_entropy(policy, one.sample, settings)
        losses = policy_losses(log_probs, one.old_log_probs, one.advantages, settings)
        for t, kl in enumerate(kl_losses(log_probs, full, one, settings)):
            pg = one.weights[t] * losses[t]
            policy_terms.append(weight * pg)
            all_terms.append(weight * (pg - settings.entropy_coef * entropy[t] + settings.kl_loss_coef * kl))
            entropies.append(entropy[t].item())
            log_ratio = log_probs[t].item() - one.old_log_probs[t]
            moved.append(math.expm1(min(max(log_ratio, -20.0), 20.0)) - min(max(log_ratio, -20.0), 20.0))
    ppo_kl = math.fsum(moved) / len(moved)
    if ppo_kl > stop_above:
        return None
    loss = torch.stack(all_terms).sum()
    return ActorReport(
        policy_loss=torch.stack(policy_terms).sum().item(),
        loss=loss.item(),
        entropy=math.fsum(entropies) / len(entropies),
        ppo_kl=ppo_kl,
        grad_norm=_optimize(loss, optimizer, lr, settings.clip_grad),
    )


# 6. How far the actor is from the reference, and what that makes of beta.


def trajectory_kl(scored: Sequence[ScoredSample], settings: ReferenceSettings) -> tuple[float, int]:
    """(mean over trajectories that count of the token sum of log p_old - log p_ref, number of those trajectories)."""
    sums: dict[int, float] = defaultdict(float)
    for one in (one for one in scored if one.counts):
        compared = one.old_log_probs if settings.kl_support == "sampled" else one.old_full_log_probs
        for old, ref in zip(compared, one.ref_log_probs, strict=True):
            sums[one.sample.trajectory_id] += old - ref
    return math.fsum(sums.values()) / max(len(sums), 1), len(sums)


def next_kl_coef(kl: float, n: int, settings: ReferenceSettings) -> float:
    """beta (1 + clip(kl / target - 1, -0.2, 0.2) min(n / horizon, 1)); unchanged without a target."""
    if settings.kl_target is None:
        return settings.kl_coef
    error = min(max(kl / settings.kl_target - 1, -0.2), 0.2)
    return settings.kl_coef * (1 + error * min(n / settings.kl_horizon, 1.0))


def explained_variance(scored: Sequence[ScoredSample]) -> float | None:
    """1 - var(G - V_old) / var(G) over the rollout; None when all returns are equal."""
    returns = [g for one in scored for g in one.returns]
    residuals = [g - v for one in scored for g, v in zip(one.returns, one.old_values, strict=True)]
    if not returns or max(returns) == min(returns):
        return None
    return 1 - variance(residuals) / variance(returns)


# The iteration.


def ppo_iteration(
    policy: Model,
    reference: Model,
    critic: Model | None,
    samples: Sequence[ReferenceSample],
    settings: ReferenceSettings,
    *,
    steps: Sequence[ReferenceStep],
    actor_optimizer: Optimizer | None,
    critic_optimizer: Optimizer | None,
) -> IterationReport:
    """One PPO iteration on `samples`, following `steps` (all epochs, already shuffled); the models move in place.

    `actor_optimizer` None = a critic-only iteration, in which beta stays as it is. `critic` and `critic_optimizer` None = a
    critic-free estimator. A step of which nothing counts is left out.
    """
    scored = score(policy, reference, critic, samples, settings)
    kl, num_trajectories = trajectory_kl(scored, settings)
    beta = settings.kl_coef if actor_optimizer is None else next_kl_coef(kl, num_trajectories, settings)
    to_train = whitened(scored) if settings.normalize_advantages and not settings.whiten_each_step else scored
    reports, stopped = [], False
    for number, step in enumerate(steps):
        batch = [to_train[row] for row in step.rows]
        if not any(one.counts for one in batch):
            continue
        if settings.normalize_advantages and settings.whiten_each_step:
            batch = whitened(batch)
        critic_report = actor_report = None
        if critic is not None and critic_optimizer is not None:
            critic_report = critic_step(critic, critic_optimizer, batch, step.critic_lr, settings)
        if actor_optimizer is not None and not stopped:
            limit = math.inf if number == 0 or settings.kl_early_stop is None else settings.kl_early_stop
            actor_report = actor_step(policy, actor_optimizer, batch, step.actor_lr, settings, stop_above=limit)
            stopped = actor_report is None
        reports.append(StepReport(critic_report, actor_report))
    explained = None if critic is None else explained_variance(scored)
    return IterationReport(scored, kl, beta, explained, tuple(reports))
