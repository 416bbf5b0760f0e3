"""GAE against hand-computed values and the plain float64 loop of reference.py."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slime_ppo.errors import ConfigError, DataError, NumericsError
from slime_ppo.ppo_utils import reference
from slime_ppo.ppo_utils.gae import Advantages, generalized_advantages
from tests.helpers.ppo_cases import Packed, random_packed

LENS = st.lists(st.integers(0, 9), min_size=1, max_size=6)
FEW = settings(max_examples=30, deadline=None, derandomize=True)


def _gae(batch: Packed, **options: float | Tensor | None) -> Advantages:
    numbers = {"gamma": 0.97, "lambd": 0.9, "lambd_critic": 0.9} | options
    return generalized_advantages(batch.rewards, batch.values, batch.mask, batch.lens, **numbers)


def test_gae_two_tokens_around_a_masked_one_matches_hand_value() -> None:
    mask = torch.tensor([True, False, True])
    rewards, values = torch.tensor([1.0, 100.0, 2.0]), torch.tensor([0.5, -7.0, 0.25])
    out = generalized_advantages(rewards, values, mask, torch.tensor([3]), gamma=0.5, lambd=0.5, lambd_critic=1.0)
    # delta_1 = 2 - .25 = 1.75; delta_0 = 1 + .5*.25 - .5 = .625; A_0 = .625 + .25*1.75; G_0 = .5 + .625 + .5*1.75
    assert out.advantages.tolist() == [1.0625, 0.0, 1.75]
    assert out.returns.tolist() == [2.0, 0.0, 2.0]


def test_gae_bootstrap_value_enters_the_last_delta_with_gamma() -> None:
    one = torch.tensor([1.0])
    out = generalized_advantages(
        one,
        one,
        torch.tensor([True]),
        torch.tensor([1]),
        gamma=0.5,
        lambd=0.9,
        lambd_critic=0.9,
        bootstrap_values=torch.tensor([4.0]),
    )
    assert out.advantages.tolist() == [2.0] and out.returns.tolist() == [3.0]


@FEW
@given(LENS, st.integers(0, 999), st.sampled_from([None, 0.3, 2.0]))
def test_gae_random_masks_equal_the_reference_loop(lens: list[int], seed: int, adaptive: float | None) -> None:
    batch = random_packed(seed, lens=lens)
    after = torch.randn(len(lens), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    out = _gae(batch, lambd_critic=0.8, adaptive=adaptive, bootstrap_values=after)
    numbers = reference.ReferenceSettings(vocab_size=1, gamma=0.97, lambd=0.9, lambd_critic=0.8, adaptive_lambd=adaptive)
    for s, columns in enumerate(
        zip(*(torch.split(x, lens) for x in (batch.rewards, batch.values, batch.mask, out.advantages, out.returns)), strict=True)
    ):
        rewards, values, mask, advantages, returns = columns
        expected = reference.advantages_and_returns(rewards[mask].tolist(), values[mask].tolist(), float(after[s]), numbers)
        assert advantages[mask].tolist() == pytest.approx(expected[0], rel=1e-12, abs=1e-12)
        assert returns[mask].tolist() == pytest.approx(expected[1], rel=1e-12, abs=1e-12)
        assert advantages[~mask].eq(0).all() and returns[~mask].eq(0).all()


@FEW
@given(LENS, st.integers(0, 999))
def test_gae_inserting_masked_tokens_changes_nothing(lens: list[int], seed: int) -> None:
    batch = random_packed(seed, lens=lens)
    bare = Packed(batch.rewards[batch.mask], batch.values[batch.mask], torch.ones(int(batch.mask.sum()), dtype=torch.bool),
                  torch.stack([m.sum() for m in torch.split(batch.mask, lens)]))  # fmt: skip
    with_masked, without = _gae(batch, adaptive=1.0), _gae(bare, adaptive=1.0)
    assert torch.equal(with_masked.advantages[batch.mask], without.advantages)
    assert torch.equal(with_masked.returns[batch.mask], without.returns)


@FEW
@given(LENS, st.integers(0, 999))
def test_gae_reversing_or_splitting_samples_permutes_outputs(lens: list[int], seed: int) -> None:
    batch = random_packed(seed, lens=lens)
    whole = torch.split(_gae(batch).advantages, lens)
    pieces = list(
        zip(torch.split(batch.rewards, lens), torch.split(batch.values, lens), torch.split(batch.mask, lens), strict=True)
    )
    reversed_batch = Packed(*(torch.cat(column[::-1]) for column in zip(*pieces, strict=True)), batch.lens.flip(0))
    assert torch.allclose(_gae(reversed_batch).advantages, torch.cat(whole[::-1]), rtol=1e-12, atol=1e-12)
    for s, piece in enumerate(pieces):
        assert torch.allclose(_gae(Packed(*piece, batch.lens[s : s + 1])).advantages, whole[s], rtol=1e-12, atol=1e-12)


@FEW
@given(LENS, st.integers(0, 999))
def test_gae_sample_without_trainable_tokens_is_as_if_absent(lens: list[int], seed: int) -> None:
    batch = random_packed(seed, lens=lens, masked=0.5)
    stays = torch.stack([m.any() for m in torch.split(batch.mask, lens)])
    kept = torch.repeat_interleave(stays, batch.lens)
    after = torch.randn(len(lens), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    fewer = Packed(batch.rewards[kept], batch.values[kept], batch.mask[kept], batch.lens[stays])
    with_empty = _gae(batch, adaptive=0.7, bootstrap_values=after.where(stays, torch.nan))
    without = _gae(fewer, adaptive=0.7, bootstrap_values=after[stays])
    assert torch.equal(with_empty.advantages[kept], without.advantages)
    assert torch.equal(with_empty.returns[kept], without.returns)
    assert with_empty.advantages[~kept].eq(0).all() and with_empty.returns[~kept].eq(0).all()


@FEW
@given(LENS, st.integers(0, 999))
def test_gae_lambda_one_gamma_one_is_reward_to_go_minus_value(lens: list[int], seed: int) -> None:
    batch = random_packed(seed, lens=lens)
    out = _gae(batch, gamma=1.0, lambd=1.0)
    for rewards, values, mask, found in zip(
        *(torch.split(x, lens) for x in (batch.rewards, batch.values, batch.mask, out.advantages)), strict=True
    ):
        to_go = rewards[mask].flip(0).cumsum(0).flip(0)
        assert torch.allclose(found[mask], to_go - values[mask], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("lens", [[15], [16], [17], [240, 16], [256], [257, 3], [4095, 1], [4096], [1, 4097], [16] * 17])
def test_gae_at_the_edges_of_the_blocks_equals_the_reference_loop(lens: list[int]) -> None:
    batch = random_packed(8, lens=lens, masked=0.0)
    after = torch.arange(1.0, len(lens) + 1, dtype=torch.float64)
    found = torch.split(_gae(batch, gamma=0.999, lambd=0.99, bootstrap_values=after).advantages, lens)
    for s, (rewards, values) in enumerate(zip(torch.split(batch.rewards, lens), torch.split(batch.values, lens), strict=True)):
        expected = reference.gae(rewards.tolist(), values.tolist(), gamma=0.999, lambd=0.99, after=float(after[s]))
        assert found[s].tolist() == pytest.approx(expected, rel=1e-11, abs=1e-11)


def test_gae_bootstrap_enters_only_its_own_sample_and_after_its_last_trainable_token() -> None:
    rewards, values = torch.zeros(5), torch.zeros(5)
    mask = torch.tensor([True, True, True, True, False])
    numbers = {"gamma": 0.5, "lambd": 1.0, "lambd_critic": 1.0}
    out = generalized_advantages(rewards, values, mask, torch.tensor([2, 3]), bootstrap_values=torch.tensor([0.0, 8.0]), **numbers)
    # sample 1: delta = gamma * 8 at its second token, gamma times that at its first; sample 0 is not cut
    assert out.advantages.tolist() == [0, 0, 2, 4, 0]


def test_gae_leaves_its_inputs_as_they_are() -> None:
    batch = random_packed(9, lens=[40, 3], masked=0.0)
    before = [batch.rewards.clone(), batch.values.clone()]
    out = _gae(batch)
    assert torch.equal(batch.rewards, before[0]) and torch.equal(batch.values, before[1])
    assert torch.allclose(out.returns, out.advantages + batch.values, rtol=1e-12, atol=1e-12)


def test_gae_adaptive_lambda_leaves_returns_alone() -> None:
    batch = random_packed(4, lens=[9, 3])
    assert torch.equal(_gae(batch, adaptive=0.5).returns, _gae(batch).returns)
    assert not torch.equal(_gae(batch, adaptive=0.5).advantages, _gae(batch).advantages)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gae_131072_tokens_in_low_precision_stays_within_1e_5_of_float64(dtype: torch.dtype) -> None:
    batch = random_packed(5, lens=[131072, 1000], masked=0.1, dtype=dtype)
    out = _gae(batch, gamma=1.0, lambd=0.9999)
    assert out.advantages.dtype == torch.float32
    for rewards, values, mask, found in zip(
        *(torch.split(x, [131072, 1000]) for x in (batch.rewards, batch.values, batch.mask, out.advantages)), strict=True
    ):
        expected = torch.tensor(
            reference.gae(rewards[mask].tolist(), values[mask].tolist(), gamma=1.0, lambd=0.9999), dtype=torch.float64
        )
        assert (found[mask] - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_gae_values_that_cancel_over_131072_tokens_stay_within_1e_5_of_float64() -> None:
    # the sum of deltas telescopes to R - V: what float32 rounds off each delta of size 2 adds up to 1.3e-5, the deltas do not
    n = 131072
    noise = 0.01 * torch.randn(n, generator=torch.Generator().manual_seed(1))
    values = torch.where(torch.arange(n) % 2 == 0, 1.0, -1.0) + noise
    rewards = torch.zeros(n)
    rewards[-1] = 1.0
    out = generalized_advantages(
        rewards, values, torch.ones(n, dtype=torch.bool), torch.tensor([n]), gamma=1.0, lambd=1.0, lambd_critic=1.0
    )
    expected = 1.0 - values.double()
    assert (out.advantages - expected).abs().max() <= 2e-6 * expected.abs().max()
    assert (out.returns - 1.0).abs().max() <= 2e-6 * expected.abs().max()


def test_gae_no_sample_or_no_trainable_token_gives_zeros() -> None:
    batch = random_packed(6, lens=[3, 0], masked=1.1)
    assert _gae(batch).advantages.tolist() == [0, 0, 0]
    assert _gae(random_packed(6, lens=[])).advantages.shape == (0,)


def test_gae_adaptive_not_positive_is_refused() -> None:
    with pytest.raises(ConfigError, match="a = 0"):
        _gae(random_packed(0, lens=[2]), adaptive=0.0)


@pytest.mark.parametrize("adaptive", [None, 0.5])
def test_gae_under_autocast_equals_that_without(adaptive: float | None) -> None:
    batch = random_packed(11, lens=[300, 40], dtype=torch.float32)
    without = _gae(batch, lambd_critic=0.8, adaptive=adaptive)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        within = _gae(batch, lambd_critic=0.8, adaptive=adaptive)
    assert torch.equal(within.advantages, without.advantages) and torch.equal(within.returns, without.returns)


@pytest.mark.parametrize("sizes", [[2, 2], [2, 6]])
def test_gae_lens_that_do_not_add_up_to_the_tokens_are_refused(sizes: list[int]) -> None:
    batch = random_packed(0, lens=[2, 4], masked=0.0)
    wrong = Packed(batch.rewards, batch.values, batch.mask, torch.tensor(sizes))
    with pytest.raises(DataError, match=rf"mask has shape \(6,\), but the lens of 2 samples add up to {sum(sizes)} response"):
        _gae(wrong)


def test_gae_columns_of_another_length_than_tokens_or_samples_are_refused() -> None:
    batch = random_packed(0, lens=[2, 4], masked=0.0)
    with pytest.raises(DataError, match=r"values has shape \(1,\), but the lens of 2 samples add up to 6 response tokens"):
        _gae(Packed(batch.rewards, batch.values[:1], batch.mask, batch.lens))
    with pytest.raises(DataError, match=r"bootstrap_values has shape \(1,\), but lens has 2 samples"):
        _gae(batch, bootstrap_values=torch.ones(1))


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
def test_gae_not_finite_where_trainable_is_refused_with_its_place_and_ignored_where_masked(bad: float) -> None:
    batch = random_packed(12, lens=[20, 20, 60], masked=0.0)
    for name, column in (("rewards", batch.rewards), ("values", batch.values)):
        kept = column.clone()
        column[70] = bad
        with pytest.raises(NumericsError, match=rf"{name} of sample 2 is {bad} at response token 30, which is trainable"):
            _gae(batch)
        masked = Packed(batch.rewards, batch.values, batch.mask.index_fill(0, torch.tensor([70]), False), batch.lens)
        assert _gae(masked).advantages.isfinite().all()
        column.copy_(kept)
    with pytest.raises(NumericsError, match=f"bootstrap_values of sample 1 is {bad}"):
        _gae(batch, bootstrap_values=torch.tensor([0.0, bad, 0.0]))


def test_gae_finite_numbers_whose_sum_overflows_go_through() -> None:
    huge = torch.full((3,), 1e308, dtype=torch.float64)
    batch = Packed(huge, torch.zeros_like(huge), torch.ones(3, dtype=torch.bool), torch.ones(3, dtype=torch.int64))
    assert torch.equal(_gae(batch).advantages, huge)
