"""Columns of a rollout: lengths and types are checked, rows are selected, parts of ranks come together in sample order."""

import re

import numpy as np
import pytest

from slime_ppo.errors import DataError
from slime_ppo.types.rollout_batch import COLUMNS, ColumnPart, RolloutBatch, filled
from slime_ppo.types.sample import FinishReason, Prompt, Sample, Support, one_version


def _sample(sample_id: int, prompt: list[int], response: list[int], **changes: object) -> Sample:
    values: dict = {
        "sample_id": sample_id,
        "group_id": sample_id,
        "trajectory_id": sample_id,
        "prompt": Prompt(index=0, text="", token_ids=np.array(prompt, np.int32)),
        "response_ids": np.array(response, np.int32),
        "response_text": "",
        "rollout_log_probs": -np.arange(1.0, len(response) + 1, dtype=np.float32) - sample_id,
        "support": None,
        "loss_mask": np.array([i != 1 for i in range(len(response))]),
        "finish": FinishReason.STOP,
        "weight_versions": one_version(0, len(response)),
        "reward": float(sample_id),
    }
    return Sample(**(values | changes))


@pytest.fixture
def batch() -> RolloutBatch:
    """Prompts of 3, 2, 1 tokens, responses of 2, 4, 1."""
    samples = [
        _sample(7, [1, 2, 3], [4, 5], finish=FinishReason.LENGTH),
        _sample(8, [6, 7], [8, 9, 10, 11]),
        _sample(9, [12], [13]),
    ]
    return RolloutBatch.from_samples(3, samples)


def test_from_samples_packs_in_sample_order_with_declared_types(batch: RolloutBatch) -> None:
    assert batch.prompt_ids.tolist() == [1, 2, 3, 6, 7, 12]
    assert batch.response_ids.tolist() == [4, 5, 8, 9, 10, 11, 13]
    assert batch.loss_mask.tolist() == [True, False, True, False, True, True, True]
    assert batch.finish.tolist() == [1, 0, 0]
    assert batch.total_lens.tolist() == [5, 6, 2]
    assert batch.trainable_tokens.tolist() == [1, 3, 1]
    for name, column in COLUMNS.items():
        array = getattr(batch, name)
        assert array is None or array.dtype == column.dtype, name


def test_select_any_order_takes_each_samples_own_entries(batch: RolloutBatch) -> None:
    chosen = batch.select([2, 0])
    assert chosen.sample_ids.tolist() == [9, 7]
    assert chosen.prompt_ids.tolist() == [12, 1, 2, 3]
    assert chosen.response_ids.tolist() == [13, 4, 5]
    assert chosen.rollout_log_probs.tolist() == [-10, -8, -9]
    assert chosen.values is None and chosen.rollout_id == 3


def test_select_nothing_is_an_empty_batch(batch: RolloutBatch) -> None:
    empty = batch.select([])
    assert empty.num_samples == 0 and empty.response_ids.shape == (0,) and empty.trainable_tokens.shape == (0,)


def test_select_supports_follow_their_tokens() -> None:
    supports = [
        Support(np.array([4, 1, 5], np.int32), np.array([2, 1], np.int32)),
        Support(np.array([9], np.int32), np.array([1], np.int32)),
    ]
    samples = [_sample(0, [1], [4, 5], support=supports[0]), _sample(1, [1], [9], support=supports[1])]
    chosen = RolloutBatch.from_samples(0, samples).select([1, 0])
    assert filled(chosen.support_ids).tolist() == [9, 4, 1, 5] and filled(chosen.support_counts).tolist() == [1, 2, 1]


