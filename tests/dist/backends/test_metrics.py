"""Figures of the losses and rewards that are metrics only: each has the value that was put into the batch."""

from dataclasses import replace

import numpy as np
import pytest

from slime_ppo.config.ppo import PpoConfig
from slime_ppo.ppo_utils.denominator import make_denominator
from slime_ppo.types.rollout_batch import filled
from tests.dist.backends.cases import RANKS, make_batch, make_plan, make_scored_batch
from tests.dist.backends.conftest import CaseMaker
from tests.helpers.rank_pool import RankPool

FAR = -60.0  # of the reference, so that log p - log q is beyond 20


def test_kl_clamped_and_the_denominator_of_a_step_have_their_values(megatron_pool: RankPool, make_case: CaseMaker) -> None:
    plan, batch = make_plan(), make_scored_batch()
    step = plan.steps[0]
    reference = np.array(filled(batch.old_log_probs))
    reference[batch.offsets("response_token")[step.rows[:2]]] = FAR
    batch = batch.with_columns(ref_log_probs=reference)
    case = make_case(PpoConfig(use_kl_loss=True, kl_loss_coef=0.1))
    [(actor, critic)] = megatron_pool.run(
        f"{RANKS}:train_columns", world=1, case=case, batch=batch, plan=replace(plan, steps=(step,))
    )
    [found] = actor.steps
    tokens = batch.trainable_tokens[step.rows]
    assert found["kl_clamped"] == pytest.approx(2 / tokens.sum(), rel=1e-12)
    # with token-mean the loss and the metric are one number, by two ways
    assert found["kl_ref"] == pytest.approx(found["kl_loss"], rel=1e-5) and found["kl_ref"] > 2 * 18 / tokens.sum()
    expected = make_denominator(tokens, batch.trajectory_ids[step.rows], mode="token-mean").metrics()
    for steps in (actor.steps, critic.steps):
        assert {name: value for name, value in steps[0].items() if name.startswith("denominator")} == expected


@pytest.mark.parametrize("charged", [True, False])
def test_kl_reward_clamped_has_its_value_and_only_where_the_kl_is_charged(
    megatron_pool: RankPool, make_case: CaseMaker, charged: bool
) -> None:
    batch = make_batch()
    reference = np.array(batch.rollout_log_probs)
    reference[batch.offsets("response_token")[[0, 4, 6]]] = FAR
    batch = batch.with_columns(old_log_probs=batch.rollout_log_probs, ref_log_probs=reference)
    kl = {"kl_coef": 0.1, "kl_reward_type": "k3"} if charged else {"use_kl_loss": True, "kl_loss_coef": 0.1}
    case = make_case(PpoConfig(advantage_estimator="reinforce_plus_plus", **kl))
    [stats] = megatron_pool.run(f"{RANKS}:advantage_stats", world=1, case=case, batch=batch)
    assert ("kl_reward_clamped" in stats) == charged
    if charged:
        assert stats["kl_reward_clamped"] == pytest.approx(3 / batch.loss_mask.sum(), rel=1e-12)
