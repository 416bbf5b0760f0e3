"""The packed layout and selection by mask."""

import pytest
import torch

from slime_ppo.errors import DataError, NumericsError
from slime_ppo.ppo_utils.packed import require_finite, require_layout, sample_index, segment_sum, select, trainable_counts


def test_sample_index_and_segment_sum_with_an_empty_sample_match_hand_values() -> None:
    lens = torch.tensor([2, 0, 3])
    assert sample_index(lens).tolist() == [0, 0, 2, 2, 2]
    assert segment_sum(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), lens).tolist() == [3.0, 0.0, 12.0]


def test_trainable_counts_with_empty_samples_match_hand_values() -> None:
    mask = torch.tensor([True, False, True, True, True])
    assert trainable_counts(mask, torch.tensor([0, 2, 0, 3, 0])).tolist() == [0, 1, 0, 3, 0]
    assert trainable_counts(mask[:0], torch.tensor([0, 0])).tolist() == [0, 0]
    assert trainable_counts(mask[:0], torch.tensor([], dtype=torch.int64)).tolist() == []


def test_select_nan_at_masked_position_reaches_neither_value_nor_gradient() -> None:
    x = torch.tensor([2.0, float("nan")], requires_grad=True)
    y = select(select(x, torch.tensor([True, False])).exp(), torch.tensor([True, False]))
    y.sum().backward()
    assert y[1] == 0 and x.grad is not None and x.grad[1] == 0
    assert torch.isclose(x.grad[0], torch.tensor(2.0).exp())


def test_require_finite_nan_at_trainable_token_names_sample_and_token() -> None:
    x = torch.tensor([0.0, float("nan"), 0.0, 0.0, float("inf")])
    lens = torch.tensor([2, 3])
    require_finite(x, torch.tensor([True, False, True, True, False]), lens, sample_ids=[40, 41], name="values")
    with pytest.raises(NumericsError, match="values of sample 41 is inf at response token 2"):
        require_finite(x, torch.tensor([True, False, True, True, True]), lens, sample_ids=[40, 41], name="values")


def test_require_layout_accepts_what_fits_and_names_what_does_not() -> None:
    mask, lens = torch.ones(5, dtype=torch.bool), torch.tensor([2, 0, 3])
    require_layout(mask, lens, tokens={"a": torch.zeros(5), "b": None}, samples={"c": torch.zeros(3), "d": None})
    require_layout(mask[:0], lens[:0], tokens={}, samples={})
    with pytest.raises(DataError, match=r"mask has shape \(4,\), but the lens of 3 samples add up to 5 response tokens"):
        require_layout(mask[:4], lens, tokens={}, samples={})
    with pytest.raises(DataError, match=r"a has shape \(5, 1\), but the lens of 3 samples add up to 5 response tokens"):
        require_layout(mask, lens, tokens={"a": torch.zeros(5, 1)}, samples={})
    with pytest.raises(DataError, match=r"c has shape \(2,\), but lens has 3 samples"):
        require_layout(mask, lens, tokens={}, samples={"c": torch.zeros(2)})