def test_with_parts_ranks_in_any_order_give_sample_order(batch: RolloutBatch) -> None:
    later = ColumnPart(
        np.array([2, 0]), {"values": np.array([7, 1, 2], np.float32), "bootstrap_values": np.array([30, 10], np.float32)}
    )
    first = ColumnPart(
        np.array([1]), {"values": np.array([3, 4, 5, 6], np.float32), "bootstrap_values": np.array([20], np.float32)}
    )
    merged = batch.with_parts([later, None, first])
    assert filled(merged.values).tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert filled(merged.bootstrap_values).tolist() == [10, 20, 30]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([([0, 1], 6)], r"values of rollout 3: ranks returned 2 samples \(2 different\) for 3"),
        ([([0, 1], 6), ([1], 4)], r"ranks returned 3 samples \(2 different\) for 3"),
        ([([0, 1, 2], 6)], "ranks returned 6 entries for 7"),
    ],
)
def test_with_parts_missing_doubled_or_short_parts_are_data_errors(batch: RolloutBatch, parts: list, message: str) -> None:
    made = [ColumnPart(np.array(rows), {"values": np.zeros(count, np.float32)}) for rows, count in parts]
    with pytest.raises(DataError, match=message):
        batch.with_parts(made)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (
            {"values": np.zeros(6, np.float32)},
            r"column values of rollout 3 has shape \(6,\), expected \(7,\): one entry per response_token",
        ),
        ({"values": np.zeros(7)}, "column values of rollout 3 is float64, expected float32"),
        ({"rewards": np.zeros((3, 1), np.float32)}, r"has shape \(3, 1\), expected \(3,\): one entry per sample"),
        ({"support_ids": np.zeros(1, np.int32)}, "support_ids without support_counts"),
    ],
)
def test_with_columns_wrong_shape_or_type_is_a_data_error(batch: RolloutBatch, column: dict, message: str) -> None:
    with pytest.raises(DataError, match=message):
        batch.with_columns(**column)


def test_from_samples_without_reward_names_the_samples() -> None:
    with pytest.raises(DataError, match="sample 1 of rollout 0 has no reward"):
        RolloutBatch.from_samples(0, [_sample(0, [1], [2]), _sample(1, [1], [2], reward=None)])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss_mask": np.ones(2, bool)}, "sample 1 of rollout 0 has 1 response tokens, but {'loss_mask': 2}"),
        ({"rollout_log_probs": np.zeros(0, np.float32)}, "but {'rollout_log_probs': 0}"),
        ({"reward": float("nan")}, "sample 1 of rollout 0 has reward nan, expected a number that is finite in float32"),
        ({"reward": 1e39}, "has reward 1e+39"),
        ({"finish": FinishReason.ABORT}, "sample 1 of rollout 0 was aborted, so it must not train"),
        ({"response_ids": np.zeros(0, np.int32)}, "has 1 prompt and 0 response tokens"),
        ({"process_rewards": np.zeros(2, np.float32)}, "but {'process_rewards': 2}"),
    ],
)
def test_from_samples_bad_sample_is_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        RolloutBatch.from_samples(0, [_sample(0, [1], [2]), _sample(1, [1], [2], **changes)])


@pytest.mark.parametrize(
    ("changes", "found", "expected"),
    [
        ({"reward": 0.25}, "reward 0.25", "0.0"),
        ({"group_id": 3}, "group_id 3", "0"),
        ({"finish": FinishReason.LENGTH}, "finish length", "stop"),
    ],
)
def test_from_samples_parts_of_a_trajectory_that_differ_are_named(changes: dict[str, object], found: str, expected: str) -> None:
    alike = {"trajectory_id": 7, "group_id": 0, "reward": 0.0}
    parts = [_sample(4, [1], [2], **alike), _sample(5, [1, 2], [2, 3], **alike)]
    assert RolloutBatch.from_samples(0, parts).trajectory_ids.tolist() == [7, 7]
    message = f"sample 6 of rollout 0 has {found}, but sample 4, another part of trajectory 7, has {expected}: all parts"
    with pytest.raises(DataError, match=re.escape(message)):
        RolloutBatch.from_samples(0, [*parts, _sample(6, [1], [2], **(alike | changes))])


