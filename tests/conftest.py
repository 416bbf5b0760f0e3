"""Fixtures for all tests."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# With importlib mode pytest adds nothing to sys.path; `tests.helpers` and functions named to the ranks are imported from here.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.helpers.rank_pool import RankPool


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Gloo ranks that live as long as the session; as many as the widest call so far."""
    with RankPool() as pool:
        yield pool
