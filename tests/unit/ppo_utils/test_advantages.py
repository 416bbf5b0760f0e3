"""The advantage estimators against hand-computed values and the plain loops of reference_estimators.py; CP in tests/dist."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_ppo.errors import ConfigError
from slime_ppo.ppo_utils import advantages as estimators
from slime_ppo.ppo_utils import reference_estimators as reference
from slime_ppo.ppo_utils.advantages import AdvantageInputs, AdvantageSettings, SequenceRewards
from slime_ppo.ppo_utils.gae import generalized_advantages
from slime_ppo.ppo_utils.packed import sample_index
from tests.helpers.estimator_cases import random_advantage_inputs

NAN = float("nan")
FEW = settings(max_examples=12, deadline=None, derandomize=True)
NUMBERS = AdvantageSettings(gamma=0.5, lambd=0.9, lambd_critic=0.8)
CRITIC_FREE = {
    "grpo": estimators.grpo_advantages,
    "rloo": estimators.rloo_advantages,
    "reinforce_plus_plus": estimators.reinforce_plus_plus_advantages,
    "reinforce_plus_plus_baseline": estimators.reinforce_plus_plus_baseline_advantages,
}
EVERY = CRITIC_FREE | {"gae": estimators.gae_advantages}

# Three samples of one group, [T M T], [T], [M T]: rewards 1, 2, 6 with mean 3 and unbiased variance (4 + 1 + 9) / 2 = 7.
HAND = AdvantageInputs(
    token_rewards=torch.tensor([-1.0, NAN, 3.0, 2.0, NAN, 6.0]),
    mask=torch.tensor([1, 0, 1, 1, 0, 1], dtype=torch.bool),
    lens=torch.tensor([3, 1, 2]),
    rollout=SequenceRewards(
        torch.tensor([1.0, 2.0, 6.0]), torch.tensor([4, 4, 4]), torch.tensor([7, 8, 9]), torch.tensor([True, True, True])
    ),
    rows=torch.tensor([0, 1, 2]),
    values=torch.tensor([0.0, NAN, 1.0, 1.0, NAN, 2.0]),
)
STD = 7**0.5 + 1e-6


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", [-2 / STD, 0, -2 / STD, -1 / STD, 0, 3 / STD]),
        ("rloo", [1 - 4, 0, 1 - 4, 2 - 3.5, 0, 6 - 1.5]),
        ("reinforce_plus_plus_baseline", [-2, 0, -2, -1, 0, 3]),
        # the gap does not discount: -1 + 0.5 * 3
        ("reinforce_plus_plus", [0.5, 0, 3, 2, 0, 6]),
    ],
)
def test_critic_free_estimator_matches_hand_values_at_every_trainable_token(name: str, expected: list[float]) -> None:
    found = CRITIC_FREE[name](HAND, NUMBERS)
    assert found.advantages.tolist() == pytest.approx(expected, rel=1e-6)
    assert torch.equal(found.returns, found.advantages)


def test_gae_estimator_two_tokens_around_a_masked_one_matches_hand_values() -> None:
    found = estimators.gae_advantages(HAND, NUMBERS)
    # first sample: delta_1 = 3 - 1 = 2, delta_0 = -1 + .5 * 1 - 0 = -.5; A_0 = -.5 + .5 * .9 * 2, G_0 = 0 - .5 + .5 * .8 * 2
    assert found.advantages.tolist() == pytest.approx([0.4, 0, 2, 1, 0, 4], rel=1e-6)
    assert found.returns.tolist() == pytest.approx([0.3, 0, 3, 2, 0, 6], rel=1e-6)


def test_gae_estimator_hands_on_adaptive_lambda_and_bootstrap_values() -> None:
    inputs = replace(HAND, bootstrap_values=torch.tensor([0.5, 0.0, -2.0]))
    found = estimators.gae_advantages(inputs, replace(NUMBERS, adaptive_lambd=0.3))
    numbers = {"gamma": 0.5, "lambd": 0.9, "lambd_critic": 0.8, "adaptive": 0.3, "bootstrap_values": inputs.bootstrap_values}
    expected = generalized_advantages(inputs.token_rewards, inputs.values, inputs.mask, inputs.lens, **numbers)
    assert torch.equal(found.advantages, expected.advantages) and torch.equal(found.returns, expected.returns)


def test_gae_estimator_without_values_is_refused() -> None:
    with pytest.raises(ConfigError, match="--advantage-estimator"):
        estimators.gae_advantages(replace(HAND, values=None), NUMBERS)


def test_grpo_estimator_without_std_is_the_distance_to_the_mean() -> None:
    found = estimators.grpo_advantages(HAND, replace(NUMBERS, std_normalization=False))
    assert found.advantages.tolist() == [-2, 0, -2, -1, 0, 3]


@pytest.mark.parametrize("name", EVERY)
def test_estimator_sample_that_is_not_counted_gets_zero_and_leaves_the_others_alone(name: str) -> None:
    counted = torch.tensor([True, False, True])
    rewards = torch.tensor([1.0, NAN, 6.0])
    out = EVERY[name](replace(HAND, rollout=replace(HAND.rollout, rewards=rewards, counted=counted)), NUMBERS).advantages
    kept = sample_index(HAND.lens) != 1
    rows = torch.tensor([0, 2])
    rollout = SequenceRewards(rewards[rows], HAND.rollout.group_ids[rows], HAND.rollout.trajectory_ids[rows], counted[rows])
    bare = AdvantageInputs(
        HAND.token_rewards[kept], HAND.mask[kept], HAND.lens[rows], rollout, torch.arange(2), values=HAND.values[kept]
    )
    assert out[3] == 0
    assert torch.equal(out[kept], EVERY[name](bare, NUMBERS).advantages)


def test_gae_estimator_sample_that_is_not_counted_keeps_its_returns() -> None:
    rollout = replace(HAND.rollout, counted=torch.tensor([True, False, True]))
    found = estimators.gae_advantages(replace(HAND, rollout=rollout), NUMBERS)
    assert found.advantages.tolist() == pytest.approx([0.4, 0, 2, 0, 0, 4], rel=1e-6)
    assert found.returns.tolist() == pytest.approx([0.3, 0, 3, 2, 0, 6], rel=1e-6)


@pytest.mark.parametrize("name", EVERY)
def test_estimator_sample_without_trainable_tokens_or_without_tokens_is_zero(name: str) -> None:
    inputs = AdvantageInputs(
        token_rewards=torch.tensor([NAN, NAN, 1.0]),
        mask=torch.tensor([False, False, True]),
        lens=torch.tensor([2, 0, 1]),
        rollout=replace(HAND.rollout, counted=torch.tensor([False, False, True])),
        rows=torch.tensor([0, 1, 2]),
        values=torch.tensor([NAN, NAN, 0.5]),
    )
    assert EVERY[name](inputs, NUMBERS).advantages[:2].tolist() == [0, 0]
    nothing = [x[:0] for x in (HAND.token_rewards, HAND.mask, HAND.lens)]
    empty = AdvantageInputs(*nothing, HAND.rollout, HAND.rows[:0], values=nothing[0])
    assert EVERY[name](empty, NUMBERS).advantages.shape == (0,)


@pytest.mark.parametrize("name", CRITIC_FREE)
@FEW
@given(st.integers(0, 9999), st.integers(0, 10))
def test_critic_free_estimator_random_rollout_equals_the_reference(name: str, seed: int, num_trajectories: int) -> None:
    inputs, outcomes = random_advantage_inputs(seed, num_trajectories=num_trajectories)
    found = CRITIC_FREE[name](inputs, NUMBERS).advantages
    assert found.dtype == torch.float64
    lens = inputs.lens.tolist()
    rewards, masks = inputs.token_rewards.split(lens), inputs.mask.split(lens)
    trainable = [own[mask].tolist() for own, mask in zip(rewards, masks, strict=True)]
    expected = reference.critic_free_advantages(name, outcomes, trainable, gamma=0.5)
    for advantages, mask, wanted in zip(found.split(lens), masks, expected, strict=True):
        assert advantages[mask].tolist() == pytest.approx(wanted, rel=1e-9, abs=1e-12)
        assert advantages[~mask].eq(0).all()


@pytest.mark.parametrize("name", EVERY)
@FEW
@given(st.integers(0, 9999), st.integers(1, 10), st.integers(1, 4))
def test_estimator_dealing_the_rows_over_ranks_changes_nothing(name: str, seed: int, num_trajectories: int, num_ranks: int) -> None:
    inputs, outcomes = random_advantage_inputs(seed, num_trajectories=num_trajectories)
    lens = inputs.lens.tolist()
    whole = EVERY[name](inputs, NUMBERS)
    order = torch.randperm(len(outcomes), generator=torch.Generator().manual_seed(seed))
    for rows in (order[rank::num_ranks] for rank in range(num_ranks)):
        columns = (inputs.token_rewards, inputs.mask, inputs.values, whole.advantages, whole.returns)
        rewards, mask, values, advantages, returns = (
            torch.cat([x[:0], *(x.split(lens)[row] for row in rows.tolist())]) for x in columns
        )
        found = EVERY[name](AdvantageInputs(rewards, mask, inputs.lens[rows], inputs.rollout, rows, values), NUMBERS)
        # the scan's blocks lie elsewhere in the pack of a rank, so that the last digits may differ
        assert torch.allclose(found.advantages, advantages, rtol=0, atol=1e-12)
        assert torch.allclose(found.returns, returns, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_estimator_result_is_float32_unless_the_rewards_are_float64(name: str, dtype: torch.dtype) -> None:
    found = EVERY[name](replace(HAND, token_rewards=HAND.token_rewards.to(dtype)), NUMBERS)
    assert found.advantages.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
