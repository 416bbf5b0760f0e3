"""Token rewards against hand-computed values."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_ppo.errors import ConfigError, DataError
from slime_ppo.parallel.cp_map import CpMap
from slime_ppo.ppo_utils.cp_ops import ContextShard
from slime_ppo.ppo_utils.token_rewards import build_token_rewards

NAN = float("nan")
# three samples: [T T M], [M T M T], [M] (T trainable, M masked)
MASK = torch.tensor([1, 1, 0, 0, 1, 0, 1, 0], dtype=torch.bool)
LENS = torch.tensor([3, 4, 1])
OLD = torch.tensor([-1.0, -2.0, NAN, NAN, -1.0, -9.0, -3.0, -1.0])
REF = torch.tensor([-1.5, -1.0, -1.0, -1.0, -1.0, NAN, -5.0, -7.0])
REWARDS = torch.tensor([10.0, 20.0, 30.0])


def test_token_rewards_charge_kl_on_trainable_and_pay_at_the_last_trainable_token() -> None:
    out = build_token_rewards(REWARDS, OLD, REF, MASK, LENS, kl_coef=0.1)
    assert torch.equal(out.kl, torch.tensor([0.5, -1.0, 0, 0, 0, 0, 2.0, 0]))
    assert torch.allclose(out.rewards, torch.tensor([-0.05, 10.1, 0, 0, 0, 0, 19.8, 0]))


def test_token_rewards_without_reference_are_the_sequence_rewards() -> None:
    out = build_token_rewards(REWARDS, OLD, None, MASK, LENS, kl_coef=0.0)
    assert out.rewards.tolist() == [0, 10, 0, 0, 0, 0, 20, 0]
    assert out.kl.tolist() == [0] * 8


def test_token_rewards_kl_is_unclamped_k1_by_default() -> None:
    out = build_token_rewards(
        torch.zeros(1), torch.tensor([500.0]), torch.tensor([0.0]), torch.tensor([True]), torch.tensor([1]), kl_coef=1.0
    )
    assert out.rewards.tolist() == [-500.0]


def test_token_rewards_kl_kind_k2_is_used_when_asked() -> None:
    out = build_token_rewards(REWARDS, OLD, REF, MASK, LENS, kl_coef=1.0, kl_kind="k2")
    assert torch.equal(out.kl, torch.tensor([0.125, 0.5, 0, 0, 0, 0, 2.0, 0]))


def test_token_rewards_process_reward_on_masked_token_goes_to_the_trainable_one_before() -> None:
    process = torch.tensor([1.0, 2.0, 4.0, 0.0, 8.0, 16.0, 0.0, 32.0])
    out = build_token_rewards(REWARDS, OLD, None, MASK, LENS, kl_coef=0.0, process_rewards=process)
    # the last sample has no trainable token and leaves with its 30 and its 32
    assert out.rewards.tolist() == [1, 2 + 4 + 10, 0, 0, 8 + 16, 0, 20, 0]


def test_token_rewards_process_reward_before_the_first_trainable_token_names_it() -> None:
    process = torch.tensor([0, 0, 0, 5.0, 0, 0, 0, 0])
    with pytest.raises(DataError, match=r"response token 0 of sample 1 .* process reward of 5\.0"):
        build_token_rewards(REWARDS, OLD, None, MASK, LENS, kl_coef=0.0, process_rewards=process)
    with pytest.raises(DataError, match=r"response token 0 of sample 71 has a process reward of 5\.0"):
        build_token_rewards(REWARDS, OLD, None, MASK, LENS, kl_coef=0.0, process_rewards=process, sample_ids=[70, 71, 72])


def test_token_rewards_kl_without_reference_is_refused() -> None:
    with pytest.raises(ConfigError, match="no reference log-probs"):
        build_token_rewards(REWARDS, OLD, None, MASK, LENS, kl_coef=0.1)


def test_token_rewards_tell_where_the_clamp_of_k3_acted() -> None:
    old = torch.tensor([-1.0, 30.0, -40.0, 99.0])
    mask = torch.tensor([True, True, True, False])
    options = {"kl_coef": 0.5, "kl_kind": "k3"}
    out = build_token_rewards(torch.zeros(1), old, torch.zeros(4), mask, torch.tensor([4]), **options)
    assert out.clamped.tolist() == [False, True, True, False]
    # log-ratio 30 counts as 20: k3 = e^-20 - 1 + 20
    assert out.rewards[1].item() == pytest.approx(-9.5) and torch.isfinite(out.rewards).all()


LENS_OF_SAMPLES = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 9)), min_size=1, max_size=5)


def _random_case(lens: list[tuple[int, int]], seed: int) -> tuple[torch.Tensor, ...]:
    """sequence rewards [S]; old, ref, process rewards [N] (0 before the first trainable token), mask [N], lens [S]."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [r for _, r in lens]
    mask = torch.rand(sum(sizes), generator=generator) > 0.4
    old, ref, process = torch.randn((3, sum(sizes)), generator=generator, dtype=torch.float64)
    started = torch.cat([m.cumsum(0) > 0 for m in torch.split(mask, sizes)])
    sequence = torch.randn(len(lens), generator=generator, dtype=torch.float64)
    return sequence, old.where(mask, torch.nan), ref.where(mask, torch.nan), process.where(started, 0.0), mask, torch.tensor(sizes)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(LENS_OF_SAMPLES, st.integers(0, 999))
