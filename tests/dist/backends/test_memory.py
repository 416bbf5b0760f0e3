"""The memory that --dry-run predicts is what ranks hold by part, measured after an optimizer step."""

import pytest

from slime_ppo.parallel.layout import ParallelLayout
from tests.helpers.rank_pool import RankPool
from tests.helpers.tiny_llama import make_tiny_llama
from tools.layouts.memory import LAYOUTS, RANKS, Dtype, Role, measure_roles

CASES: dict[str, tuple[ParallelLayout, Dtype]] = {
    **{name: (layout, "float32") for name, layout in LAYOUTS.items()},
    "dp2 bf16": (ParallelLayout(2), "bfloat16"),
    "pp2 dp2 bf16": (ParallelLayout(4, pp_size=2), "bfloat16"),
    # shards of a third of a buffer that must end at a multiple of 384
    "dp3 bf16": (ParallelLayout(3), "bfloat16"),
}


@pytest.fixture(scope="module")
def pool(rank_pool: RankPool) -> RankPool:
    rank_pool.preload(RANKS)
    return rank_pool


@pytest.fixture(scope="module")
def roles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Role, str]]:
    """The vocabulary of the models is padded, by another number at each TP size."""
    root = tmp_path_factory.mktemp("models")
    tied, untied = (
        str(make_tiny_llama(root / f"tied_{tie}", vocab_size=2100, hidden=128, layers=4, intermediate=352, tie=tie))
        for tie in (True, False)
    )
    return {"tied actor": ("actor", tied), "untied actor": ("actor", untied), "critic": ("critic", tied)}


@pytest.mark.parametrize("case", list(CASES))
def test_resident_bytes_of_every_rank_and_part_are_those_measured(
    pool: RankPool, roles: dict[str, tuple[Role, str]], case: str
) -> None:
    """To the byte where the buffers have no gaps, which is in all but the last case."""
    layout, dtype = CASES[case]
    for label, found in measure_roles(pool, roles, layout, dtype).items():
        assert found.error <= (0.02 if layout.dp_size == 3 else 0), f"{label}: {found}"
