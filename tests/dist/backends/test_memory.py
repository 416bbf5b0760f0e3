"""The memory that --dry-run predicts is what ranks hold by part, measured after an optimizer step."""

import pytest

from slime_ppo.parallel.layout import ParallelLayout
from tests.helpers.rank_pool import RankPool
from tests.helpers.tiny_family import make_tiny_family
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


@pytest.mark.parametrize("layout", [ParallelLayout(1), ParallelLayout(2, pp_size=2)], ids=["one_rank", "pp2"])
def test_resident_bytes_with_a_float32_lm_head_are_those_measured(
    pool: RankPool, roles: dict[str, tuple[Role, str]], layout: ParallelLayout
) -> None:
    for label, found in measure_roles(pool, roles, layout, "bfloat16", fp32_lm_head=True).items():
        assert found.error == 0, f"{label}: {found}"


@pytest.mark.parametrize(
    "layout",
    [ParallelLayout(2, ep_size=2), ParallelLayout(4, tp_size=2, ep_size=2), ParallelLayout(4, pp_size=2, etp_size=2, tp_size=2)],
    ids=["ep2", "tp2_ep2_expert_dp2", "pp2_tp2_etp2"],
)
def test_resident_bytes_of_experts_are_those_measured(
    pool: RankPool, tmp_path_factory: pytest.TempPathFactory, layout: ParallelLayout
) -> None:
    folder = str(make_tiny_family(tmp_path_factory.mktemp("experts"), "qwen3_moe", tie=False, seed=0))
    roles: dict[str, tuple[Role, str]] = {"actor": ("actor", folder), "critic": ("critic", folder)}
    for label, found in measure_roles(pool, roles, layout, "bfloat16").items():
        assert found.error <= 0.02, f"{label}: {found}"
