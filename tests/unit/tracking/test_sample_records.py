"""Samples as the viewer gets them: each with its own part of the batch's columns."""

import numpy as np
import pytest

from slime_ppo.tracking.sample_records import eval_records, training_records
from slime_ppo.types.rollout_batch import RolloutBatch
from slime_ppo.types.sample import FinishReason, Prompt, Sample, one_version


def make_sample(sample_id: int, ids: list[int], finish: FinishReason, reward: float | None) -> Sample:
    return Sample(
        sample_id=sample_id,
        group_id=sample_id,
        trajectory_id=sample_id,
        prompt=Prompt(0, f"prompt {sample_id}", np.array([5], np.int32)),
        response_ids=np.array(ids, np.int32),
        response_text=f"response {sample_id}",
        rollout_log_probs=np.full(len(ids), -0.5, np.float32),
        support=None,
        loss_mask=np.array([i != 9 for i in ids]),
        finish=finish,
        weight_versions=one_version(0, 2),
        reward=reward,
    )


SAMPLES = [make_sample(4, [7, 9], FinishReason.LENGTH, 0.5), make_sample(6, [1, 2, 3], FinishReason.STOP, -0.25)]


def spelled(ids: np.ndarray) -> list[str]:
    return [f"<{i}>" for i in ids]


def test_training_records_each_sample_has_its_own_tokens_of_every_column() -> None:
    batch = RolloutBatch.from_samples(3, SAMPLES)
    names = ("old_log_probs", "ref_log_probs", "values", "returns", "advantages")
    columns = {name: np.arange(5, dtype=np.float32) + 10 * index for index, name in enumerate(names)}
    first, second = training_records(SAMPLES, batch.with_columns(**columns), spelled)
    assert (second.rollout_id, second.sample_id, second.prompt, second.response) == (3, 6, "prompt 6", "response 6")
    assert (second.reward, second.finish, second.kind) == (-0.25, "stop", "train")
    assert second.tokens == ("<1>", "<2>", "<3>")
    assert second.log_probs == (2.0, 3.0, 4.0)
    assert second.ref_log_probs == (12.0, 13.0, 14.0)
    assert second.values == (22.0, 23.0, 24.0)
    assert second.returns == (32.0, 33.0, 34.0)
    assert second.advantages == (42.0, 43.0, 44.0)
    assert (first.finish, first.values, first.loss_mask) == ("length", (20.0, 21.0), (True, False))


def test_training_records_column_that_was_not_computed_is_empty() -> None:
    batch = RolloutBatch.from_samples(3, SAMPLES).with_columns(old_log_probs=np.zeros(5, np.float32))
    assert training_records(SAMPLES, batch, spelled)[0].ref_log_probs == ()


@pytest.mark.parametrize(("reward", "shown"), [(0.75, 0.75), (None, 0.0)])
def test_eval_records_have_data_set_texts_and_reward_and_nothing_per_token(reward: float | None, shown: float) -> None:
    [record] = eval_records(8, "math", [make_sample(4, [7, 9], FinishReason.STOP, reward)], spelled)
    assert (record.rollout_id, record.sample_id, record.reward, record.kind) == (8, 4, shown, "eval")
    assert record.data_set == "math"
    assert record.tokens == ("<7>", "<9>")
    assert record.log_probs == record.values == record.advantages == record.returns == record.loss_mask == ()
