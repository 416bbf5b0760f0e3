"""The training loop with rollouts in files: what it keeps of each, and that it trains on files as on an engine's answers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime_ppo.config.fields import Value
from slime_ppo.config.root import Config
from slime_ppo.errors import NumericsError
from slime_ppo.rollout.dump import DumpWriter, read_dump
from slime_ppo.rollout_source import DumpedRollouts
from slime_ppo.tracking.clock import RunClock
from slime_ppo.trainer import PpoTrainer
from slime_ppo.types.stats import Stats
from tests.helpers.configs import make_config
from tests.helpers.rollout_samples import assert_same
from tests.helpers.trainer_parts import CountingPrompts, Parts

# of four samples of two tokens
COLUMNS = {"old_log_probs": np.full(8, -0.5, np.float32), "advantages": np.arange(8, dtype=np.float32)}


def small(**values: Value) -> Config:
    """Two rollouts of four prompts, in two steps of two."""
    defaults: dict[str, Value] = {
        "run__num_rollout": 2,
        "model__save_hf": False,
        "rollout__rollout_batch_size": 4,
        "batch__global_batch_size": 2,
        "tracking__num_logged_samples": 0,
    }
    return make_config(**(defaults | values))


def keeping(where: Path, *, columns: Mapping[str, np.ndarray] = COLUMNS, **values: Value) -> Parts:
    """A run that keeps its rollouts."""
    parts = Parts(small(**values), dumps=DumpWriter(str(where), "", {}))
    parts.actor.columns = columns
    return parts


def run(parts: Parts) -> None:
    PpoTrainer(parts.config, parts.trainer_parts(), parts.progress).run()


def test_run_keeps_samples_columns_plan_rates_and_beta_of_every_rollout(tmp_path: Path) -> None:
    kl: dict[str, Value] = {"ppo__kl_controller": "adaptive", "ppo__kl_target": 1.0, "ppo__kl_horizon": 8, "ppo__kl_coef": 0.5}
    parts = keeping(tmp_path, ppo__num_critic_only_steps=1, critic__lr=0.25, **kl)
    parts.actor.log_prob_stats.add_mean("kl_trajectory", 20.0, 4)
    run(parts)
    for rollout_id in range(2):
        dump = read_dump(tmp_path / f"rollout_{rollout_id:07}.npz")
        training = dump.training
        assert training is not None
        assert [sample.reward for sample in dump.samples] == [1.0] * 4
        assert training.batch.advantages is not None and training.batch.advantages.tolist() == list(range(8))
        assert_same(training.plan, parts.critic.plans[rollout_id])
        assert training.learning_rates["critic"] == [0.25, 0.25]
        assert training.kl_coef == parts.critic.betas[rollout_id]
        assert ("actor" in training.learning_rates) is (rollout_id == 1)
    assert parts.journal.count("actor train") == 1


def test_run_that_fails_in_training_leaves_what_the_steps_started_from(tmp_path: Path) -> None:
    parts = keeping(tmp_path)

    def fails(rollout_id: int, step: int) -> Stats:
        raise NumericsError("planted")

    parts.critic.outcomes = fails
    with pytest.raises(NumericsError, match="planted"):
        run(parts)
    assert read_dump(tmp_path / "rollout_0000000.npz").training is not None


def test_run_that_fails_in_scoring_leaves_the_samples(tmp_path: Path) -> None:
    parts = keeping(tmp_path, rollout__max_logprob_gap=0.1, run__save=str(tmp_path))
    parts.actor.log_prob_stats.add_max("logprob_gap_max", 0.2)
    with pytest.raises(NumericsError, match="--max-logprob-gap"):
        run(parts)
    dump = read_dump(tmp_path / "rollout_0000000.npz")
    assert dump.training is None and len(dump.samples) == 4


def test_run_on_files_trains_as_the_run_that_made_them_and_asks_no_engine(tmp_path: Path) -> None:
    made = keeping(tmp_path)
    run(made)
    prompts: Any = CountingPrompts()
    again = Parts(small(), rollouts=DumpedRollouts(str(tmp_path), prompts, num_prompts=4, clock=RunClock()))
    run(again)
    of_engine = ("connect", "push", "generate", "reward")
    assert [line for line in again.journal if line.startswith(of_engine)] == [] and again.engine.requests == []
    for role, other in ((again.actor, made.actor), (again.critic, made.critic)):
        assert_same(role.plans, other.plans)
        assert role.rates == other.rates and role.betas == other.betas
    assert_same(again.actor.batches, made.actor.batches)
    for name in ("rollout/raw_reward", "rollout/cached_tokens_ratio", "train/skipped_steps"):
        assert again.tracker.metric(name) == made.tracker.metric(name)
    assert prompts.drawn == made.prompts.drawn == 8
