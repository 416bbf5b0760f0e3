"""Rollout correction and advantage estimators under context parallelism on real gloo ranks against the unsharded functions."""

import dataclasses

import pytest
import torch
from torch import Tensor

from slime_ppo.ppo_utils import advantages as estimators
from slime_ppo.ppo_utils.off_policy import CorrectionSettings, Mismatch, rollout_correction, rollout_mismatch
from tests.dist.ppo_utils.correction_ranks import NUMBERS, correction_case, cp_map, estimator_case
from tests.helpers.rank_pool import RankPool

RANKS = "tests.dist.ppo_utils.correction_ranks"
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
SETTINGS = {
    "token": CorrectionSettings("tis", cap=1.2),
    "sequence": CorrectionSettings("icepop", "sequence", low=0.3, high=3.0),
    "sequence rejection": CorrectionSettings(rejection="sequence", rejection_low=0.3, rejection_high=3.0),
    "geometric rejection": CorrectionSettings(
        "tis", "sequence", cap=1.5, rejection="geometric", rejection_low=0.95, rejection_high=1.05
    ),
}


def _whole(cp_size: int, lens: Tensor, parts: list[Tensor]) -> Tensor:
    """The [N] column whose parts the ranks hold; every token exactly once."""
    layout = cp_map(cp_size, lens)
    index = torch.cat([torch.from_numpy(layout.response_index(rank)) for rank in range(cp_size)])
    assert torch.equal(index.sort().values, torch.arange(int(lens.sum())))
    joined = torch.cat(parts)
    return torch.empty_like(joined).index_copy(0, index, joined)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_correction_over_context_ranks_equals_whole_samples(
    rank_pool: RankPool, cp_size: int, name: str, dtype: torch.dtype
) -> None:
    case = correction_case(cp_size, dtype)
    expected = rollout_correction(case.old, case.rollout, case.mask, case.lens, SETTINGS[name])
    weights, rejected, mismatch = zip(
        *rank_pool.run(f"{RANKS}:correction", world=cp_size, settings=SETTINGS[name], dtype=dtype), strict=True
    )
    found = _whole(cp_size, case.lens, list(weights))
    assert found.dtype == dtype
    assert (found - expected.weights).abs().max() <= TOLERANCE[dtype]
    assert all(torch.equal(one, expected.rejected) for one in rejected)
    if "rejection" in name:
        assert 0 < int(expected.rejected.sum()) < len(case.lens)
    merged = Mismatch()
    for one in mismatch:
        merged = merged.merge(one)
    whole = rollout_mismatch(case.old, case.rollout, case.mask)
    assert dataclasses.astuple(merged) == pytest.approx(dataclasses.astuple(whole), rel=1e-12)


@pytest.mark.parametrize(
    "name",
    [
        "gae_advantages",
        "grpo_advantages",
        "rloo_advantages",
        "reinforce_plus_plus_advantages",
        "reinforce_plus_plus_baseline_advantages",
    ],
)
@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_estimator_over_context_ranks_equals_whole_samples(rank_pool: RankPool, cp_size: int, name: str) -> None:
    case = estimator_case()
    expected = getattr(estimators, name)(case, NUMBERS)
    advantages, returns = zip(*rank_pool.run(f"{RANKS}:advantages", world=cp_size, name=name), strict=True)
    assert (_whole(cp_size, case.lens, list(advantages)) - expected.advantages).abs().max() <= 1e-10
    assert (_whole(cp_size, case.lens, list(returns)) - expected.returns).abs().max() <= 1e-10
    assert expected.advantages.abs().max() > 0.1
