"""Steps of a rollout file replayed on real ranks: every layout as the first, and from a checkpoint with its optimizer."""

from pathlib import Path

import pytest

from slime_ppo.config.ppo import PpoConfig
from slime_ppo.config.roles import RoleName
from slime_ppo.config.root import Config
from slime_ppo.parallel.layout import ParallelLayout
from slime_ppo.parallel.worker_settings import BatchSettings
from slime_ppo.rollout.dump import TrainingDump
from tests.dist.backends.cases import make_plan, make_scored_batch
from tests.dist.backends.conftest import CaseMaker
from tests.helpers.configs import make_config
from tests.helpers.rank_pool import RankPool
from tools.layouts.replay import RANKS, Comparison, Layout, Start, Tolerance, laid_out, replay

TOLERANCE = Tolerance(metrics=5e-5, weights=0.1)


@pytest.fixture(scope="module")
def pool(megatron_pool: RankPool) -> RankPool:
    megatron_pool.preload(RANKS)
    return megatron_pool


def training() -> TrainingDump:
    rates: dict[RoleName, list[float]] = {"critic": [1e-3, 2e-3, 1e-3], "actor": [2e-4, 1e-4, 2e-4]}
    return TrainingDump(make_scored_batch(1), make_plan(), rates, kl_coef=0.0)


def compared(pool: RankPool, starts: dict[RoleName, Start], *layouts: str, with_optimizer: bool = False) -> Comparison:
    config: Config = make_config(
        model__hf_checkpoint=starts["actor"].hf_folder, critic__load=starts["critic"].hf_folder, optimizer__adam_eps=1e-6
    )
    configs = {name: laid_out(config, Layout.parse(name)) for name in layouts}
    return replay(pool, configs, training(), starts, with_optimizer=with_optimizer)


def test_replay_in_other_layouts_agrees_with_the_first_and_tells_foreign_weights(
    pool: RankPool, folders: dict[bool, tuple[str, str, str]]
) -> None:
    actor, critic, _ = folders[True]
    found = compared(pool, {"critic": Start.of(critic), "actor": Start.of(actor)}, "1-mbs7", "tp2", "pp2-dp2-mbs1")
    assert found.agrees(TOLERANCE)
    assert {layout: len(roles["actor"].steps) for layout, roles in found.found.items()} == {
        "1-mbs7": 3,
        "tp2": 3,
        "pp2-dp2-mbs1": 3,
    }
    assert max(found.moved.values()) > 0 and found.first["actor"].fit > 0.1, "the columns are random, no policy's"


def test_replay_from_a_checkpoint_goes_on_with_its_optimizer_in_every_layout(
    pool: RankPool, make_case: CaseMaker, tmp_path: Path
) -> None:
    case = make_case(PpoConfig()).on(ParallelLayout(1), BatchSettings(7, None), tmp_path)
    pool.run("tests.dist.backends.checkpoint_ranks:save_and_go_on", world=1, case=case, folder=str(tmp_path / "saved"))
    starts: dict[RoleName, Start] = {"critic": Start.of(f"{tmp_path}/saved/critic"), "actor": Start.of(f"{tmp_path}/saved/actor")}
    assert all(start.checkpoint is not None for start in starts.values())
    found = compared(pool, starts, "1-mbs7", "tp2", with_optimizer=True)
    assert found.agrees(TOLERANCE)
    fresh = compared(pool, starts, "1-mbs7")
    for role in ("actor", "critic"):
        own, other = found.first[role].steps, fresh.first[role].steps
        assert own[0] == other[0], "one set of weights"
        assert own[1] != other[1], "two states of the optimizer"
