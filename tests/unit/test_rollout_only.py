"""The loop that generates and trains nothing, with parts that write down what it does with them."""

from pathlib import Path

from slime_ppo.config.fields import Value
from slime_ppo.rollout.dump import DumpWriter, read_dump
from slime_ppo.rollout_only import RolloutOnly
from tests.helpers.configs import make_config
from tests.helpers.trainer_parts import Parts


def run(
    tmp_path: Path, *, eval_sets: dict[str, int] | None = None, dropped: frozenset[int] = frozenset(), **values: Value
) -> Parts:
    settings: dict[str, Value] = {"run__num_rollout": 3, "rollout__rollout_batch_size": 4, "debug__debug_rollout_only": True}
    parts = Parts(make_config(**(settings | values)), eval_sets or {}, dumps=DumpWriter(str(tmp_path), "", {}))
    parts.rewards.dropped |= dropped
    loop = parts.rollout_only()
    loop.run()
    assert isinstance(loop, RolloutOnly)
    return parts


def test_run_pushes_the_folder_once_and_asks_no_trainer(tmp_path: Path) -> None:
    parts = run(tmp_path)
    assert parts.journal == ["connect", "push 0", *["generate", "reward", "log"] * 3]


def test_run_reports_rewards_lengths_and_samples_and_keeps_the_rollouts(tmp_path: Path) -> None:
    parts = run(tmp_path, tracking__num_logged_samples=2, tracking__log_sample_interval=2)
    assert parts.tracker.metric("rollout/raw_reward") == [1.0] * 3
    assert parts.tracker.metric("rollout/num_dropped") == [0.0] * 3
    assert all("train/loss" not in record.metrics and record.steps == () for record in parts.tracker.records)
    assert [(rollout_id, [one.sample_id for one in table]) for rollout_id, table in parts.tracker.tables] == [
        (0, [0, 1]),
        (2, [8, 9]),
    ]
    assert parts.tracker.tables[0][1][0].log_probs == ()
    dump = read_dump(tmp_path / "rollout_0000002.npz")
    assert dump.training is None and [sample.sample_id for sample in dump.samples] == [8, 9, 10, 11]
    assert {sample.reward for sample in dump.samples} == {1.0}


def test_run_counts_samples_without_a_reward_and_keeps_the_others(tmp_path: Path) -> None:
    parts = run(tmp_path, dropped=frozenset({1, 2, 8}))
    assert parts.tracker.metric("rollout/num_dropped") == [2.0, 0.0, 1.0]
    assert [sample.sample_id for sample in read_dump(tmp_path / "rollout_0000000.npz").samples] == [0, 3]


def test_run_evaluates_when_it_is_due_and_at_the_last_rollout(tmp_path: Path) -> None:
    parts = run(tmp_path, eval_sets={"math": 2}, run__num_rollout=4, eval__eval_interval=2, eval__eval_prompt_data="held.jsonl")
    assert ["eval/math" in record.metrics for record in parts.tracker.records] == [True, False, True, True]
    assert parts.journal.count("push 0") == 1
