"""Rollout correction, bypass and baselines as the actor wires them; whole iterations are in test_oracle and test_layout_parity."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from slime_ppo.config.correction import CorrectionConfig
from slime_ppo.config.ppo import PpoConfig
from slime_ppo.data.schedule import split_rows
from slime_ppo.parallel.layout import ParallelLayout
from slime_ppo.parallel.worker_settings import BatchSettings
from slime_ppo.ppo_utils.reference_estimators import mismatch_figures
from slime_ppo.types.rollout_batch import FINISH_CODES, RolloutBatch
from slime_ppo.types.sample import FinishReason
from tests.dist.backends.cases import RANKS, Case, make_batch
from tests.dist.backends.conftest import CaseMaker
from tests.dist.backends.models import drawn_nearby
from tests.helpers.rank_pool import RankError, RankPool

BYPASS = CorrectionConfig(use_rollout_log_probs=True)


def _score(pool: RankPool, case: Case, batch: RolloutBatch) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    return pool.run(f"{RANKS}:score", world=1, case=case, batch=batch)[0]


def test_log_probs_mismatch_statistics_equal_the_reference_and_reach_effective_sample_size(
    megatron_pool: RankPool, make_case: CaseMaker
) -> None:
    """Also without a correction: these metrics are always on."""
    case = make_case(PpoConfig())
    batch = drawn_nearby(make_batch(), case.actor_folder, case.temperature)
    columns, stats = _score(megatron_pool, case, batch)
    order = columns["old_log_probs"][batch.loss_mask].tolist(), batch.rollout_log_probs[batch.loss_mask].tolist()
    mean, largest, k3, ess = mismatch_figures(*order)
    assert stats["logprob_gap_mean"] == pytest.approx(mean, rel=1e-5)
    assert stats["logprob_gap_max"] == pytest.approx(largest, rel=1e-5)
    assert stats["mismatch_k3"] == pytest.approx(k3, rel=1e-5)
    assert stats["ess_rho"] ** 2 / (stats["ess_n"] * stats["ess_rho2"]) == pytest.approx(ess, rel=1e-5)
    assert 0.3 < ess < 0.95
    assert "logprob_gap_full_max" not in stats
    assert "rollout_weights" not in columns and "rejected" not in columns and "rejected_samples" not in stats


def test_log_probs_gap_over_the_full_vocabulary_is_measured_where_both_sides_have_it(
    megatron_pool: RankPool, make_case: CaseMaker
) -> None:
    batch = make_batch(restricted=True)
    columns, stats = _score(megatron_pool, make_case(PpoConfig()), batch)
    assert "logprob_gap_full_max" not in stats
    shifted = columns["old_full_log_probs"].copy()
    trained = np.flatnonzero(batch.loss_mask)
    shifted[trained[:2]] -= np.float32([0.25, 0.5])
    shifted[np.flatnonzero(~batch.loss_mask)] += 9.0
    _, stats = _score(megatron_pool, make_case(PpoConfig()), batch.with_columns(rollout_full_log_probs=shifted))
    assert stats["logprob_gap_full_max"] == pytest.approx(0.5, rel=1e-5)
    assert stats["logprob_gap_full_mean"] == pytest.approx(0.75 / len(trained), rel=1e-5)
    _, stats = _score(megatron_pool, make_case(PpoConfig(kl_support="sampled")), batch.with_columns(rollout_full_log_probs=shifted))
    assert "logprob_gap_full_max" not in stats


@pytest.mark.parametrize("restricted", [False, True])
def test_bypass_old_log_probs_are_the_engines_and_only_the_reference_computes(
    megatron_pool: RankPool, make_case: CaseMaker, *, restricted: bool
) -> None:
    batch = make_batch(restricted=restricted)
    ppo = PpoConfig(use_kl_loss=True, kl_loss_coef=0.1)
    computed, _ = _score(megatron_pool, make_case(ppo), batch)
    bypassed, stats = _score(megatron_pool, make_case(ppo, correction=BYPASS), batch)
    assert bypassed.keys() == {"old_log_probs", "ref_log_probs"}
    assert bypassed["old_log_probs"].tolist() == batch.rollout_log_probs.tolist()
    assert bypassed["ref_log_probs"].tolist() == computed["ref_log_probs"].tolist()
    assert "entropy" not in stats and "logprob_gap_mean" not in stats and "ess_n" not in stats
    # over the full vocabulary the engine's restricted log-probs have nothing to be compared with
    assert ("kl" in stats) == (not restricted)


def test_bypass_restricted_sampler_has_a_kl_over_the_supports(megatron_pool: RankPool, make_case: CaseMaker) -> None:
    batch = make_batch(restricted=True)
    ppo = PpoConfig(kl_coef=0.1, kl_support="sampled")
    columns, stats = _score(megatron_pool, make_case(ppo, correction=BYPASS), batch)
    gaps = (batch.rollout_log_probs - columns["ref_log_probs"])[batch.loss_mask]
    assert stats["kl"] == pytest.approx(gaps.mean(dtype=np.float64), rel=1e-5)


def _with_truncated_row_masked(batch: RolloutBatch) -> RolloutBatch:
    """Row 1 was cut and trains on no token (--truncation-policy mask), row 3 ended by itself and trains on none either."""
    mask, at = np.array(batch.loss_mask), batch.offsets("response_token")
    mask[at[1] : at[2]] = False
    assert [FINISH_CODES[code] for code in batch.finish[[1, 3]]] == [FinishReason.LENGTH, FinishReason.STOP]
    return batch.with_columns(loss_mask=mask, old_log_probs=batch.rollout_log_probs)


@pytest.mark.parametrize("layout", [ParallelLayout(1), ParallelLayout(2)], ids=["one_rank", "dp2"])
@pytest.mark.parametrize(("keeps", "expected"), [(False, 0.0), (True, 1.5)])
def test_baseline_of_masked_truncated_sample_is_kept_only_on_request(
    megatron_pool: RankPool, make_case: CaseMaker, tmp_path: Path, *, keeps: bool, expected: float, layout: ParallelLayout
) -> None:
    """The group of rows 0, 1, 3 has rewards 1, -0.5, 2: alone row 0 gets 0, with row 1 it gets 1 - (-0.5); row 3 never counts."""
    ppo = PpoConfig(advantage_estimator="rloo", truncation_policy="mask", masked_in_baseline=keeps)
    case = make_case(ppo).on(layout, BatchSettings(2, None), tmp_path)
    batch = _with_truncated_row_masked(make_batch())
    found = megatron_pool.run(f"{RANKS}:advantage_columns", world=layout.num_ranks, case=case, batch=batch)
    own = batch.select(np.arange(7)[:: layout.num_ranks])
    first = found[0]["advantages"][: batch.response_lens[0]]
    assert first[own.loss_mask[: len(first)]] == pytest.approx(np.full(own.trainable_tokens[0], expected))
    # rows 2 and 5 are one trajectory with one vote: the group 21 has rewards 0.3, -1, 0.7
    third = found[0]["advantages"][own.offsets("response_token")[list(own.sample_ids).index(72)]]
    assert third == pytest.approx(0.3 - (-1.0 + 0.7) / 2)


def test_kl_trajectory_counts_a_trajectory_whose_first_part_was_rejected_on_another_rank(
    megatron_pool: RankPool, make_case: CaseMaker, tmp_path: Path
) -> None:
    """Rows 0 and 5 are one trajectory; row 0 is rejected on its rank, and the other one, which holds row 5, counts it."""
    case = make_case(PpoConfig(kl_coef=0.1), correction=CorrectionConfig(rejection="sequence"))
    batch = drawn_nearby(make_batch(), case.actor_folder, case.temperature)
    batch = replace(batch, trajectory_ids=np.array([0, 1, 2, 3, 4, 0, 6]))
    drawn, starts = np.array(batch.rollout_log_probs), batch.offsets("response_token")
    drawn[starts[0]] -= 1.5  # of the log-ratios one moves out of the bounds, and one into them
    drawn[starts[5]] += 1.5
    case, batch = case.on(ParallelLayout(2), BatchSettings(3, None), tmp_path), batch.with_columns(rollout_log_probs=drawn)
    ranks = megatron_pool.run(f"{RANKS}:score", world=2, case=case, batch=batch)
    shares = [np.concatenate(share) for share in split_rows(np.arange(7), batch.total_lens, dp_size=2, micro_batch_size=3)]
    assert [set(share) & {0, 5} for share in shares] in ([{0}, {5}], [{5}, {0}])
    for (columns, stats), rows in zip(ranks, shares, strict=True):
        assert columns["rejected"].tolist() == np.isin(rows, [0, 6]).tolist()
        own = batch.select(rows).with_columns(rejected=columns["rejected"])
        kl = (columns["old_log_probs"] - columns["ref_log_probs"])[own.kept_mask].sum(dtype=np.float64)
        # row 3 has no trainable token, rows 0 and 6 are rejected
        num_trajectories = np.isin(rows, [1, 2, 4, 5]).sum()
        assert stats["kl_trajectory"] == pytest.approx(kl / num_trajectories, rel=1e-12)


def test_estimator_whose_function_is_missing_stops_the_actor_at_its_start(megatron_pool: RankPool, make_case: CaseMaker) -> None:
    case = make_case(PpoConfig(advantage_estimator="tests.dist.backends.own_estimators.MISSING"))
    with pytest.raises(RankError, match="ConfigError: the path of a spec: .*own_estimators.* has no 'not_there'"):
        _score(megatron_pool, case, make_batch())
