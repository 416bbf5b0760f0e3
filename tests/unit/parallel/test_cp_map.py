"""The zigzag map: hand values, and a plain-Python layout of chunks for every length."""

import numpy as np
import pytest

from slime_ppo.errors import ParallelError
from slime_ppo.parallel.cp_map import CpMap


def _map(cp_size: int, *lens: tuple[int, int]) -> CpMap:
    prompt, response = np.array(lens, np.int64).reshape(-1, 2).T
    return CpMap(cp_size, prompt, response)


def _all_lengths(cp_size: int) -> list[tuple[int, int]]:
    """(P, R) for R from 0 to (2 cp)^2 + 8 and prompts shorter and longer than a chunk."""
    return [(p, r) for p in (1, 2, 2 * cp_size + 1, 13) for r in range((2 * cp_size) ** 2 + 9)]


def _packs(cp_size: int, lens: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """(sample, position) of everything that each rank holds, in the order of its pack: chunks dealt by hand."""
    packs: list[list[tuple[int, int]]] = [[] for _ in range(cp_size)]
    for s, (p, r) in enumerate(lens):
        padded = p + r
        while cp_size > 1 and padded % (2 * cp_size):
            padded += 1
        num_chunks = 2 * cp_size if cp_size > 1 else 1
        size = padded // num_chunks
        chunks = [[(s, position) for position in range(c * size, (c + 1) * size)] for c in range(num_chunks)]
        for rank in range(cp_size):
            packs[rank] += chunks[rank] + (chunks[num_chunks - 1 - rank] if cp_size > 1 else [])
    return packs


def test_cp_map_two_samples_match_the_hand_layout_of_the_docstring() -> None:
    cp_map = _map(2, (2, 4), (1, 1))
    assert cp_map.padded_lens.tolist() == [8, 4]
    assert [cp_map.token_index(r).tolist() for r in (0, 1)] == [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]
    assert [cp_map.response_index(r).tolist() for r in (0, 1)] == [[0, 4], [1, 2, 3]]
    assert [cp_map.local_positions(r).tolist() for r in (0, 1)] == [[1, 4], [0, 1, 2]]
    assert [cp_map.local_lens(r).tolist() for r in (0, 1)] == [[1, 1], [3, 0]]
    assert [cp_map.last_positions(r).rows.tolist() for r in (0, 1)] == [[], [0, 1]]
    assert cp_map.last_positions(1).places.tolist() == [3, 4]


def test_cp_map_last_rank_holds_the_middle_chunks_and_rank_0_the_ends() -> None:
    # one token of a chunk each: positions 0..7, owners 0 1 2 3 3 2 1 0; tokens 0..6 are predicted at 0..6
    cp_map = _map(4, (1, 7))
    assert cp_map.owners(np.zeros(8, np.int64), np.arange(8)).tolist() == [0, 1, 2, 3, 3, 2, 1, 0]
    assert [cp_map.response_index(r).tolist() for r in range(4)] == [[0], [1, 6], [2, 5], [3, 4]]
    assert cp_map.last_positions(0).rows.tolist() == [0]


@pytest.mark.parametrize("cp_size", [1, 2, 3, 4])
def test_cp_map_every_length_equals_chunks_dealt_by_hand(cp_size: int) -> None:
    lens = _all_lengths(cp_size)
    cp_map, packs = _map(cp_size, *lens), _packs(cp_size, lens)
    tokens = [(s, p + i - 1) for s, (p, r) in enumerate(lens) for i in range(r)]
    padded_first = np.cumsum(cp_map.padded_lens) - cp_map.padded_lens
    for rank, pack in enumerate(packs):
        place_of = {entry: place for place, entry in enumerate(pack)}
        owned = [index for index, token in enumerate(tokens) if token in place_of]
        assert cp_map.token_index(rank).tolist() == [padded_first[s] + position for s, position in pack]
        assert cp_map.response_index(rank).tolist() == owned
        assert cp_map.local_positions(rank).tolist() == [place_of[tokens[index]] for index in owned]
        rows = [tokens[index][0] for index in owned]
        assert cp_map.local_lens(rank).tolist() == [rows.count(s) for s in range(len(lens))]
        last = [(s, place_of[s, p + r - 1]) for s, (p, r) in enumerate(lens) if (s, p + r - 1) in place_of]
        found = cp_map.last_positions(rank)
        assert list(zip(found.rows.tolist(), found.places.tolist(), strict=True)) == last
    assert sorted(np.concatenate([cp_map.response_index(r) for r in range(cp_size)])) == list(range(len(tokens)))


def test_cp_map_short_sample_leaves_ranks_without_a_token() -> None:
    cp_map = _map(4, (1, 1))
    assert cp_map.padded_lens.tolist() == [8]
    assert [len(cp_map.response_index(r)) for r in range(4)] == [1, 0, 0, 0]
    assert [len(cp_map.token_index(r)) for r in range(4)] == [2, 2, 2, 2]


def test_cp_map_without_samples_is_empty_on_every_rank() -> None:
    cp_map = _map(2)
    assert cp_map.num_response_tokens == 0 and cp_map.padded_lens.shape == (0,)
    for rank in range(2):
        assert len(cp_map.token_index(rank)) == len(cp_map.local_positions(rank)) == len(cp_map.local_lens(rank)) == 0
        assert len(cp_map.last_positions(rank).rows) == 0


@pytest.mark.parametrize(
    ("cp_size", "lens", "message"),
    [
        (0, [(1, 1)], "context-parallel size is 0"),
        (2, [(3, 1), (0, 4)], "prompt of sample 1 of the batch has 0 tokens; expected at least 1"),
        (2, [(3, -1)], "response of sample 0 of the batch has -1 tokens"),
    ],
)
def test_cp_map_impossible_sizes_are_refused(cp_size: int, lens: list[tuple[int, int]], message: str) -> None:
    with pytest.raises(ParallelError, match=message):
        _map(cp_size, *lens)


def test_cp_map_lengths_of_different_sizes_or_unknown_rank_are_refused() -> None:
    with pytest.raises(ParallelError, match="one of each per sample"):
        CpMap(2, np.array([1, 2]), np.array([3]))
    with pytest.raises(ParallelError, match="no context-parallel rank 2; expected one of 0 to 1"):
        _map(2, (1, 1)).response_index(2)
