"""One set of model folders, and one run per case and layout, shared by the tests of the Megatron backend."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from slime_ppo.config.ppo import PpoConfig
from tests.dist.backends.cases import RANKS, Case, make_folders
from tests.helpers.layout_table import LAYOUT_ROWS
from tests.helpers.rank_pool import RankPool

CHECKPOINT_RANKS = "tests.dist.backends.checkpoint_ranks"
CaseMaker = Callable[..., Case]


@pytest.fixture(scope="session")
def megatron_pool(rank_pool: RankPool) -> RankPool:
    # torch imports its compiler for the deterministic mode and for the first optimizer, which takes each rank seconds
    rank_pool.preload("torch._inductor.config", RANKS, CHECKPOINT_RANKS)
    return rank_pool


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, tuple[str, str, str]]:
    """Model folders by whether their embeddings are tied."""
    return {tie: make_folders(tmp_path_factory.mktemp("models"), tie=tie) for tie in (True, False)}


@pytest.fixture(scope="session")
def layout_rows(pytestconfig: pytest.Config) -> dict:
    """Rows of the table of layouts by name, which `--layout-table FILE` writes at the end of the session."""
    return pytestconfig.stash.setdefault(LAYOUT_ROWS, {})


@pytest.fixture(scope="session")
def mixture_case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Three models of four layers of eight experts; the critic's folder brings a head, the reference is close to the actor."""
    from tests.helpers.tiny_family import make_tiny_family

    root = tmp_path_factory.mktemp("mixture")
    names = ("actor", "critic", "reference")
    folders = [make_tiny_family(root / name, "qwen3_moe", tie=False, seed=seed) for seed, name in enumerate(names)]
    weights = [load_file(folder / "model.safetensors") for folder in folders]
    weights[1]["score.weight"] = 0.1 * np.random.default_rng(4).standard_normal((1, 64)).astype(np.float32)
    weights[2] = {name: own + 0.05 * (weights[2][name] - own) for name, own in weights[0].items()}
    for folder, tensors in zip(folders[1:], weights[1:], strict=True):
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    actor, critic, reference = map(str, folders)
    return Case(actor, critic, reference, PpoConfig(kl_coef=0.1, value_clip=0.25))


@pytest.fixture
def make_case(folders: dict[bool, tuple[str, str, str]], tmp_path: Path) -> CaseMaker:
    def make(ppo: PpoConfig, *, tie: bool = True, **changes: object) -> Case:
        actor, critic, reference = folders[tie]
        values: dict = {"rendezvous": str(tmp_path / "rendezvous")} | changes
        return Case(actor, critic, reference if ppo.needs_reference else None, ppo, **values)

    return make
