"""The training loop with parts that write down what it does with them: what happens, in which order, with which numbers."""

import json
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from slime_ppo.config.fields import Value
from slime_ppo.config.root import Config
from slime_ppo.data.schedule import make_step_plan
from slime_ppo.errors import NumericsError, RewardError, RolloutError
from slime_ppo.tracking.console import step_line
from slime_ppo.trainer import PpoTrainer
from slime_ppo.types.sample import FinishReason, GenerateRequest
from slime_ppo.types.stats import Stats
from slime_ppo.types.step_plan import StepPlan
from tests.helpers.configs import make_config
from tests.helpers.trainer_parts import Parts, step_stats

PASSES = ["offload rollout", "wake actor", "actor log-probs", "offload actor", "wake critic", "critic advantages", "critic train"]
UPDATES = ["offload critic", "wake actor", "actor train"]


def small(**values: Value) -> Config:
    """Four prompts per rollout in two steps of two."""
    defaults: dict[str, Value] = {
        "run__num_rollout": 2,
        "run__save": "run-folder",
        "model__save_hf": False,
        "rollout__rollout_batch_size": 4,
        "batch__global_batch_size": 2,
        "tracking__num_logged_samples": 0,
    }
    return make_config(**(defaults | values))


def run(parts: Parts) -> Parts:
    PpoTrainer(parts.config, parts.trainer_parts(), parts.progress).run()
    return parts


def rows_of(plan: StepPlan) -> list[list[int]]:
    return [step.rows.tolist() for step in plan.steps]


def skipping(*which: tuple[int, int]) -> Callable[[int, int], Stats]:
    """Steps report skipped where (rollout, step) is listed."""
    return lambda rollout_id, step: step_stats(skipped=(rollout_id, step) in which)


# order, turns and weight versions


def test_run_two_rollouts_does_everything_in_the_order_of_the_picture() -> None:
    parts = run(Parts(small()))
    assert parts.journal == [
        *("connect", "wake actor", "wake rollout", "push 0", "offload actor", "generate", "reward", *PASSES, *UPDATES, "log"),
        *("wake rollout", "push 1", "offload actor", "generate", "reward", *PASSES, *UPDATES, "log"),
    ]


def test_run_critic_only_rollout_never_trains_the_actor_and_keeps_the_version() -> None:
    parts = run(Parts(small(run__num_rollout=3, ppo__num_critic_only_steps=2)))
    sync = ["wake actor", "wake rollout", "push 0", "offload actor", "generate", "reward"]
    assert parts.journal == [
        *("connect", *sync, *PASSES, "log"),
        *("offload critic", *sync, *PASSES, "log"),
        *("offload critic", *sync, *PASSES, *UPDATES, "log"),
    ]
    assert [record.critic_only for record in parts.tracker.records] == [True, True, False]


def test_run_without_offload_pushes_only_new_versions() -> None:
    config = small(run__num_rollout=5, ppo__num_critic_only_steps=2, cluster__offload=False)
    parts = Parts(config)
    parts.actor.outcomes = skipping((2, 0), (2, 1))
    run(parts)
    happened = [line for line in parts.journal if line.startswith(("push", "generate", "actor train", "wake", "offload"))]
    assert happened == [
        *("push 0", "generate", "generate", "generate", "actor train"),  # rollout 2 changed nothing
        *("generate", "actor train", "push 1", "generate", "actor train"),
    ]


def test_run_without_colocation_trains_both_at_once_wakes_nobody_and_pushes_when_both_have_ended() -> None:
    parts = run(Parts(small(run__num_rollout=3, ppo__num_critic_only_steps=1, cluster__colocate=False)))
    passes = ["generate", "reward", "actor log-probs", "critic advantages"]
    both = ["side by side:", "critic train", "actor train", "log"]
    assert parts.journal == ["connect", "push 0", *passes, "critic train", "log", *passes, *both, "push 1", *passes, *both]
    assert [record.critic_only for record in parts.tracker.records] == [True, False, False]


