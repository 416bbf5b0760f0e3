"""Fixtures for all tests, and the option that writes the table of layouts."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# With importlib mode pytest adds nothing to sys.path; `tests.helpers` and functions named to the ranks are imported from here.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime_ppo.rollout.sglang.engine import SGLangEngine
from slime_ppo.rollout.sglang.server import LocalServer
from tests.helpers.layout_table import LAYOUT_ROWS, write_table
from tests.helpers.rank_pool import RankPool
from tests.helpers.sglang_servers import KEY, external, tiny_engine, tiny_server
from tests.helpers.tiny_llama import make_tiny_llama


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--layout-table", metavar="FILE", help="write what the layout matrix has measured as a Markdown table")


def pytest_sessionfinish(session: pytest.Session) -> None:
    target, rows = session.config.getoption("--layout-table"), session.config.stash.get(LAYOUT_ROWS, {})
    if target and rows:
        from tests.dist.backends.matrix import table

        write_table(Path(target), table(rows))


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Gloo ranks that live as long as the session; as many as the widest call so far."""
    with RankPool() as pool:
        yield pool


@pytest.fixture(scope="session")
def tiny_folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two tiny Llamas of one shape, untied, with different weights; the first one is what `sglang_server` has loaded."""
    root = tmp_path_factory.mktemp("tiny")
    return make_tiny_llama(root / "a", tie=False, seed=0), make_tiny_llama(root / "b", tie=False, seed=1)


@pytest.fixture(scope="session")
def sglang_server(tiny_folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """The one server of a test run with one rank, deterministic inference and a key. A test may push to it and pause it, and
    leaves it awake; one may kill it: whoever uses it calls `start`, as engines do, which brings it back at another address."""
    log = tmp_path_factory.mktemp("sglang") / "server.log"
    server = tiny_server(tiny_folders[0], log, deterministic=True, api_key=KEY)
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def sglang_engine(sglang_server: LocalServer, tiny_folders: tuple[Path, Path]) -> Iterator[SGLangEngine]:
    """An engine on `sglang_server`, where it is now."""
    engine = tiny_engine([external(sglang_server)], tiny_folders[0], deterministic=True)
    yield engine
    engine.close()
