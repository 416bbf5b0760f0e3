"""Offload frees every byte and changes none; the reference swap gives the policy back bit for bit."""

from pathlib import Path

import numpy as np
import pytest

from slime_ppo.config.ppo import PpoConfig
from slime_ppo.parallel.layout import ParallelLayout
from slime_ppo.parallel.worker_settings import BatchSettings
from tests.dist.backends.cases import RANKS, make_batch, make_plan
from tests.dist.backends.conftest import CaseMaker
from tests.helpers.rank_pool import RankPool

LAYOUTS = {
    "one_rank": ParallelLayout(1),
    "dp2": ParallelLayout(2),
    "tp2": ParallelLayout(2, tp_size=2),
    "pp2_vpp2": ParallelLayout(2, pp_size=2, vpp_size=2),
}


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_training_with_offload_before_every_step_equals_training_without_bit_for_bit(
    megatron_pool: RankPool, make_case: CaseMaker, tmp_path: Path, layout: str
) -> None:
    """The ranks themselves check that no byte is left; the first offload comes before Adam has any state."""
    reports = []
    for offload in (False, True):
        case = make_case(PpoConfig(kl_coef=0.1), offload_between=offload)
        case = case.on(LAYOUTS[layout], BatchSettings(3, None), tmp_path)
        ranks = megatron_pool.run(
            f"{RANKS}:iteration", world=case.layout.num_ranks, case=case, batch=make_batch(), plan=make_plan()
        )
        reports.append(ranks[0])
    without, with_offload = reports
    for name, column in without.columns.items():
        assert np.array_equal(with_offload.columns[name], column), name
    for role in ("actor", "critic"):
        own, other = getattr(with_offload, role), getattr(without, role)
        assert own.steps == other.steps
        for name, weights in other.weights.items():
            assert np.array_equal(own.weights[name], weights), f"{role} {name}"


@pytest.mark.parametrize("layout", ["one_rank", "tp2"])
def test_reference_swap_pass_that_fails_inside_gives_the_policy_back(
    megatron_pool: RankPool, make_case: CaseMaker, tmp_path: Path, layout: str
) -> None:
    case = make_case(PpoConfig(kl_coef=0.1)).on(LAYOUTS[layout], BatchSettings(3, None), tmp_path)
    for restored, was_swapped, num_parameters in megatron_pool.run(
        f"{RANKS}:reference_swap", world=case.layout.num_ranks, case=case
    ):
        assert restored and was_swapped and num_parameters == 26