def test_run_without_colocation_reports_what_it_reports_with_it() -> None:
    def outcomes(rollout_id: int, step: int) -> Stats:
        return step_stats(skipped=(rollout_id, step) == (1, 0), grad_norm=1.0 + step)

    found = []
    for colocate in (True, False):
        parts = Parts(small(run__num_rollout=3, ppo__num_critic_only_steps=1, cluster__colocate=colocate))
        parts.actor.outcomes = parts.critic.outcomes = outcomes
        run(parts)
        metrics = [{k: v for k, v in one.metrics.items() if not k.startswith("perf/")} for one in parts.tracker.records]
        rates = (parts.actor.rates, parts.critic.rates)
        found.append((metrics, [one.steps for one in parts.tracker.records], rates))
        assert ("both train" in parts.tracker.records[0].phases) is not colocate
    assert found[0] == found[1]


def test_run_without_colocation_ends_after_too_many_skipped_steps_of_either_role() -> None:
    parts = Parts(small(cluster__colocate=False, ppo__max_skipped_steps=2))
    parts.critic.outcomes = skipping((0, 0), (0, 1))
    with pytest.raises(NumericsError, match="2 optimizer steps of the critic in a row were skipped"):
        run(parts)


@pytest.mark.parametrize(("skipped", "pushed_next"), [([(0, 0)], "push 1"), ([(0, 0), (0, 1)], "push 0")])
def test_version_grows_only_when_some_actor_step_ran(skipped: list[tuple[int, int]], pushed_next: str) -> None:
    parts = Parts(small())
    parts.actor.outcomes = skipping(*skipped)
    assert [line for line in run(parts).journal if line.startswith("push")] == ["push 0", pushed_next]


def test_collect_engine_that_missed_a_push_is_an_error() -> None:
    parts = Parts(small())
    trainer = PpoTrainer(parts.config, parts.trainer_parts(), parts.progress)
    trainer.parts.rollouts.use_weights(trainer.progress.version)
    trainer.progress.version = 1
    with pytest.raises(
        RolloutError, match="sample 0 was generated by weight version 0 .response tokens 0 to 2., the trainer is at 1"
    ):
        trainer.collect(0)


def test_run_saves_both_roles_at_the_end_each_in_its_own_turn() -> None:
    parts = run(Parts(small(run__num_rollout=1, model__save_hf=True, critic__save="critic-folder")))
    end = parts.journal[parts.journal.index("log") + 1 :]
    assert end == ["save actor in run-folder/hf", "offload actor", "wake critic", "save critic in critic-folder/hf"]
    assert not any("save" in line for line in run(Parts(small(run__num_rollout=1))).journal)


# without a critic

GRPO: dict[str, Value] = {"ppo__advantage_estimator": "grpo", "rollout__n_samples_per_prompt": 2, "rollout__rollout_batch_size": 2}


def test_run_without_a_critic_asks_the_actor_for_advantages_in_one_turn() -> None:
    parts = run(Parts(small(**GRPO, model__save_hf=True)))
    actor_turn = ["offload rollout", "wake actor", "actor log-probs", "actor advantages", "actor train", "log"]
    assert parts.journal == [
        *("connect", "wake actor", "wake rollout", "push 0", "offload actor", "generate", "reward", *actor_turn),
        *("wake rollout", "push 1", "offload actor", "generate", "reward", *actor_turn),
        "save actor in run-folder/hf",
    ]
    assert [record.critic_only for record in parts.tracker.records] == [False, False]


def test_run_without_a_critic_reports_no_figure_of_one() -> None:
    parts = Parts(small(**GRPO, run__num_rollout=1))
    parts.actor.advantage_stats.add_mean("advantages", 1.0, 4)
    parts.actor.outcomes = lambda rollout_id, step: step_stats(pg_clipfrac=0.25, entropy=2.0)
    [record] = run(parts).tracker.records
    assert not [name for name in (*record.metrics, *record.phases) if "critic" in name or "values" in name]
    assert (record.metrics["rollout/advantages"], record.metrics["train/pg_clipfrac"]) == (0.25, 0.25)
    assert record.steps == ({"step": 0.0, "pg_clipfrac": 0.25, "entropy": 2.0}, {"step": 1.0, "pg_clipfrac": 0.25, "entropy": 2.0})
    assert "critic" not in "".join(step_line(step) for step in record.steps)
    assert "perf/advantages_time" in record.metrics


def test_run_without_a_critic_charges_beta_through_the_actor() -> None:
    config = small(
        ppo__advantage_estimator="reinforce_plus_plus", ppo__kl_coef=0.1, ppo__kl_controller="adaptive",
        ppo__kl_target=1.0, ppo__kl_horizon=8,
    )  # fmt: skip
    parts = Parts(config)
    parts.actor.log_prob_stats.add_mean("kl_trajectory", 8.0, 4)
    assert run(parts).actor.betas == pytest.approx([0.1, 0.11], rel=1e-12)  # 2 nats, target 1: +20%, halved by 4 of 8


