"""Metrics of one rollout from hand-made statistics, every expected number worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest

from slime_ppo.ppo_utils.denominator import make_denominator
from slime_ppo.tracking.rollout_metrics import (
    batch_metrics,
    eval_metrics,
    is_early_stopped,
    is_skipped,
    pass_metrics,
    sample_metrics,
    stage_metrics,
    step_records,
    training_metrics,
)
from slime_ppo.types.rollout_batch import RolloutBatch
from slime_ppo.types.sample import FinishReason, Prompt, Sample, Support, VersionSpan, one_version
from slime_ppo.types.stats import Stats, merge_stats


def actor_step(*, tokens: int, clipped: int, pg_loss: float, grad_norm: float) -> Stats:
    stats = Stats()
    stats.add_value("skipped", 0.0)
    stats.add_total("pg_loss", pg_loss)
    stats.add_mean("pg_clipfrac", clipped, tokens)
    stats.add_mean("ppo_kl", 0.5 * tokens, tokens)
    stats.add_mean("entropy", 2.0 * tokens, tokens)
    stats.add_mean("kl_ref", 0.25 * clipped, tokens)
    stats.add_value("grad_norm", grad_norm)
    stats.add_value("lr", 1e-3)
    stats.add_value("num_tokens", tokens)
    return stats


def critic_step(*, tokens: int, clipped: int, value_loss: float) -> Stats:
    stats = Stats()
    stats.add_value("skipped", 0.0)
    stats.add_total("value_loss", value_loss)
    stats.add_mean("value_clipfrac", clipped, tokens)
    stats.add_value("grad_norm", 1.5)
    stats.add_value("lr", 2e-3)
    stats.add_value("num_tokens", tokens)
    return stats


def skipped_step(*, early_stopped: bool, measured: bool = False) -> Stats:
    """`measured`: the step computed its loss and was discarded, as after a non-finite gradient."""
    stats = Stats()
    stats.add_value("skipped", 1.0)
    stats.add_value("early_stopped", float(early_stopped))
    if measured:
        stats.add_total("pg_loss", 77.0)
        stats.add_mean("pg_clipfrac", 1000, 1000)
        stats.add_value("grad_norm", float("inf"))
    stats.add_value("lr", 5.0)
    stats.add_value("num_tokens", 1000)
    return stats


RAN = actor_step(tokens=10, clipped=1, pg_loss=-0.3, grad_norm=1.0), actor_step(tokens=30, clipped=7, pg_loss=0.1, grad_norm=3.0)


def test_training_metrics_totals_are_per_step_that_ran_and_token_means_over_all_tokens() -> None:
    critic = [critic_step(tokens=10, clipped=4, value_loss=0.5), critic_step(tokens=30, clipped=0, value_loss=0.25)]
    assert training_metrics(RAN, critic) == pytest.approx(
        {
            "train/pg_loss": -0.1,  # (-0.3 + 0.1) / 2 steps
            "train/pg_clipfrac": 0.2,  # 8 of 40 tokens, not the mean of 1/10 and 7/30
            "train/ppo_kl": 0.5,
            "train/entropy": 2.0,
            "train/kl_ref": 0.05,  # 0.25 * 8 / 40
            "train/grad_norm": 2.0,
            "train/lr-pg_0": 1e-3,
            "train/num_tokens": 20.0,
            "train/early_stopped_steps": 0.0,
            "train/skipped_steps": 0.0,
            "train/critic-value_loss": 0.375,
            "train/critic-value_clipfrac": 0.1,
            "train/critic-grad_norm": 1.5,
            "train/critic-lr": 2e-3,
            "train/critic-num_tokens": 20.0,
            "train/critic-skipped_steps": 0.0,
        },
        rel=1e-12,
    )


def test_training_metrics_skipped_steps_are_counted_and_leave_every_average() -> None:
    skipped = [skipped_step(early_stopped=False, measured=True), skipped_step(early_stopped=True), skipped_step(early_stopped=True)]
    alone, among = training_metrics(RAN, []), training_metrics([RAN[0], *skipped, RAN[1]], [])
    assert among == alone | {"train/skipped_steps": 3.0, "train/early_stopped_steps": 2.0}


def test_training_metrics_steps_reported_by_two_ranks_count_once() -> None:
    both = merge_stats([skipped_step(early_stopped=True)] * 2)
    found = training_metrics([both], [merge_stats([critic_step(tokens=5, clipped=1, value_loss=0.25)] * 2)])
    assert found["train/skipped_steps"] == found["train/early_stopped_steps"] == 1.0
    assert found["train/critic-value_loss"] == 0.5  # the ranks' shares of one step's loss add up
    assert found["train/critic-value_clipfrac"] == 0.2
    assert found["train/critic-grad_norm"] == 1.5


def test_training_metrics_nothing_ran_leaves_counts_only() -> None:
    skipped = [skipped_step(early_stopped=False), skipped_step(early_stopped=False)]
    assert training_metrics(skipped, skipped[:1]) == {
        "train/early_stopped_steps": 0.0,
        "train/skipped_steps": 2.0,
        "train/critic-skipped_steps": 1.0,
    }


def test_training_metrics_critic_only_rollout_has_no_name_of_the_actor() -> None:
    found = training_metrics([], [critic_step(tokens=5, clipped=1, value_loss=0.25)])
    assert all(name.startswith("train/critic-") for name in found) and len(found) == 6


def test_is_skipped_and_is_early_stopped_tell_the_kinds_apart() -> None:
    ran, skipped, stopped = RAN[0], skipped_step(early_stopped=False), skipped_step(early_stopped=True)
    assert [is_skipped(step) for step in (ran, skipped, stopped)] == [False, True, True]
    assert [is_early_stopped(step) for step in (ran, skipped, stopped)] == [False, False, True]


def sample(sample_id: int, *, length: int, reward: float, finish: FinishReason, trains: bool = True, one_token: int = 0) -> Sample:
    """Every token's support has two ids, but for the first `one_token` ones."""
    counts = np.array([1] * one_token + [2] * (length - one_token), np.int32)
    ids = np.concatenate([np.array([7, 8][:count], np.int32) for count in counts])
    return Sample(
        sample_id=sample_id,
        group_id=sample_id,
        trajectory_id=sample_id,
        prompt=Prompt(0, "p", np.array([5], np.int32)),
        response_ids=np.full(length, 7, np.int32),
        response_text="",
        rollout_log_probs=np.full(length, -0.5, np.float32),
        support=Support(ids, counts),
        loss_mask=np.full(length, trains),
        finish=finish,
        weight_versions=one_version(0, 2),
        reward=reward,
    )


