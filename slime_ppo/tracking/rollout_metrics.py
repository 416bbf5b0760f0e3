"""The metrics of one rollout by their full names, from what the stages measured."""

from collections.abc import Mapping, Sequence
from typing import get_args

import numpy as np

from slime_ppo.ppo_utils.off_policy_stats import Mismatch
from slime_ppo.ppo_utils.registries import Reduction
from slime_ppo.tracking.pass_rates import pass_rates
from slime_ppo.types.rollout_batch import FINISH_CODES, RolloutBatch
from slime_ppo.types.sample import FinishReason, Sample
from slime_ppo.types.stats import Stats, merge_stats, prefixed

# what a step's losses were divided by: Denominator.metrics
_DENOMINATOR = ("denominator_tokens", "denominator_trajectories", *(f"denominator_{mode}" for mode in get_args(Reduction)))
# training statistic -> metric name; names users of Megatron RL trainers know
_ACTOR_NAMES = {
    "loss": "loss",
    "nll": "nll",
    "pg_loss": "pg_loss",
    "pg_clipfrac": "pg_clipfrac",
    "pg_clipfrac_low": "pg_clipfrac_low",
    "pg_clipfrac_high": "pg_clipfrac_high",
    "pg_clipfrac_dual": "pg_clipfrac_dual",
    "ratio_clamped": "ratio_clamped",
    "ppo_kl": "ppo_kl",
    "kl_loss": "kl_loss",
    "kl_ref": "kl_ref",
    "kl_clamped": "kl_clamped",
    "entropy_loss": "entropy_loss",
    "entropy": "entropy",
    "grad_norm": "grad_norm",
    "lr": "lr-pg_0",
    "num_tokens": "num_tokens",
    **{name: name for name in _DENOMINATOR},
}
_CRITIC_NAMES = {
    "value_loss": "critic-value_loss",
    "value_clipfrac": "critic-value_clipfrac",
    "grad_norm": "critic-grad_norm",
    "lr": "critic-lr",
    "num_tokens": "critic-num_tokens",
    **{name: f"critic-{name}" for name in _DENOMINATOR},
}
# of the passes before the updates: figures of the critic, and second names
_TRAINING_NAMES = {"explained_variance": "train/critic-explained_variance"}
_SECOND_NAMES = {
    "logprob_gap_mean": "train/train_rollout_logprob_abs_diff",
    "logprob_gap_max": "train/train_rollout_logprob_abs_diff_max",
}


def batch_metrics(batch: RolloutBatch) -> dict[str, float]:
    """What the driver knows of a rollout before any rank has seen it."""
    lengths = batch.response_lens
    cut = batch.finish == FINISH_CODES.index(FinishReason.LENGTH)
    supports = {}
    if batch.support_counts is not None and batch.loss_mask.any():
        supports = {"rollout/one_token_supports": float((batch.support_counts[batch.loss_mask] == 1).mean())}
    return supports | {
        "rollout/raw_reward": float(batch.rewards.mean(dtype=np.float64)),
        "rollout/raw_reward_std": float(batch.rewards.std(dtype=np.float64)),
        "rollout/response_len/mean": float(lengths.mean()),
        "rollout/response_len/min": float(lengths.min()),
        "rollout/response_len/max": float(lengths.max()),
        "rollout/truncated_ratio": float(cut.mean()),
        "rollout/num_samples": float(batch.num_samples),
        "rollout/num_untrainable": float((batch.trainable_tokens == 0).sum()),
    }


def sample_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """What the engine tells of its answers: the share of prompt tokens from its prefix cache, and of the responses that more than
    one weight version generated, where there are any; and of how many the reward was cut."""
    cached, total = sum(s.num_cached_tokens for s in samples), sum(len(s.prompt.token_ids) for s in samples)
    mixed = sum(len({span.version for span in s.weight_versions}) > 1 for s in samples) / len(samples)
    told = {"rollout/cached_tokens_ratio": cached / total} | _timeouts("rollout/", samples)
    return told | ({"rollout/mixed_version_ratio": mixed} if mixed else {})


def _timeouts(prefix: str, samples: Sequence[Sample]) -> dict[str, float]:
    """How many count as 0 because their reward took too long, where any does."""
    cut = sum(sample.reward_cut for sample in samples)
    return {f"{prefix}num_reward_timeouts": float(cut)} if cut else {}


def pass_metrics(batch: RolloutBatch, *, n_samples_per_prompt: int, threshold: float) -> dict[str, float]:
    """pass@k of the rollout's prompts; all parts of a trajectory are one answer."""
    _, first = np.unique(batch.trajectory_ids, return_index=True)
    rewards, groups = batch.rewards[first].tolist(), batch.group_ids[first].tolist()
    return prefixed("passrate", pass_rates(rewards, groups, threshold=threshold, n_samples_per_prompt=n_samples_per_prompt))


