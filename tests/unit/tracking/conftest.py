"""A run of four rollouts, the first of them critic only, with every metric that trackers know."""

from pathlib import Path

import pytest

from slime_ppo.tracking.base import RolloutRecord, RunInfo, SampleRecord
from slime_ppo.tracking.phrases import Phrase

_CRITIC = {
    "train/critic-value_loss": 0.092,
    "train/critic-value_clipfrac": 0.04,
    "train/critic-explained_variance": 0.63,
    "train/critic-grad_norm": 1.4,
    "train/critic-lr": 1e-3,
    "train/critic-skipped_steps": 0.0,
}
_POLICY = {
    "train/pg_loss": -0.0031,
    "train/pg_clipfrac": 0.007,
    "train/pg_clipfrac_low": 0.003,
    "train/pg_clipfrac_high": 0.004,
    "train/ppo_kl": 0.0004,
    "train/grad_norm": 0.83,
    "train/lr-pg_0": 1e-6,
    "train/skipped_steps": 0.0,
}
_ROLLOUT = {
    "rollout/raw_reward": 0.25,
    "rollout/response_len/mean": 812.4,
    "rollout/response_len/min": 3.0,
    "rollout/response_len/max": 1024.0,
    "rollout/truncated_ratio": 0.023,
    "rollout/kl": 0.1,
    "rollout/kl_trajectory": 1.6,
    "train/num_dropped": 0.0,
    "rollout/entropy": 2.5,
    "rollout/logprob_gap_mean": 8e-7,
    "rollout/logprob_gap_max": 5.1e-6,
    "rollout/ess": 0.97,
    "perf/step_time": 60.0,
}
_CRITIC_STEP = {"value_loss": 0.092, "explained_variance": 0.63, "critic_grad_norm": 1.4}
_POLICY_STEP = {"pg_loss": -0.0031, "ppo_kl": 0.0004, "pg_clipfrac": 0.007, "entropy": 0.41, "grad_norm": 0.83, "lr": 1e-6}
_PHASES = ("generate", "reward", "log-probs", "values", "critic train", "actor train", "weight sync", "wake", "offload", "other")


def make_record(rollout_id: int, *, trains_actor: bool = True) -> RolloutRecord:
    metrics = _ROLLOUT | _CRITIC | (_POLICY if trains_actor else {})
    metrics["rollout/raw_reward"] = 0.25 + 0.018 * rollout_id
    if rollout_id % 2 == 0:
        metrics |= {
            "eval/math": 0.3 + 0.1 * rollout_id,
            "eval/math_response_len": 9.0,
            "eval/code": 0.5,
            "eval/code_response_len": 7.0,
        }
    step = {"step": float(rollout_id)} | (_POLICY_STEP if trains_actor else {}) | _CRITIC_STEP
    phases = {name: 2.5 * (index + 1) for index, name in enumerate(_PHASES)}
    phrases = (Phrase("so happy", 0.2 * (rollout_id + 1)), Phrase("a day", 1 / 3))
    return RolloutRecord(rollout_id, metrics, (step,), phases, phrases)


def make_sample(rollout_id: int, sample_id: int, *, tokens: tuple[str, ...] = (" a", " great", "\n", "day")) -> SampleRecord:
    column = tuple(0.1 * (i + 1) for i in range(len(tokens)))
    return SampleRecord(
        rollout_id=rollout_id,
        sample_id=sample_id,
        prompt="It was",
        response="".join(tokens),
        reward=0.62,
        finish="length",
        tokens=tokens,
        log_probs=tuple(-x for x in column),
        ref_log_probs=tuple(-2 * x for x in column),
        values=column,
        advantages=column,
        returns=column,
        loss_mask=tuple(i != 2 for i in range(len(tokens))),
        kind="train",
    )


@pytest.fixture
def run(tmp_path: Path) -> RunInfo:
    return RunInfo("A small run", tmp_path, 4, "ppo:\n  gamma: 1.0\n", ("A lexicon reward is easily flattered.",))


@pytest.fixture
def records() -> tuple[RolloutRecord, ...]:
    return tuple(make_record(rollout_id, trains_actor=rollout_id > 0) for rollout_id in range(4))


@pytest.fixture
def samples() -> tuple[SampleRecord, ...]:
    answer = SampleRecord(3, 900, "He had", " won", 0.57, "stop", (" won",), (), (), (), (), (), (), "eval", "math")
    return (*(make_sample(rollout_id, 10 * rollout_id) for rollout_id in range(4)), answer)