def test_batch_metrics_of_three_samples() -> None:
    samples = [
        sample(0, length=2, reward=1.0, finish=FinishReason.STOP, one_token=1),
        sample(1, length=3, reward=-0.5, finish=FinishReason.STOP),
        sample(2, length=7, reward=1.0, finish=FinishReason.LENGTH, trains=False, one_token=7),
    ]
    assert batch_metrics(RolloutBatch.from_samples(0, samples)) == pytest.approx(
        {
            "rollout/raw_reward": 0.5,
            "rollout/raw_reward_std": 0.5**0.5,  # deviations 0.5, -1, 0.5
            "rollout/response_len/mean": 4.0,
            "rollout/response_len/min": 2.0,
            "rollout/response_len/max": 7.0,
            "rollout/truncated_ratio": 1 / 3,
            "rollout/num_samples": 3.0,
            "rollout/num_untrainable": 1.0,
            "rollout/one_token_supports": 0.2,  # 1 of the 5 trainable tokens
        },
        rel=1e-6,
    )


def test_sample_metrics_cached_tokens_are_a_share_of_prompt_tokens_and_mixed_versions_are_told_where_there_are_any() -> None:
    one, two, three = (sample(i, length=2, reward=0.0, finish=FinishReason.STOP) for i in range(3))
    one = replace(one, prompt=replace(one.prompt, token_ids=np.arange(6, dtype=np.int32)), num_cached_tokens=3)
    two = replace(two, weight_versions=(VersionSpan(0, 0, 1), VersionSpan(0, 1, 2)))
    assert sample_metrics([one, two, three]) == {"rollout/cached_tokens_ratio": 3 / 8}
    three = replace(three, weight_versions=(VersionSpan(0, 0, 1), VersionSpan(1, 1, 2)))
    assert sample_metrics([one, two, three]) == {"rollout/cached_tokens_ratio": 3 / 8, "rollout/mixed_version_ratio": 1 / 3}


def test_metrics_count_samples_whose_reward_was_cut_where_there_are_any() -> None:
    one, two = (sample(i, length=2, reward=0.0, finish=FinishReason.STOP) for i in range(2))
    for samples, found in (([one, two.with_cut_reward()], 1.0), ([one, two], None)):
        assert sample_metrics(samples).get("rollout/num_reward_timeouts") == found
        told = eval_metrics("math", samples, n_samples_per_prompt=1, pass_threshold=1.0)
        assert (told["eval/math"], told.get("eval/math_num_reward_timeouts")) == (0.0, found)


def test_pass_metrics_count_a_trajectory_of_several_samples_once() -> None:
    """Prompt 0 has two answers, the first in two parts, and one of them passes; prompt 3 has two that fail."""
    rewards, groups, trajectories = [1.0, 1.0, 0.0, 0.5, 0.9], [0, 0, 0, 3, 3], [0, 0, 2, 3, 4]
    samples = [
        replace(sample(i, length=2, reward=reward, finish=FinishReason.STOP), group_id=group, trajectory_id=trajectory)
        for i, (reward, group, trajectory) in enumerate(zip(rewards, groups, trajectories, strict=True))
    ]
    batch = RolloutBatch.from_samples(0, samples)
    assert pass_metrics(batch, n_samples_per_prompt=2, threshold=1.0) == {"passrate/pass@1": 0.25, "passrate/pass@2": 0.5}