def test_from_samples_support_of_some_samples_only_names_one_without() -> None:
    support = Support(np.array([2], np.int32), np.array([1], np.int32))
    with pytest.raises(DataError, match="sample 1 of rollout 0 has no recorded support"):
        RolloutBatch.from_samples(0, [_sample(0, [1], [2], support=support), _sample(1, [1], [2])])


def test_from_samples_full_log_probs_are_a_column_and_missing_ones_name_the_sample() -> None:
    def full(*values: float) -> np.ndarray:
        return np.array(values, np.float32)

    samples = [_sample(0, [1], [2, 3], full_log_probs=full(-2, -4)), _sample(1, [1], [2], full_log_probs=full(-3))]
    assert filled(RolloutBatch.from_samples(0, samples).rollout_full_log_probs).tolist() == [-2, -4, -3]
    with pytest.raises(DataError, match="sample 1 of rollout 0 has no log-probs over the full vocabulary while others have"):
        RolloutBatch.from_samples(0, [samples[0], _sample(1, [1], [2])])
    with pytest.raises(DataError, match=r"sample 0 .* 2 response tokens, but \{'full_log_probs': 1\}"):
        RolloutBatch.from_samples(0, [_sample(0, [1], [2, 3], full_log_probs=full(-2))])


def test_from_samples_process_rewards_of_some_samples_are_zero_for_the_others() -> None:
    paid = _sample(1, [1], [2, 3], process_rewards=np.array([0.5, -1.0], np.float32))
    packed = RolloutBatch.from_samples(0, [_sample(0, [1], [2]), paid, _sample(2, [1], [2, 3])])
    assert filled(packed.process_rewards).tolist() == [0, 0.5, -1, 0, 0]
    assert RolloutBatch.from_samples(0, [_sample(0, [1], [2])]).process_rewards is None


def test_from_samples_process_reward_without_a_trainable_token_to_credit_names_sample_and_tokens() -> None:
    early = np.array([0.0, 0.5, 1.0], np.float32)
    mask = np.array([False, False, True])
    with pytest.raises(DataError, match=r"sample 4 of rollout 0 has process reward 0.5 at response token 1, but .* token is 2"):
        RolloutBatch.from_samples(0, [_sample(4, [1], [2, 3, 4], process_rewards=early, loss_mask=mask)])
    untrainable = _sample(4, [1], [2, 3, 4], process_rewards=early, loss_mask=np.zeros(3, bool))
    assert RolloutBatch.from_samples(0, [untrainable]).num_samples == 1


def test_kept_mask_leaves_out_every_token_of_rejected_samples(batch: RolloutBatch) -> None:
    assert batch.kept_mask.tolist() == batch.loss_mask.tolist() and batch.kept_tokens.tolist() == [1, 3, 1]
    rejecting = batch.with_columns(rejected=np.array([False, True, False]))
    assert rejecting.kept_mask.tolist() == [True, False, False, False, False, False, True]
    assert rejecting.kept_tokens.tolist() == [1, 0, 1]
    assert rejecting.select([1, 2]).kept_mask.tolist() == [False, False, False, False, True]


def test_kl_log_probs_prefer_those_over_the_full_vocabulary(batch: RolloutBatch) -> None:
    with pytest.raises(DataError, match="no earlier stage has filled in"):
        _ = batch.kl_log_probs
    old, full = np.full(7, 1, np.float32), np.full(7, 2, np.float32)
    assert batch.with_columns(old_log_probs=old).kl_log_probs.tolist() == [1] * 7
    assert batch.with_columns(old_log_probs=old, old_full_log_probs=full).kl_log_probs.tolist() == [2] * 7


def test_every_array_field_is_a_declared_column(batch: RolloutBatch) -> None:
    assert set(COLUMNS) == set(RolloutBatch.__dataclass_fields__) - {"rollout_id"}
