"""Packing against positions worked out by hand: response token i is predicted at sequence position P + i - 1."""

import numpy as np
import pytest
import torch

from slime_ppo.data.pack import pack_micro_batch
from slime_ppo.types.micro_batch import MicroBatch
from slime_ppo.types.rollout_batch import RolloutBatch

CPU = torch.device("cpu")


def _batch() -> RolloutBatch:
    """Prompts [1 2 3], [4], [5 6]; responses [10 11], [12 13 14], [15]."""
    return RolloutBatch(
        rollout_id=0,
        sample_ids=np.arange(3),
        group_ids=np.arange(3),
        trajectory_ids=np.arange(3),
        prompt_lens=np.array([3, 1, 2]),
        response_lens=np.array([2, 3, 1]),
        finish=np.zeros(3, np.int8),
        rewards=np.zeros(3, np.float32),
        prompt_ids=np.array([1, 2, 3, 4, 5, 6], np.int32),
        response_ids=np.array([10, 11, 12, 13, 14, 15], np.int32),
        loss_mask=np.ones(6, np.bool_),
        rollout_log_probs=np.zeros(6, np.float32),
    )


def _pack(rows: list[int], multiple: int) -> MicroBatch:
    return pack_micro_batch(_batch(), np.array(rows, np.int64), multiple=multiple, device=CPU)


def test_pack_two_samples_positions_are_those_before_each_response_token() -> None:
    """Row 1 then row 0: 4 12 13 14 | 1 2 3 10 11."""
    packed = _pack([1, 0], 1)
    assert packed.tokens.tolist() == [4, 12, 13, 14, 1, 2, 3, 10, 11]
    assert packed.cu_seqlens.tolist() == [0, 4, 9] and packed.cu_seqlens.dtype == torch.int32
    assert packed.max_seqlen == 5
    assert packed.positions.tolist() == [0, 1, 2, 6, 7]
    assert packed.last_positions.tolist() == [3, 8]
    assert packed.rows.tolist() == [1, 0] and packed.batch.sample_ids.tolist() == [1, 0]


@pytest.mark.parametrize(("multiple", "total", "longest"), [(2, 10, 6), (4, 12, 8), (9, 9, 5)])
def test_pack_padding_extends_the_last_sequence_and_moves_no_position(multiple: int, total: int, longest: int) -> None:
    packed = _pack([1, 0], multiple)
    assert len(packed.tokens) == total and packed.cu_seqlens.tolist() == [0, 4, total]
    assert packed.max_seqlen == longest
    assert packed.tokens[9:].tolist() == [0] * (total - 9)
    assert packed.positions.tolist() == [0, 1, 2, 6, 7] and packed.last_positions.tolist() == [3, 8]


@pytest.mark.parametrize("multiple", [1, 2, 4])
def test_pack_empty_micro_batch_is_a_few_tokens_without_a_position(multiple: int) -> None:
    packed = _pack([], multiple)
    assert packed.tokens.tolist() == [0] * multiple
    assert packed.cu_seqlens.tolist() == [0, multiple] and packed.max_seqlen == multiple
    assert packed.positions.shape == (0,) and packed.last_positions.shape == (0,)
    assert packed.positions.dtype == torch.int64 and packed.column("loss_mask").shape == (0,)


def test_pack_positions_predict_the_response_tokens_at_the_next_place() -> None:
    packed = _pack([2, 0, 1], 4)
    assert packed.tokens[packed.positions + 1].tolist() == packed.batch.response_ids.tolist()