def test_token_rewards_sum_of_each_sample_is_conserved(lens: list[tuple[int, int]], seed: int) -> None:
    sequence, old, ref, process, mask, sizes = _random_case(lens, seed)
    out = build_token_rewards(sequence, old, ref, mask, sizes, kl_coef=0.3, process_rewards=process)
    columns = [torch.split(x, sizes.tolist()) for x in (out.rewards, old - ref, process, mask)]
    for s, (rewards, kl, paid, trained) in enumerate(zip(*columns, strict=True)):
        total = sequence[s] + paid.sum() - 0.3 * kl[trained].sum() if trained.any() else torch.tensor(0.0)
        assert rewards.sum().item() == pytest.approx(total.item(), abs=1e-12)
        assert rewards[~trained].eq(0).all()


@settings(max_examples=30, deadline=None, derandomize=True)
@given(LENS_OF_SAMPLES, st.integers(0, 999), st.sampled_from([1, 2, 4]))
def test_token_rewards_of_a_context_parallel_rank_are_its_slice_of_all(
    lens: list[tuple[int, int]], seed: int, cp_size: int
) -> None:
    sequence, old, ref, process, mask, sizes = _random_case(lens, seed)
    whole = build_token_rewards(sequence, old, ref, mask, sizes, kl_coef=0.3, process_rewards=process)
    cp_map = CpMap(cp_size, *np.array(lens).T)
    for rank in range(cp_size):
        context = ContextShard.of_rank(cp_map, rank, group=None)
        own = build_token_rewards(
            sequence,
            context.take(old),
            context.take(ref),
            mask,
            sizes,
            kl_coef=0.3,
            process_rewards=process,
            context=context,
        )
        assert torch.equal(own.rewards, whole.rewards[context.index])
        assert torch.equal(own.kl, whole.kl[context.index]) and torch.equal(own.clamped, whole.clamped[context.index])


def test_token_rewards_of_bfloat16_log_probs_are_not_rounded() -> None:
    zeros = torch.zeros(2, dtype=torch.bfloat16)
    mask, lens = torch.ones(2, dtype=torch.bool), torch.tensor([1, 1])
    out = build_token_rewards(torch.tensor([0.3, 1 / 3]), zeros, zeros, mask, lens, kl_coef=0.1)
    # bfloat16 would make 0.30078125 of 0.3
    assert torch.equal(out.rewards, torch.tensor([0.3, 1 / 3])) and out.kl.dtype == torch.float32


def test_token_rewards_of_shapes_that_do_not_fit_lens_are_refused() -> None:
    with pytest.raises(DataError, match=r"mask has shape \(8,\), but the lens of 3 samples add up to 7 response tokens"):
        build_token_rewards(REWARDS, OLD, None, MASK, torch.tensor([3, 3, 1]), kl_coef=0.0)
    with pytest.raises(DataError, match=r"sequence_rewards has shape \(2,\), but lens has 3 samples"):
        build_token_rewards(REWARDS[:2], OLD, None, MASK, LENS, kl_coef=0.0)
    with pytest.raises(DataError, match=r"process_rewards has shape \(7,\), but the lens"):
        build_token_rewards(REWARDS, OLD, None, MASK, LENS, kl_coef=0.0, process_rewards=torch.zeros(7))