def test_skipped_steps_of_a_run_without_a_critic_stop_it_and_learning_rates_advance() -> None:
    parts = Parts(linear_rates(**GRPO, run__num_rollout=9, ppo__max_skipped_steps=4))
    parts.actor.outcomes = lambda rollout_id, step: step_stats(skipped=rollout_id > 0)
    with pytest.raises(NumericsError, match="4 optimizer steps of the actor in a row"):
        run(parts)
    assert steps_told_by(parts.actor.rates, 1.0) == [[0, 1], [2, 3], [4, 5]]
    assert parts.tracker.metric("train/skipped_steps") == [0.0, 2.0, 2.0]


# plans and learning rates


def test_both_roles_follow_the_plan_made_from_the_config() -> None:
    config = small(ppo__num_epochs_per_rollout=2, run__seed=5)
    parts = run(Parts(config))
    assert [rows_of(plan) for plan in parts.actor.plans] == [rows_of(plan) for plan in parts.critic.plans]
    for rollout_id, plan in enumerate(parts.actor.plans):
        expected = make_step_plan(rollout_id, np.arange(4), global_batch_size=2, num_epochs=2, seed=5, partial_step="spread")
        assert plan.rollout_id == rollout_id
        assert rows_of(plan) == rows_of(expected)


def linear_rates(**values: Value) -> Config:
    """Step s of the actor has the rate 1 - s/100, of the critic twice that: the rate tells the step."""
    return small(
        optimizer__lr=1.0, critic__lr=2.0, optimizer__lr_decay_style="linear", optimizer__lr_decay_iters=100, **values
    )  # fmt: skip


def steps_told_by(rates: list[list[float]], lr: float) -> list[list[int]]:
    return [[round(100 * (1 - rate / lr)) for rate in rollout] for rollout in rates]


def test_learning_rate_of_the_actor_starts_after_critic_only_rollouts() -> None:
    parts = run(Parts(linear_rates(run__num_rollout=4, ppo__num_critic_only_steps=2)))
    assert steps_told_by(parts.critic.rates, 2.0) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert steps_told_by(parts.actor.rates, 1.0) == [[0, 1], [2, 3]]


def test_learning_rate_is_advanced_by_skipped_steps_and_short_plans_alike() -> None:
    config = linear_rates(run__num_rollout=3, ppo__num_epochs_per_rollout=2, batch__partial_step="drop")
    parts = Parts(config)
    parts.actor.outcomes = skipping((0, 0), (0, 1), (0, 2), (0, 3))
    parts.rewards.dropped = {4}  # of rollout 1: three samples are one full step per pass
    run(parts)
    # the second pass of rollout 1 starts where it was planned to
    assert steps_told_by(parts.actor.rates, 1.0) == [[0, 1, 2, 3], [4, 6], [8, 9, 10, 11]]
    assert steps_told_by(parts.critic.rates, 2.0) == [[0, 1, 2, 3], [4, 6], [8, 9, 10, 11]]


# samples that do not train


def cut_when(cut: Callable[[int], bool]) -> Callable[[GenerateRequest], tuple[list[int], FinishReason]]:
    return lambda request: ([7, 8], FinishReason.LENGTH) if cut(request.sample_id) else ([7, 3], FinishReason.STOP)


def test_plan_samples_without_trainable_tokens_are_in_no_step() -> None:
    parts = Parts(small(run__num_rollout=1, ppo__truncation_policy="mask"))
    parts.engine.answer = cut_when(lambda sample_id: sample_id == 1)
    run(parts)
    assert sorted(row for step in rows_of(parts.actor.plans[0]) for row in step) == [0, 2, 3]
    assert [len(step) for step in rows_of(parts.actor.plans[0])] == [2, 1]
    assert len(parts.actor.batches[0].sample_ids) == 4
    assert parts.tracker.metric("rollout/num_untrainable") == [1.0]


