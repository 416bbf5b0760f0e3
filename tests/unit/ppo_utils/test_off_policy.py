"""Rollout correction and mismatch against hand-computed values and the plain loops of reference_estimators.py; CP in tests/dist."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slime_ppo.ppo_utils import reference_estimators as reference
from slime_ppo.ppo_utils.off_policy import CorrectionSettings, RolloutCorrection, rollout_correction, rollout_mismatch
from tests.helpers.estimator_cases import LogProbPair, random_log_probs

NAN = float("nan")
FEW = settings(max_examples=15, deadline=None, derandomize=True)
LENS = st.lists(st.integers(0, 7), max_size=8)
EACH_SETTING = {
    "none": CorrectionSettings(),
    "tis": CorrectionSettings("tis", cap=1.3),
    "tis sequence": CorrectionSettings("tis", "sequence", cap=1.3),
    "icepop": CorrectionSettings("icepop", low=0.6, high=1.5),
    "icepop sequence": CorrectionSettings("icepop", "sequence", low=0.6, high=1.5),
    "icepop one bound": CorrectionSettings("icepop", high=1.5),
    "rejection": CorrectionSettings(rejection="sequence", rejection_low=0.5, rejection_high=2.0),
    "rejection one bound": CorrectionSettings(rejection="sequence", rejection_low=0.5),
    "geometric": CorrectionSettings(rejection="geometric", rejection_low=0.8, rejection_high=1.2),
    "tis geometric": CorrectionSettings("tis", cap=1.3, rejection="geometric", rejection_low=0.8, rejection_high=1.2),
    "tis sequence geometric": CorrectionSettings("tis", "sequence", cap=1.3, rejection="geometric", rejection_high=1.2),
}
EACH = pytest.mark.parametrize("name", EACH_SETTING)


def _corrected(log_ratios: list[float], lens: list[int], given_settings: CorrectionSettings) -> RolloutCorrection:
    """Of old - rollout = log_ratios; NaN stands for a masked token."""
    gap = torch.tensor(log_ratios, dtype=torch.float64)
    rollout = torch.full_like(gap, -0.5)
    return rollout_correction(rollout + gap, rollout, ~gap.isnan(), torch.tensor(lens), given_settings)


def _logs(*ratios: float) -> list[float]:
    return [math.log(r) for r in ratios]


def test_correction_tis_caps_the_ratio_of_each_token_from_above_only() -> None:
    found = _corrected([*_logs(0.25, 3.0), NAN, *_logs(1.5)], [3, 1], CorrectionSettings("tis", cap=2.0))
    assert found.weights.tolist() == pytest.approx([0.25, 2.0, 0, 1.5], rel=1e-12)
    assert found.rejected.tolist() == [False, False]


def test_correction_icepop_keeps_the_ratio_inside_its_bounds_and_drops_it_outside() -> None:
    found = _corrected([*_logs(0.4, 0.6, 1.0), NAN, *_logs(5.1, 4.9)], [6], CorrectionSettings("icepop", low=0.5, high=5.0))
    assert found.weights.tolist() == pytest.approx([0, 0.6, 1, 0, 0, 4.9], rel=1e-12)
    # the bounds themselves are inside
    assert _corrected([0.0], [1], CorrectionSettings("icepop", low=1.0, high=2.0)).weights.tolist() == [1]
    assert _corrected([0.0], [1], CorrectionSettings("icepop", low=0.5, high=1.0)).weights.tolist() == [1]


def test_correction_sequence_level_gives_every_token_the_product_of_its_sample() -> None:
    found = _corrected([*_logs(2.0), NAN, *_logs(0.3), *_logs(3.0, 2.0)], [3, 2], CorrectionSettings("tis", "sequence", cap=4.0))
    assert found.weights.tolist() == pytest.approx([0.6, 0, 0.6, 4, 4], rel=1e-12)


def test_correction_without_mode_weighs_trainable_tokens_one() -> None:
    assert _corrected([0.7, NAN, -3.0], [2, 1], CorrectionSettings()).weights.tolist() == [1, 0, 1]


def test_correction_sequence_rejection_judges_the_product_and_geometric_the_mean() -> None:
    # products 4, 1 and 2; geometric means 2, 1 and 2
    ratios, lens = _logs(4.0, 1.0, 0.5, 2.0, 2.0), [2, 2, 1]
    bounds = {"rejection_low": 0.5, "rejection_high": 2.5}
    by_product = _corrected(ratios, lens, CorrectionSettings(rejection="sequence", **bounds))
    assert by_product.rejected.tolist() == [True, False, False] and by_product.weights.tolist() == [0, 0, 1, 1, 1]
    by_mean = _corrected(ratios, lens, CorrectionSettings(rejection="geometric", **bounds))
    assert by_mean.rejected.tolist() == [False, False, False] and by_mean.weights.tolist() == [1, 1, 1, 1, 1]
    low = _corrected(ratios, lens, CorrectionSettings(rejection="geometric", rejection_low=1.5))
    assert low.rejected.tolist() == [False, True, False] and low.weights.tolist() == [1, 1, 0, 0, 1]


def test_correction_mean_is_over_trainable_tokens() -> None:
    # one trainable token of ratio 4 among three masked ones: mean 4, not the fourth root
    found = _corrected([NAN, math.log(4.0), NAN, NAN], [4], CorrectionSettings(rejection="geometric", rejection_high=3.0))
    assert found.rejected.tolist() == [True]


def test_correction_rejection_takes_the_weights_of_all_tokens_and_leaves_the_mask() -> None:
    gap = torch.tensor([0.0, 3.0, 0.1, -0.1])
    mask, lens = torch.tensor([True, True, True, False]), torch.tensor([2, 2])
    kept = mask.clone()
    limits = CorrectionSettings("tis", cap=9.0, rejection="sequence", rejection_high=2.0)
    found = rollout_correction(gap, torch.zeros(4), mask, lens, limits)
    assert found.rejected.tolist() == [True, False]
    assert found.weights.tolist() == pytest.approx([0, 0, math.exp(0.1), 0], rel=1e-6)
    assert torch.equal(mask, kept)


def test_correction_sample_without_trainable_tokens_is_not_rejected() -> None:
    # its sum of 0 and its mean of nothing are no ratio of 1 that could lie below the lower bound
    for rejection in ("sequence", "geometric"):
        bounds = CorrectionSettings("tis", "sequence", cap=2.0, rejection=rejection, rejection_low=1.5, rejection_high=9.0)
        found = _corrected([NAN, NAN, math.log(1.2)], [2, 0, 1], bounds)
        assert found.rejected.tolist() == [False, False, True] and found.weights.tolist() == [0, 0, 0]


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_correction_log_ratios_of_500_stay_finite_at_the_clamp(level: str) -> None:
    limits = CorrectionSettings("tis", level, cap=1e30)
    found = _corrected([500.0, -500.0], [1, 1], limits)
    assert found.weights.tolist() == [math.exp(20), math.exp(-20)]
    assert _corrected([math.inf, -math.inf], [1, 1], limits).weights.tolist() == [math.exp(20), math.exp(-20)]


def test_correction_clamps_the_sum_and_not_its_terms() -> None:
    # 500 - 499 = 1; of terms clamped before, 20 - 20 = 0
    found = _corrected([500.0, -499.0], [2], CorrectionSettings("tis", "sequence", cap=1e30))
    assert found.weights.tolist() == pytest.approx([math.e, math.e], rel=1e-12)
    # (60 + 0 + 0) / 3 = 20 is below exp(20.5); clamped before the mean it would be 20 / 3
    mean = CorrectionSettings(rejection="geometric", rejection_high=math.exp(10))
    assert _corrected([60.0, 0.0, 0.0], [3], mean).rejected.tolist() == [True]


def test_correction_masked_nan_and_infinity_reach_nothing() -> None:
    old = torch.tensor([NAN, 0.25, math.inf, 0.5], dtype=torch.float64)
    rollout = torch.tensor([0.0, 0.25, math.inf, NAN], dtype=torch.float64)
    mask, lens = torch.tensor([False, True, False, False]), torch.tensor([4])
    limits = CorrectionSettings("icepop", "sequence", low=0.5, high=2.0, rejection="geometric", rejection_high=2.0)
    found = rollout_correction(old, rollout, mask, lens, limits)
    assert found.weights.tolist() == [0, 1, 0, 0] and found.rejected.tolist() == [False]
    assert rollout_mismatch(old, rollout, mask).mean_abs == 0


@pytest.mark.parametrize("name", ["tis", "tis sequence", "icepop", "icepop sequence"])
def test_correction_trainable_nan_stays_visible(name: str) -> None:
    old, mask = torch.tensor([NAN, 0.0]), torch.tensor([True, True])
    found = rollout_correction(old, torch.zeros(2), mask, torch.tensor([1, 1]), EACH_SETTING[name])
    assert found.weights.isnan().tolist() == [True, False]


def test_correction_weights_are_detached_and_float32_unless_float64() -> None:
    old = torch.zeros(2, requires_grad=True)
    mask, lens = torch.tensor([True, True]), torch.tensor([2])
    found = rollout_correction(old, torch.ones(2), mask, lens, EACH_SETTING["tis"])
    assert not found.weights.requires_grad and found.weights.dtype == torch.float32
    low = rollout_correction(old.bfloat16(), torch.ones(2), mask, lens, EACH_SETTING["tis"])
    assert low.weights.dtype == torch.float32
    assert rollout_correction(old.double(), torch.ones(2), mask, lens, EACH_SETTING["tis"]).weights.dtype == torch.float64


def _correct(pair: LogProbPair, given_settings: CorrectionSettings) -> RolloutCorrection:
    return rollout_correction(pair.old, pair.rollout, pair.mask, pair.lens, given_settings)


def _rejoined(pair: LogProbPair, order: list[int]) -> LogProbPair:
    """Its samples in another order."""
    lens = pair.lens.tolist()
    columns = (torch.cat([x[:0], *(x.split(lens)[s] for s in order)]) for x in (pair.old, pair.rollout, pair.mask))
    return LogProbPair(*columns, pair.lens[order])


@EACH
@FEW
@given(LENS, st.integers(0, 9999), st.sampled_from([0.3, 200.0]))
def test_correction_random_samples_equal_the_reference(name: str, lens: list[int], seed: int, spread: float) -> None:
    pair = random_log_probs(seed, lens=lens, spread=spread)
    found = _correct(pair, EACH_SETTING[name])
    weights, masks = found.weights.split(lens), pair.mask.split(lens)
    for (old, rollout), own, mask, rejected in zip(pair.trainable(), weights, masks, found.rejected.tolist(), strict=True):
        assert rejected == reference.is_rejected(old, rollout, EACH_SETTING[name])
        expected = reference.correction_weights(old, rollout, EACH_SETTING[name])
        assert own[mask].tolist() == pytest.approx(expected, rel=1e-9)
        assert own[~mask].eq(0).all()


@EACH
@FEW
@given(LENS, st.integers(0, 9999))
def test_correction_permuting_samples_permutes_it(name: str, lens: list[int], seed: int) -> None:
    pair = random_log_probs(seed, lens=lens)
    order = torch.randperm(len(lens), generator=torch.Generator().manual_seed(seed)).tolist()
    whole, found = _correct(pair, EACH_SETTING[name]), _correct(_rejoined(pair, order), EACH_SETTING[name])
    pieces = whole.weights.split(lens)
    assert torch.equal(found.weights, torch.cat([pair.old[:0], *(pieces[s] for s in order)]))
    assert torch.equal(found.rejected, whole.rejected[order])


@EACH
@FEW
@given(LENS, st.integers(0, 9999))
def test_correction_leaving_out_masked_tokens_changes_nothing(name: str, lens: list[int], seed: int) -> None:
    pair = random_log_probs(seed, lens=lens)
    counts = torch.tensor([int(mask.sum()) for mask in pair.mask.split(lens)], dtype=torch.int64)
    bare = LogProbPair(pair.old[pair.mask], pair.rollout[pair.mask], pair.mask[pair.mask], counts)
    whole, found = _correct(pair, EACH_SETTING[name]), _correct(bare, EACH_SETTING[name])
    assert torch.equal(whole.weights[pair.mask], found.weights) and torch.equal(whole.rejected, found.rejected)


def _gap(*log_ratios: float) -> tuple[Tensor, Tensor, Tensor]:
    gap = torch.tensor(log_ratios, dtype=torch.float64)
    return gap, torch.zeros_like(gap), ~gap.isnan()


def test_mismatch_matches_hand_values() -> None:
    found = rollout_mismatch(*_gap(math.log(2.0), NAN, -math.log(4.0)))
    # ratios 2 and 1/4: k3 (2 - 1 - ln 2 + 1/4 - 1 + ln 4) / 2 = (1/4 + ln 2) / 2; ESS (9/4)^2 / (2 (4 + 1/16))
    assert found.num_tokens == 2
    assert found.mean_abs == pytest.approx(1.5 * math.log(2.0), rel=1e-12)
    assert found.max_abs == pytest.approx(math.log(4.0), rel=1e-12)
    assert found.k3 == pytest.approx((0.25 + math.log(2.0)) / 2, rel=1e-12)
    assert found.ess == pytest.approx(5.0625 / 8.125, rel=1e-12)


def test_mismatch_log_ratios_of_500_stay_finite_with_k3_at_the_clamp() -> None:
    found = rollout_mismatch(*_gap(500.0, -500.0))
    assert (found.mean_abs, found.max_abs) == (500, 500)
    assert found.k3 == pytest.approx((math.exp(20) - 1 - 20 + math.exp(-20) - 1 + 20) / 2, rel=1e-12)
    assert found.ess == pytest.approx(0.5, rel=1e-6)


def test_mismatch_needs_no_gradient_of_the_log_probs() -> None:
    old = torch.zeros(2, requires_grad=True)
    assert rollout_mismatch(old, torch.ones(2), torch.tensor([True, True])).mean_abs == 1


@FEW
@given(LENS, st.integers(0, 9999), st.sampled_from([0.3, 200.0]))
def test_mismatch_merged_over_parts_equals_the_reference_of_all_tokens(lens: list[int], seed: int, spread: float) -> None:
    pair = random_log_probs(seed, lens=lens, spread=spread)
    merged = rollout_mismatch(pair.old[:0], pair.rollout[:0], pair.mask[:0])
    for columns in zip(*(x.split(lens) for x in (pair.old, pair.rollout, pair.mask)), strict=True):
        merged = merged.merge(rollout_mismatch(*columns))
    expected = reference.mismatch_figures(pair.old[pair.mask].tolist(), pair.rollout[pair.mask].tolist())
    assert (merged.mean_abs, merged.max_abs, merged.k3, merged.ess) == pytest.approx(expected, rel=1e-9, abs=1e-15)
