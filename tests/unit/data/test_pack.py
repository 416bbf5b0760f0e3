"""Packing against positions worked out by hand: response token i is predicted at sequence position P + i - 1."""

import numpy as np
import pytest
import torch

from slime_ppo.data.pack import ContextRank, pack_micro_batch
from slime_ppo.types.micro_batch import MicroBatch
from slime_ppo.types.rollout_batch import RolloutBatch, filled

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
    return pack_micro_batch(_batch(), np.array(rows, np.int64), multiple=multiple, device=CPU, context=None)


def test_pack_two_samples_positions_are_those_before_each_response_token() -> None:
    """Row 1 then row 0: 4 12 13 14 | 1 2 3 10 11."""
    packed = _pack([1, 0], 1)
    assert packed.tokens.tolist() == [4, 12, 13, 14, 1, 2, 3, 10, 11]
    assert packed.cu_seqlens.tolist() == [0, 4, 9] and packed.cu_seqlens.dtype == torch.int32
    assert packed.max_seqlen == 5
    assert packed.positions.tolist() == [0, 1, 2, 6, 7]
    assert packed.last_positions.tolist() == [3, 8]
    assert packed.rows.tolist() == [1, 0] and packed.batch.sample_ids.tolist() == [1, 0]


@pytest.mark.parametrize(("multiple", "total", "longest"), [(2, 10, 5), (4, 12, 5), (9, 9, 5), (16, 16, 7)])
def test_pack_padding_is_a_last_sequence_and_moves_no_position(multiple: int, total: int, longest: int) -> None:
    packed = _pack([1, 0], multiple)
    assert len(packed.tokens) == total and packed.cu_seqlens.tolist() == [0, 4, 9, *([total] if total > 9 else [])]
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


def _of_lengths(lens: list[tuple[int, int]]) -> RolloutBatch:
    """Samples of these (P, R); token ids count through prompts from 1 and responses from 10,001, so that each is found again."""
    prompt_lens, response_lens = np.array(lens, np.int64).reshape(-1, 2).T.copy()
    num, tokens = len(lens), int(response_lens.sum())
    counts = (np.arange(tokens) % 3).astype(np.int32)
    return RolloutBatch(
        rollout_id=0,
        sample_ids=np.arange(num),
        group_ids=np.arange(num),
        trajectory_ids=np.arange(num),
        prompt_lens=prompt_lens,
        response_lens=response_lens,
        finish=np.zeros(num, np.int8),
        rewards=np.zeros(num, np.float32),
        prompt_ids=(1 + np.arange(int(prompt_lens.sum()))).astype(np.int32),
        response_ids=(10_001 + np.arange(tokens)).astype(np.int32),
        loss_mask=np.arange(tokens) % 5 > 0,
        rollout_log_probs=np.arange(tokens).astype(np.float32),
        support_counts=counts,
        support_ids=np.repeat(np.arange(tokens), counts).astype(np.int32),
    )


def _shares(batch: RolloutBatch, rows: np.ndarray, *, cp_size: int, multiple: int) -> list[MicroBatch]:
    return [
        pack_micro_batch(batch, rows, multiple=multiple, device=CPU, context=ContextRank(cp_size, rank)) for rank in range(cp_size)
    ]