def test_plan_rollout_without_trainable_tokens_has_empty_steps_that_count_as_skipped() -> None:
    config = small(ppo__truncation_policy="mask", ppo__num_epochs_per_rollout=2, ppo__max_skipped_steps=6)
    parts = Parts(config)
    parts.engine.answer = cut_when(lambda sample_id: True)
    for role in (parts.actor, parts.critic):
        role.outcomes = lambda rollout_id, step: step_stats(skipped=True)
    causes = "not finite, steps without trainable tokens, or steps whose samples were all rejected .--rollout-rejection.. Look at"
    with pytest.raises(NumericsError, match=f"6 optimizer steps of the actor in a row were skipped .*{causes} .*rejected_samples"):
        run(parts)
    assert [rows_of(plan) for plan in parts.actor.plans] == [[[], [], [], []]] * 2
    for plan in parts.actor.plans:
        assert [(step.pass_index, step.step_index) for step in plan.steps] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert parts.tracker.metric("train/skipped_steps") == [4.0, 4.0]
    assert [line for line in parts.journal if line.startswith("push")] == ["push 0", "push 0"]


def test_plan_less_than_one_full_step_has_empty_steps_that_count_as_skipped() -> None:
    parts = Parts(small(run__num_rollout=1, batch__partial_step="drop"))
    parts.rewards.dropped = {0, 1, 2}
    parts.actor.outcomes = parts.critic.outcomes = skipping((0, 0), (0, 1))
    run(parts)
    assert rows_of(parts.actor.plans[0]) == [[], []]
    assert parts.tracker.metric("train/skipped_steps") == [2.0]
    assert parts.tracker.metric("train/num_dropped") == [1.0]


def test_run_dropped_samples_are_left_out_and_counted() -> None:
    parts = Parts(small(batch__partial_step="drop"))
    parts.rewards.dropped = {1, 5, 6}
    run(parts)
    assert [batch.sample_ids.tolist() for batch in parts.actor.batches] == [[0, 2, 3], [4, 7]]
    assert parts.tracker.metric("rollout/num_dropped") == [1.0, 2.0]
    assert parts.tracker.metric("train/num_dropped") == [1.0, 0.0]


def _one_long_answer(request: GenerateRequest) -> tuple[list[int], FinishReason]:
    return ([7] * 28 + [3] if request.sample_id == 2 else [3]), FinishReason.STOP