def eval_metrics(name: str, samples: Sequence[Sample], *, n_samples_per_prompt: int, pass_threshold: float) -> dict[str, float]:
    """What the rewarded answers to one data set tell; nothing without any. `eval/<name>` is the mean reward."""
    if not samples:
        return {}
    rewards = [float(sample.reward or 0.0) for sample in samples]
    groups = [sample.group_id for sample in samples]
    rates = pass_rates(rewards, groups, threshold=pass_threshold, n_samples_per_prompt=n_samples_per_prompt)
    return {
        f"eval/{name}": sum(rewards) / len(samples),
        f"eval/{name}_response_len": sum(len(sample.response_ids) for sample in samples) / len(samples),
        f"eval/{name}_truncated_ratio": sum(sample.finish is FinishReason.LENGTH for sample in samples) / len(samples),
        **_timeouts(f"eval/{name}_", samples),
        **{f"eval/{name}_{rate}": value for rate, value in rates.items()},
    }


def before_training(metrics: Mapping[str, float]) -> dict[str, float]:
    """An evaluation that is followed by another one in the same rollout: `eval/...` as `eval_before/...`."""
    return {name.replace("eval/", "eval_before/", 1) if name.startswith("eval/") else name: metrics[name] for name in metrics}


def stage_metrics(log_probs: Stats, advantages: Stats) -> dict[str, float]:
    """What the passes before the updates measured.

    The gap to the engine has the name that users of Megatron RL trainers know, too.
    """
    found = log_probs.result() | advantages.result()
    metrics = {name: found.pop(stat) for stat, name in _TRAINING_NAMES.items() if stat in found}
    metrics |= {name: found[stat] for stat, name in _SECOND_NAMES.items() if stat in found}
    if "ess_n" in found:
        rho_sum, rho_square_sum, count = (found.pop(name) for name in ("ess_rho", "ess_rho2", "ess_n"))
        if count:
            mismatch = Mismatch(num_tokens=round(count), rho_sum=rho_sum, rho_square_sum=rho_square_sum)
            found["ess"] = mismatch.ess
            metrics["train/rollout_ratio_mean"] = mismatch.ratio_mean
    return prefixed("rollout", found) | metrics


def training_metrics(actor: Sequence[Stats], critic: Sequence[Stats]) -> dict[str, float]:
    """Averages over the rollout's steps: totals per step that ran, token averages over all of them."""
    metrics: dict[str, float] = {}
    for steps, names in ((actor, _ACTOR_NAMES), (critic, _CRITIC_NAMES)):
        ran = [step for step in steps if not step.sums["skipped"]]
        merged = merge_stats(ran)
        values = merged.result() | {name: total / len(ran) for name, total in merged.totals.items()}
        metrics |= {f"train/{metric}": values[name] for name, metric in names.items() if name in values}
    if actor:
        metrics["train/early_stopped_steps"] = float(sum(is_early_stopped(step) for step in actor))
        metrics["train/skipped_steps"] = float(sum(is_skipped(step) for step in actor))
    if critic:
        metrics["train/critic-skipped_steps"] = float(sum(is_skipped(step) for step in critic))
    return metrics


def is_skipped(step: Stats) -> bool:
    """True for an optimizer step that changed nothing."""
    return step.sums["skipped"] > 0


def is_early_stopped(step: Stats) -> bool:
    """True for a step that was left out because the policy had moved too far (--kl-early-stop), as intended."""
    return "early_stopped" in step.sums and step.sums["early_stopped"] > 0


def step_records(
    first_step: int, actor: Sequence[Stats], critic: Sequence[Stats], *, metrics: Mapping[str, float]
) -> tuple[Mapping[str, float], ...]:
    """One mapping per optimizer step, for the console and the report; policy names are absent in critic-only rollouts, the
    critic's in runs without one.

    The explained variance is the rollout's, from before its first step.
    """
    explained = "train/critic-explained_variance"
    records: list[dict[str, float]] = []
    for index in range(max(len(actor), len(critic))):
        record = {"step": float(first_step + index)}
        if actor:
            found = actor[index].result()
            record |= {
                name: found[name] for name in ("pg_loss", "ppo_kl", "pg_clipfrac", "entropy", "grad_norm", "lr") if name in found
            }
        if critic:
            found = critic[index].result()
            record |= {"value_loss": found["value_loss"]} if "value_loss" in found else {}
            record |= {"critic_grad_norm": found["grad_norm"]} if "grad_norm" in found else {}
            record |= {"explained_variance": metrics[explained]} if explained in metrics else {}
        records.append(record)
    return tuple(records)
