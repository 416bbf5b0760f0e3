"""Fixtures of the SGLang tests; the main server is in tests/conftest.py, because the contract tests use it too."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from slime_ppo.rollout.engine import EnginePart
from slime_ppo.rollout.sglang.engine import SGLangEngine
from slime_ppo.rollout.sglang.server import LocalServer
from tests.helpers.engine_harness import ReferenceModel, push_folder
from tests.helpers.sglang_servers import tiny_server

VERSION = 7


@pytest.fixture(scope="session")
def sglang_server_of_two_ranks(tiny_folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """The one server of a test run with two ranks; without deterministic inference, so with min_p and a prefix cache, and without
    a key. It may be killed, too."""
    server = tiny_server(tiny_folders[0], tmp_path_factory.mktemp("sglang-tp2") / "server.log", tp_size=2)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def engine(sglang_engine: SGLangEngine, tiny_folders: tuple[Path, Path]) -> SGLangEngine:
    """Awake, with the first folder's weights as VERSION."""
    sglang_engine.wake(EnginePart.ALL)
    push_folder(sglang_engine, tiny_folders[0], VERSION)
    return sglang_engine


@pytest.fixture(scope="session")
def references(tiny_folders: tuple[Path, Path]) -> tuple[ReferenceModel, ReferenceModel]:
    return ReferenceModel(tiny_folders[0]), ReferenceModel(tiny_folders[1])