@pytest.mark.parametrize("cp_size", [2, 3, 4])
@pytest.mark.parametrize("multiple", [1, 2, 3, 4])
def test_pack_share_every_length_puts_each_token_on_one_rank_where_its_positions_say(cp_size: int, multiple: int) -> None:
    """All samples in one pack, and each alone: the ranks' shares laid back by hand are the samples and their padding."""
    batch = _of_lengths([(p, r) for p in (1, 2 * cp_size + 1) for r in range(1, (2 * cp_size) ** 2 + 9)])
    rng = np.random.default_rng(cp_size)
    alone = [np.array([row]) for row in range(batch.num_samples)]
    for rows in [rng.permutation(batch.num_samples), *(alone if multiple == 4 else [])]:
        shares = _shares(batch, rows, cp_size=cp_size, multiple=multiple)
        chosen, starts = batch.select(rows), shares[0].cu_seqlens.tolist()
        whole = np.full(starts[-1], -1)
        for rank, share in enumerate(shares):
            assert len(share.tokens) == starts[-1] // cp_size and len(share.tokens) % multiple == 0
            assert share.cu_seqlens.tolist() == starts and share.max_seqlen == max(np.diff(starts))
            at = 0
            for begin, end in zip(starts, starts[1:], strict=False):
                chunk, rest = divmod(end - begin, 2 * cp_size)
                assert rest == 0
                for number in (rank, 2 * cp_size - 1 - rank):
                    whole[begin + number * chunk : begin + (number + 1) * chunk] = share.tokens[at : at + chunk]
                    at += chunk
        prompt_at, response_at = chosen.offsets("prompt_token"), chosen.offsets("response_token")
        for row in range(len(rows)):
            ids = np.concatenate(
                (
                    chosen.prompt_ids[prompt_at[row] : prompt_at[row + 1]],
                    chosen.response_ids[response_at[row] : response_at[row + 1]],
                )
            )
            sequence = whole[starts[row] : starts[row + 1]]
            assert sequence[: len(ids)].tolist() == ids.tolist() and not sequence[len(ids) :].any()
        assert not whole[starts[len(rows)] :].any()
        _check_columns(chosen, shares)


def _check_columns(chosen: RolloutBatch, shares: list[MicroBatch]) -> None:
    """The place of a response token holds the token before it; columns, supports and lengths are those of the owned tokens."""
    before = np.concatenate([chosen.response_ids[:1] * 0, chosen.response_ids[:-1]])
    starts, ends = chosen.offsets("response_token")[:-1], chosen.offsets("prompt_token")[1:] - 1
    before[starts] = chosen.prompt_ids[ends]
    at = {int(token): index for index, token in enumerate(chosen.response_ids)}
    seen: list[int] = []
    for share in shares:
        own = [at[int(token)] for token in share.column("response_ids")]
        seen += own
        assert share.tokens[share.positions].tolist() == before[own].tolist()
        assert share.column("kept_mask").tolist() == chosen.loss_mask[own].tolist()
        assert share.column("support_counts").tolist() == filled(chosen.support_counts)[own].tolist()
        expected = [int(chosen.response_ids[index]) - 10_001 for index in own for _ in range(filled(chosen.support_counts)[index])]
        assert share.column("support_ids").tolist() == expected
        row_of = np.repeat(np.arange(chosen.num_samples), chosen.response_lens)
        assert share.lens.tolist() == np.bincount(row_of[own], minlength=chosen.num_samples).tolist()
        assert share.column("rewards").shape == (chosen.num_samples,)
    assert sorted(seen) == list(range(len(chosen.response_ids)))
    last = chosen.response_ids[chosen.offsets("response_token")[1:] - 1]
    ids = torch.stack([share.at_last_positions(share.tokens) for share in shares])
    assert ids.sum(0).tolist() == last.tolist() and bool(((ids > 0).sum(0) == 1).all())


@pytest.mark.parametrize("multiple", [1, 2, 3, 4])
def test_pack_share_empty_micro_batch_has_two_tokens_or_more_and_no_position(multiple: int) -> None:
    for share in _shares(_of_lengths([(1, 1)]), np.zeros(0, np.int64), cp_size=2, multiple=multiple):
        assert len(share.tokens) >= 2 and len(share.tokens) % multiple == 0 and not share.tokens.any()
        assert share.cu_seqlens.tolist() == [0, 2 * len(share.tokens)] and share.max_seqlen == 2 * len(share.tokens)
        assert share.positions.shape == share.lens.shape == share.column("kept_mask").shape == (0,)
        assert share.at_last_positions(torch.ones(len(share.tokens))).shape == (0,)


def test_pack_at_last_positions_of_whole_samples_is_the_last_token_of_each() -> None:
    packed = _pack([2, 0, 1], 4)
    assert packed.at_last_positions(packed.tokens).tolist() == [15, 11, 14]
    assert packed.lens.tolist() == [1, 2, 3]
