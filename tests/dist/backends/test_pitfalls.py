"""Errors that Megatron makes easy and that no other test would name.

The others have their tests where they belong: padded vocabulary rows, the interleaved schedule with few micro-batches,
sums instead of averages (cuts into micro-batches), RoPE that runs on across the sequences of a pack, the value head's gradient
under tensor parallelism: test_layout_parity and test_hf_parity. Overlapped gathers that leave weights stale: test_execution.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from slime_ppo.config.ppo import PpoConfig
from slime_ppo.parallel.layout import ParallelLayout
from slime_ppo.parallel.worker_settings import BatchSettings
from tests.dist.backends.cases import RANKS as PASSES
from tests.dist.backends.cases import make_batch, make_plan, make_scored_batch
from tests.dist.backends.compare import gradient_error
from tests.dist.backends.conftest import CaseMaker
from tests.helpers.rank_pool import RankPool

RANKS = "tests.dist.backends.precision_ranks"


@pytest.mark.parametrize(("num_ranks", "discards"), [(1, False), (2, False), (1, True)])
def test_gradient_of_a_second_accumulation_holds_nothing_of_the_first(
    megatron_pool: RankPool, make_case: CaseMaker, tmp_path: Path, *, num_ranks: int, discards: bool
) -> None:
    """Megatron adds to its gradient buffers; they must be cleared, also after a step that was discarded."""
    megatron_pool.preload(RANKS)
    case = make_case(PpoConfig(), weight_decay=0.0).on(ParallelLayout(num_ranks), BatchSettings(2, None), tmp_path)
    plan = replace(make_plan(), steps=make_plan().steps[:1])
    first, second = megatron_pool.run(
        f"{RANKS}:gradients_of_accumulating_twice",
        world=num_ranks,
        case=case,
        batch=make_scored_batch(),
        plan=plan,
        discards=discards,
    )[0]
    assert gradient_error(second, first) <= 1e-7


@pytest.mark.parametrize("vpp_size", [1, 2])
def test_critic_of_a_tied_model_has_one_embedding_in_a_pipeline(
    megatron_pool: RankPool, make_case: CaseMaker, tmp_path: Path, vpp_size: int
) -> None:
    """A tied critic would hold a second copy on the last stage, and sum gradients over an embedding group that has no use."""
    megatron_pool.preload(RANKS)
    case = make_case(PpoConfig()).on(ParallelLayout(2, pp_size=2, vpp_size=vpp_size), BatchSettings(2, None), tmp_path)
    found = megatron_pool.run(f"{RANKS}:critic_embeddings", world=2, case=case)
    assert found == [(True, False), (False, False)]


def test_interleaved_pass_of_a_single_micro_batch_ends_and_equals_one_rank(
    megatron_pool: RankPool, make_case: CaseMaker, tmp_path: Path
) -> None:
    """Fewer micro-batches than stages, and both neighbours of a stage on one rank: it used to hang."""
    case = make_case(PpoConfig())
    one = megatron_pool.run(
        f"{PASSES}:log_probs", world=1, case=case.on(ParallelLayout(1), BatchSettings(100, None), tmp_path), batch=make_batch()
    )
    moved = case.on(ParallelLayout(2, pp_size=2, vpp_size=2), BatchSettings(100, None), tmp_path)
    ranks = megatron_pool.run(f"{PASSES}:log_probs", world=2, timeout_s=60, case=moved, batch=make_batch())
    [found] = [columns for columns in ranks if columns]
    assert np.abs(found["old_log_probs"] - one[0]["old_log_probs"]).max() <= 1e-5


def test_pack_of_one_sample_and_of_several_have_the_same_positions(
    megatron_pool: RankPool, make_case: CaseMaker, tmp_path: Path
) -> None:
    """Where the longest length equals the length of the pack, Megatron takes positions of the pack, not of its samples."""
    case = make_case(PpoConfig())
    alone, together = (
        megatron_pool.run(
            f"{PASSES}:log_probs", world=1, case=case.on(ParallelLayout(1), BatchSettings(size, None), tmp_path), batch=make_batch()
        )[0]
        for size in (1, 100)
    )
    assert np.abs(alone["old_log_probs"] - together["old_log_probs"]).max() <= 1e-5


def test_collectives_of_megatrons_groups_give_up_when_those_of_all_ranks_do(
    megatron_pool: RankPool, make_case: CaseMaker, tmp_path: Path
) -> None:
    """They had Megatron's half an hour, whatever --call-timeout-s said."""
    case = make_case(PpoConfig()).on(ParallelLayout(4, pp_size=2), BatchSettings(2, None), tmp_path)
    asked = case.settings(0, "actor").rank.collective_timeout_s
    assert megatron_pool.run(f"{PASSES}:collective_timeouts", world=4, case=case) == 4 * [{asked}]
