"""A small rollout with everything a sample may have, and how two rollouts are compared: to the bit."""

from collections.abc import Sequence
from dataclasses import is_dataclass

import numpy as np

from slime_ppo.config.roles import RoleName
from slime_ppo.rollout.dump import TrainingDump
from slime_ppo.types.rollout_batch import RolloutBatch
from slime_ppo.types.sample import FinishReason, Prompt, Sample, Support, VersionSpan, one_version
from slime_ppo.types.step_plan import Step, StepPlan


def make_samples() -> list[Sample]:
    """Four samples of 3, 2, 4 and 1 response tokens, two of which share a prompt."""
    prompts = [
        Prompt(7, "The door was", np.array([4, 5, 6], np.int32), label="open", metadata={"level": 2}),
        Prompt(3, "A cat", np.array([7, 8], np.int32)),
    ]
    rng = np.random.default_rng(0)
    samples = []
    for row, length in enumerate((3, 2, 4, 1)):
        samples.append(
            Sample(
                sample_id=10 + row,
                group_id=row // 2,
                trajectory_id=10 + row,
                prompt=prompts[row // 2],
                response_ids=rng.integers(4, 90, length).astype(np.int32),
                response_text=f"answer {row}",
                rollout_log_probs=-rng.random(length, np.float32),
                support=None if row else Support(np.array([1, 2, 3, 4, 5], np.int32), np.array([2, 1, 2], np.int32)),
                loss_mask=np.arange(length) != 1,
                finish=FinishReason.STOP if row % 2 else FinishReason.LENGTH,
                weight_versions=(VersionSpan(1, 0, 1), VersionSpan(2, 1, 4)) if row == 2 else one_version(1, length),
                num_cached_tokens=row,
                full_log_probs=-rng.random(length, np.float32) if row == 1 else None,
                reward=0.1 * (row + 1),
                reward_cut=row == 2,
                process_rewards=np.full(length, 0.5, np.float32) if row == 3 else None,
            )
        )
    return samples


def plain_samples() -> list[Sample]:
    """The same without supports and the like, as one engine gives them."""
    return [
        Sample(**{**vars(sample), "support": None, "full_log_probs": None, "process_rewards": None}) for sample in make_samples()
    ]


def make_training(samples: Sequence[Sample], rollout_id: int = 3) -> TrainingDump:
    """Some columns, two passes of steps of unequal size."""
    batch = RolloutBatch.from_samples(rollout_id, samples)
    tokens = np.arange(len(batch.response_ids), dtype=np.float32)
    batch = batch.with_columns(
        old_log_probs=batch.rollout_log_probs + np.float32(1e-6) * tokens,
        values=tokens / 10,
        advantages=1 - tokens,
        rejected=np.arange(batch.num_samples) == 1,
    )
    parts = (np.array([2, 0]), np.array([3]), np.zeros(0, np.int64), np.array([1, 2, 3]))
    steps = tuple(Step(number // 2, number % 2, rows) for number, rows in enumerate(parts))
    rates: dict[RoleName, list[float]] = {"critic": [1e-3] * 4, "actor": [1e-4, 2e-4, 1 / 3, 0.1]}
    return TrainingDump(batch, StepPlan(rollout_id, steps, num_dropped=2), rates, kl_coef=0.1 + 0.2)


def assert_same_samples(found: Sequence[Sample], expected: Sequence[Sample]) -> None:
    assert_same(list(found), list(expected))


def assert_same(found: object, expected: object) -> None:
    """Equal values of equal types, arrays in them too."""
    if isinstance(expected, np.ndarray):
        assert isinstance(found, np.ndarray) and found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)
    elif isinstance(expected, dict):
        assert isinstance(found, dict) and found.keys() == expected.keys()
        for key, value in expected.items():
            assert_same(found[key], value)
    elif isinstance(expected, (list, tuple)):
        assert isinstance(found, (list, tuple))
        for own, other in zip(found, expected, strict=True):
            assert_same(own, other)
    elif is_dataclass(expected) and not isinstance(expected, type):
        assert type(found) is type(expected)
        assert_same(vars(found), vars(expected))
    else:
        assert type(found) is type(expected) and found == expected
