"""Two roles in one process share its groups: equal layouts only. (That they compute as in processes of their own is what all
the other tests here rest on: they run both roles so.)"""

from pathlib import Path

import pytest

from slime_ppo.config.ppo import PpoConfig
from slime_ppo.parallel.layout import ParallelLayout
from slime_ppo.parallel.worker_settings import BatchSettings
from tests.dist.backends.cases import RANKS
from tests.dist.backends.conftest import CaseMaker
from tests.helpers.rank_pool import RankPool


@pytest.mark.parametrize(("actor", "critic"), [(1, 2), (2, 1)])
def test_second_role_of_another_layout_is_refused_with_both_numbers(
    megatron_pool: RankPool, make_case: CaseMaker, tmp_path: Path, actor: int, critic: int
) -> None:
    case = make_case(PpoConfig()).on(ParallelLayout(2, tp_size=actor), BatchSettings(1, None), tmp_path)
    for message in megatron_pool.run(f"{RANKS}:second_role_of_another_layout", world=2, case=case, tp_size=critic):
        assert f"asks for {critic} ranks per tensor-parallel group" in message and f"has {actor}" in message
