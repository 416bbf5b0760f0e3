"""Token rewards against hand-computed values."""

import pytest
import torch

from slime_ppo.errors import ConfigError, DataError
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


def test_token_rewards_kl_without_reference_is_refused() -> None:
    with pytest.raises(ConfigError, match="no reference log-probs"):
        build_token_rewards(REWARDS, OLD, None, MASK, LENS, kl_coef=0.1)