def test_stage_metrics_explained_variance_is_the_critics_and_absent_without_a_value() -> None:
    log_probs, advantages = Stats(), Stats()
    log_probs.add_mean("kl", 3.0, 6)
    log_probs.add_mean("entropy", 0.0, 0)
    log_probs.add_max("logprob_gap_max", 1e-6)
    advantages.add_mean("values", 2.0, 8)
    without = {
        "rollout/kl": 0.5,
        "rollout/logprob_gap_max": 1e-6,
        "train/train_rollout_logprob_abs_diff_max": 1e-6,
        "rollout/values": 0.25,
    }
    assert stage_metrics(log_probs, advantages) == without
    advantages.add_value("explained_variance", 0.75)
    assert stage_metrics(log_probs, advantages) == without | {"train/critic-explained_variance": 0.75}


def mismatch(*, rho: list[float], rejected: int) -> Stats:
    """What one rank reports of tokens with these ratios to the engine."""
    stats = Stats()
    stats.add_mean("logprob_gap_mean", 0.25 * len(rho), len(rho))
    stats.add_mean("mismatch_k3", 0.5 * len(rho), len(rho))
    stats.add_total("ess_rho", sum(rho))
    stats.add_total("ess_rho2", sum(one**2 for one in rho))
    stats.add_total("ess_n", len(rho))
    stats.add_total("rejected_samples", rejected)
    return stats


def test_stage_metrics_mismatch_of_two_ranks_is_that_of_all_tokens() -> None:
    merged = merge_stats([mismatch(rho=[1.0, 3.0], rejected=1), mismatch(rho=[0.0], rejected=2)])
    assert stage_metrics(merged, Stats()) == pytest.approx(
        {
            "rollout/logprob_gap_mean": 0.25,
            "train/train_rollout_logprob_abs_diff": 0.25,
            "rollout/mismatch_k3": 0.5,
            "train/rollout_ratio_mean": 4 / 3,
            "rollout/ess": 16 / 30,  # (1 + 3 + 0)^2 / (3 * (1 + 9 + 0))
            "rollout/rejected_samples": 3.0,
        },
        rel=1e-12,
    )


def test_stage_metrics_no_trainable_token_leaves_the_sample_size_without_a_value() -> None:
    assert stage_metrics(mismatch(rho=[], rejected=0), Stats()) == {"rollout/rejected_samples": 0.0}


def test_training_metrics_say_what_each_role_divided_by() -> None:
    actor, critic = actor_step(tokens=10, clipped=1, pg_loss=-0.3, grad_norm=1.0), critic_step(tokens=5, clipped=1, value_loss=0.25)
    for step, tokens, mode in ((actor, 10, "seq-mean-token-sum"), (critic, 5, "token-mean")):
        for name, value in make_denominator([tokens - 1, 1], [0, 1], mode=mode).metrics().items():
            step.add_value(name, value)
    found = training_metrics([merge_stats([actor, actor])], [critic])  # two ranks know the same number
    assert {name: value for name, value in found.items() if "denominator" in name} == {
        "train/denominator_tokens": 10.0,
        "train/denominator_trajectories": 2.0,
        "train/denominator_seq-mean-token-sum": 1.0,
        "train/critic-denominator_tokens": 5.0,
        "train/critic-denominator_trajectories": 2.0,
        "train/critic-denominator_token-mean": 1.0,
    }


def test_step_records_pair_both_roles_and_number_the_steps() -> None:
    critic = [critic_step(tokens=10, clipped=4, value_loss=0.5), skipped_step(early_stopped=False)]
    records = step_records(6, [RAN[0], skipped_step(early_stopped=True)], critic, metrics={"train/critic-explained_variance": 0.75})
    assert records == (
        {
            "step": 6.0,
            "pg_loss": -0.3,
            "ppo_kl": 0.5,
            "pg_clipfrac": 0.1,
            "entropy": 2.0,
            "grad_norm": 1.0,
            "lr": 1e-3,
            "value_loss": 0.5,
            "critic_grad_norm": 1.5,
            "explained_variance": 0.75,
        },
        {"step": 7.0, "lr": 5.0, "explained_variance": 0.75},
    )


def test_step_records_critic_only_rollout_has_no_policy_names() -> None:
    records = step_records(0, [], [critic_step(tokens=10, clipped=4, value_loss=0.5)], metrics={})
    assert records == ({"step": 0.0, "value_loss": 0.5, "critic_grad_norm": 1.5},)


def test_training_metrics_and_step_records_without_a_critic_have_no_name_of_it() -> None:
    assert not [name for name in training_metrics(RAN, []) if "critic" in name]
    records = step_records(4, [RAN[0], RAN[1]], [], metrics={})
    assert [(record["step"], record["pg_loss"]) for record in records] == [(4.0, -0.3), (5.0, 0.1)]
    assert not {"value_loss", "critic_grad_norm", "explained_variance"} & {name for record in records for name in record}