@pytest.mark.parametrize(("cp_sizes", "cap", "tokens"), [((1, 1), 16, 31), ((4, 2), 16, None), ((4, 2), 15, 16)])
def test_run_sample_above_the_token_cap_is_counted_once_and_warned_of(
    cp_sizes: tuple[int, int], cap: int, tokens: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """A prompt of 2 and a response of 29 tokens; over two ranks it is padded to 32, of which each holds 16. Two epochs, two
    steps and two roles all train it: it is one sample."""
    actor, critic = cp_sizes
    ranks = {"parallel__actor_num_gpus_per_node": 4, "parallel__context_parallel_size": actor}
    own = {"critic__context_parallel_size": critic}
    limits = {"batch__use_dynamic_batch_size": True, "batch__max_tokens_per_gpu": cap, "rollout__rollout_max_response_len": 32}
    parts = Parts(small(run__num_rollout=1, ppo__num_epochs_per_rollout=2, **limits, **(ranks | own if actor > 1 else {})))
    parts.engine.answer = _one_long_answer
    with caplog.at_level(logging.WARNING, logger="slime_ppo.trainer"):
        run(parts)
    assert parts.tracker.metric("train/over_cap_samples") == [float(tokens is not None)]
    told = [message for message in caplog.messages if "--max-tokens-per-gpu" in message]
    assert len(told) == (tokens is not None)
    assert all(f"sample 2 has {tokens} tokens for one rank, more than --max-tokens-per-gpu {cap}:" in line for line in told)


def test_run_without_a_token_cap_counts_no_sample_above_it() -> None:
    parts = run(Parts(small(run__num_rollout=1)))
    assert "train/over_cap_samples" not in parts.tracker.records[0].metrics


def test_collect_aborted_answers_are_left_out_and_counted() -> None:
    parts = Parts(small(run__num_rollout=1))
    parts.engine.answer = lambda request: ([7], FinishReason.ABORT) if request.sample_id == 2 else ([3], FinishReason.STOP)
    run(parts)
    assert parts.actor.batches[0].sample_ids.tolist() == [0, 1, 3]
    assert parts.tracker.metric("rollout/num_dropped") == [1.0]


def test_collect_all_samples_dropped_raises_with_the_first_reason() -> None:
    parts = Parts(small())
    parts.rewards.dropped = {0, 1, 2, 3}
    with pytest.raises(RewardError, match="all 4 samples were dropped, nothing to train on; the first reward call returned None"):
        run(parts)


@pytest.mark.parametrize("estimator", ["grpo", "gae"])
def test_collect_process_rewards_that_the_estimator_would_not_read_stop_before_any_pass(estimator: str) -> None:
    parts = Parts(small(**(GRPO | {"ppo__advantage_estimator": estimator}), run__num_rollout=1))
    parts.rewards.process_rewards = {1: [0.0, 0.0], 2: [0.0, 0.5], 3: [1.0, 0.0]}
    if estimator == "gae":
        run(parts)
    else:
        with pytest.raises(
            RewardError, match="paid single tokens of sample 2 .*--advantage-estimator grpo reads the rewards of who"
        ):
            run(parts)
    assert ("actor log-probs" in parts.journal) == (estimator == "gae")


def test_collect_process_rewards_of_0_are_no_payment() -> None:
    parts = Parts(small(**GRPO, run__num_rollout=1))
    parts.rewards.process_rewards = {1: [0.0, 0.0]}
    assert len(run(parts).tracker.records) == 1


# limits that stop a run


def test_skipped_steps_in_a_row_stop_the_run_after_reporting_the_rollout() -> None:
    parts = Parts(small(run__num_rollout=9, ppo__max_skipped_steps=3))
    parts.critic.outcomes = skipping((1, 1), (2, 0), (2, 1))
    with pytest.raises(NumericsError, match="3 optimizer steps of the critic in a row were skipped .--max-skipped-steps"):
        run(parts)
    assert parts.tracker.metric("train/critic-skipped_steps") == [0.0, 1.0, 2.0]


def test_skipped_steps_with_a_step_between_or_of_two_roles_go_on() -> None:
    parts = Parts(small(run__num_rollout=3, ppo__max_skipped_steps=3))
    parts.actor.outcomes = skipping((0, 0), (0, 1), (1, 1), (2, 0))
    parts.critic.outcomes = skipping((0, 1), (1, 0), (2, 0), (2, 1))
    assert len(run(parts).tracker.records) == 3


def test_skipped_steps_early_stops_neither_count_nor_end_the_row() -> None:
    parts = Parts(small(run__num_rollout=9, ppo__max_skipped_steps=3))
    parts.actor.outcomes = lambda rollout_id, step: step_stats(skipped=True, early_stopped=step == 1)
    with pytest.raises(NumericsError, match="of the actor in a row"):
        run(parts)
    assert len(parts.tracker.records) == 3  # one that counts per rollout


def test_logprob_gap_that_was_not_measured_stops_nothing() -> None:
    """With --use-rollout-log-probs the engine's log-probs are the old ones."""
    parts = Parts(small(run__num_rollout=1, rollout__max_logprob_gap=1e-9))
    parts.actor.log_prob_stats.add_max("another", 1.0)
    assert len(run(parts).tracker.records) == 1


@pytest.mark.parametrize("name", ["logprob_gap_max", "logprob_gap_full_max"])
@pytest.mark.parametrize(("limit", "stops"), [(1e-3, True), (3e-3, False), (0.0, False)])
def test_logprob_gap_beyond_its_limit_stops_before_any_update_and_leaves_the_worst_tokens(
    limit: float, stops: bool, name: str, tmp_path: Path
) -> None:
    """The engine says -0.5 of every token."""
    parts = Parts(small(run__num_rollout=1, rollout__max_logprob_gap=limit, run__save=str(tmp_path)))
    parts.actor.log_prob_stats.add_max("logprob_gap_max", 1e-7)
    parts.actor.log_prob_stats.add_max(name, 2e-3)
    parts.actor.columns = {"old_log_probs": np.array([-0.5] * 5 + [-0.498] + [-0.5] * 2, np.float32)}
    file = tmp_path / "logs" / "logprob_gap.jsonl"
    if stops:
        differ = "engine and trainer differ by 0.002 in a token's log-prob, more than .* 0.001"
        worst = f"response token 1 of sample 2, '3 ' .id 3.: engine -0.5, trainer -0.498; the worst 8 are in {file}"
        with pytest.raises(NumericsError, match=f"{differ}.*{worst}"):
            run(parts)
        assert json.loads(file.read_text().splitlines()[0])["sample_id"] == 2
    else:
        run(parts)
        assert not file.exists()
    assert ("critic train" in parts.journal, "actor train" in parts.journal) == (not stops, not stops)


@pytest.mark.parametrize(("clip_fraction", "warns"), [(0.6, True), (0.5, False)])
def test_value_clip_that_holds_most_tokens_back_is_warned_of(
    clip_fraction: float, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    parts = Parts(small(run__num_rollout=1, ppo__value_clip=0.25))
    parts.critic.outcomes = lambda rollout_id, step: step_stats(value_clipfrac=clip_fraction)
    with caplog.at_level(logging.WARNING, logger="slime_ppo.trainer"):
        run(parts)
    assert [("--value-clip 0.25 on 60% of tokens" in message) for message in caplog.messages] == [True] * warns


# the coefficient of the KL


@pytest.mark.parametrize(("unit", "factor"), [("trajectory", 1.1), ("token", 0.9)])
def test_adaptive_kl_moves_once_per_rollout_that_trains_the_actor(unit: str, factor: float) -> None:
    """2 nats per trajectory, 0.5 per token, target 1: +-20%, halved by 4 trajectories of a horizon of 8 (SEMANTICS 10)."""
    config = small(
        run__num_rollout=5, ppo__num_critic_only_steps=2, ppo__kl_coef=0.1, ppo__kl_controller="adaptive",
        ppo__kl_target=1.0, ppo__kl_horizon=8, ppo__kl_target_unit=unit,
    )  # fmt: skip
    parts = Parts(config)
    parts.actor.log_prob_stats.add_mean("kl", 8.0, 16)
    parts.actor.log_prob_stats.add_mean("kl_trajectory", 8.0, 4)
    run(parts)
    expected = [0.1, 0.1, 0.1, 0.1 * factor, 0.1 * factor**2]
    assert parts.critic.betas == pytest.approx(expected, rel=1e-12)
    assert parts.tracker.metric("rollout/kl_coef") == parts.critic.betas


def test_adaptive_kl_rollout_without_trajectories_keeps_beta() -> None:
    config = small(ppo__kl_coef=0.1, ppo__kl_controller="adaptive", ppo__kl_target=1.0, ppo__kl_horizon=8)
    parts = Parts(config)
    parts.actor.log_prob_stats.add_mean("kl", 0.0, 0)
    parts.actor.log_prob_stats.add_mean("kl_trajectory", 0.0, 0)
    assert run(parts).critic.betas == [0.1, 0.1]


def test_fixed_kl_keeps_beta() -> None:
    parts = Parts(small(ppo__kl_coef=0.1))
    parts.actor.log_prob_stats.add_mean("kl", 8.0, 16)
    parts.actor.log_prob_stats.add_mean("kl_trajectory", 8.0, 4)
    assert run(parts).critic.betas == [0.1, 0.1]


# evaluation and reports


@pytest.mark.parametrize(
    ("num_rollout", "expected"),
    [
        (4, ["eval", "train", "train", "eval", "train", "train", "eval"]),
        (5, ["eval", "train", "train", "eval", "train", "train", "train", "eval"]),
        (1, ["eval", "train", "eval"]),
    ],
)
def test_evaluation_before_every_second_rollout_and_after_the_last(num_rollout: int, expected: list[str]) -> None:
    parts = run(Parts(small(run__num_rollout=num_rollout, eval__eval_interval=2), eval_sets={"heldout": 3}))
    names = {"answer held-out": "eval", "actor train": "train"}
    assert [names[line] for line in parts.journal if line in names] == expected
    evaluated = ["eval/heldout" in record.metrics for record in parts.tracker.records]
    assert evaluated == [index == num_rollout - 1 or index % 2 == 0 for index in range(num_rollout)]


def test_evaluation_of_the_only_rollout_is_reported_before_and_after_its_updates() -> None:
    metrics = run(Parts(small(run__num_rollout=1, eval__eval_interval=1), eval_sets={"heldout": 3})).tracker.records[0].metrics
    assert metrics["eval_before/heldout"] == metrics["eval/heldout"] == 1.0
    assert "rollout/num_dropped" in metrics
    two = run(Parts(small(run__num_rollout=2, eval__eval_interval=1), eval_sets={"heldout": 3})).tracker.records
    assert not [name for record in two for name in record.metrics if name.startswith("eval_before/")]


def test_evaluation_after_the_last_rollout_uses_the_new_weights() -> None:
    parts = run(Parts(small(run__num_rollout=1, eval__eval_interval=1), eval_sets={"heldout": 3}))
    end = ["wake rollout", "push 1", "offload actor", "answer held-out", "reward", "log"]
    assert parts.journal[parts.journal.index("actor train") + 1 :] == end
    assert parts.tracker.records[0].metrics["eval/heldout"] == 1.0
    assert parts.tracker.records[0].metrics["eval/heldout_response_len"] == 2.0


def test_evaluation_before_a_rollout_shares_its_weight_push() -> None:
    parts = run(Parts(small(eval__eval_interval=1), eval_sets={"heldout": 3}))
    start = parts.journal[: parts.journal.index("generate") + 1]
    assert start == [
        *("connect", "wake actor", "wake rollout", "push 0", "offload actor", "answer held-out", "reward", "generate")
    ]  # fmt: skip


def test_evaluation_is_greedy_and_training_samples_as_configured() -> None:
    config = small(
        run__num_rollout=1, eval__eval_interval=1, eval__eval_max_response_len=9, rollout__n_samples_per_prompt=2,
        rollout__rollout_temperature=0.7, rollout__rollout_max_response_len=5, rollout__rollout_top_k=-1,
        rollout__rollout_min_p=0.125,
    )  # fmt: skip
    heldout, training, again = run(Parts(config, eval_sets={"heldout": 3})).engine.requests
    assert [request.sample_id for request in again] == [request.sample_id for request in heldout]
    assert len(training) == 8 and len(heldout) == 3
    assert {(r.sampling.temperature, r.sampling.max_new_tokens, r.sampling.top_k) for r in training} == {(0.7, 5, 0)}
    assert {(r.sampling.top_p, r.sampling.min_p) for r in training} == {(1.0, 0.125)}
    assert {(r.sampling.temperature, r.sampling.max_new_tokens) for r in heldout} == {(0.0, 9)}
    assert {r.sampling.stop_token_ids for r in training + heldout} == {(3,)}
    assert not {r.seed for r in training} & {r.seed for r in heldout}


def test_run_pass_rates_come_with_several_samples_per_prompt() -> None:
    groups = small(run__num_rollout=1, rollout__n_samples_per_prompt=2, rollout__rollout_batch_size=2)
    metrics = run(Parts(groups)).tracker.records[0].metrics
    assert (metrics["passrate/pass@1"], metrics["passrate/pass@2"], metrics["rollout/cached_tokens_ratio"]) == (1.0, 1.0, 0.0)
    assert not [name for name in run(Parts(small())).tracker.records[0].metrics if name.startswith("passrate")]


def test_report_keeps_samples_at_the_interval_and_of_the_last_rollout() -> None:
    config = small(run__num_rollout=6, tracking__num_logged_samples=3, tracking__log_sample_interval=2)
    tables = run(Parts(config)).tracker.tables
    assert [(rollout_id, [sample.sample_id for sample in samples]) for rollout_id, samples in tables] == [
        (0, [0, 1, 2]),
        (2, [8, 9, 10]),
        (4, [16, 17, 18]),
        (5, [20, 21, 22]),
    ]
    assert run(Parts(small())).tracker.tables == []


def test_report_steps_are_numbered_through_the_run() -> None:
    records = run(Parts(small(run__num_rollout=3))).tracker.records
    assert [[step["step"] for step in record.steps] for record in records] == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    assert [record.rollout_id for record in records] == [0, 1, 2]


def test_report_has_the_metrics_of_every_stage_and_role() -> None:
    parts = Parts(small(run__num_rollout=1))
    parts.actor.log_prob_stats.add_mean("entropy", 6.0, 4)
    parts.critic.advantage_stats.add_mean("values", 1.0, 4)
    parts.actor.outcomes = lambda rollout_id, step: step_stats(pg_clipfrac=0.25)
    parts.critic.outcomes = lambda rollout_id, step: step_stats(value_clipfrac=0.125)
    metrics = run(parts).tracker.records[0].metrics
    expected = {
        "rollout/raw_reward": 1.0,
        "rollout/entropy": 1.5,
        "rollout/values": 0.25,
        "train/pg_clipfrac": 0.25,
        "train/critic-value_clipfrac": 0.125,
    }
    assert {name: metrics[name] for name in expected} == expected
    assert metrics["perf/tokens_per_s"] == pytest.approx(16 / metrics["perf/step_time"])  # 4 samples of 2 + 2 tokens
