"""One set of model folders, and one run per case and layout, shared by the tests of the Megatron backend."""

from collections.abc import Callable
from pathlib import Path

import pytest

from slime_ppo.config.ppo import PpoConfig
from tests.dist.backends.cases import RANKS, Case, make_folders
from tests.helpers.layout_table import LAYOUT_ROWS
from tests.helpers.rank_pool import RankPool

CaseMaker = Callable[..., Case]


@pytest.fixture(scope="session")
def megatron_pool(rank_pool: RankPool) -> RankPool:
    rank_pool.preload(RANKS)
    return rank_pool


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, tuple[str, str, str]]:
    """Model folders by whether their embeddings are tied."""
    return {tie: make_folders(tmp_path_factory.mktemp("models"), tie=tie) for tie in (True, False)}


@pytest.fixture(scope="session")
def layout_rows(pytestconfig: pytest.Config) -> dict:
    """Rows of the table of layouts by name, which `--layout-table FILE` writes at the end of the session."""
    return pytestconfig.stash.setdefault(LAYOUT_ROWS, {})


@pytest.fixture
def make_case(folders: dict[bool, tuple[str, str, str]], tmp_path: Path) -> CaseMaker:
    def make(ppo: PpoConfig, *, tie: bool = True, **changes: object) -> Case:
        actor, critic, reference = folders[tie]
        values: dict = {"rendezvous": str(tmp_path / "rendezvous")} | changes
        return Case(actor, critic, reference if ppo.needs_reference else None, ppo, **values)

    return make
