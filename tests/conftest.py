"""Fixtures for all tests, and the option that writes the table of layouts."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# With importlib mode pytest adds nothing to sys.path; `tests.helpers` and functions named to the ranks are imported from here.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.helpers.layout_table import LAYOUT_ROWS, write_table
from tests.helpers.rank_pool import RankPool


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
