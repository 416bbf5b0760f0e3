"""The sampler against hand-computed draws, a plain joint rule, and the distribution it claims to draw from."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_ppo.ppo_utils.off_policy import rollout_mismatch
from slime_ppo.ppo_utils.support_rows import TokenSupports
from slime_ppo.ppo_utils.top_p import support_and_vocab_log_probs
from slime_ppo.rollout.embedded.sampler import (
    FIRST_CANDIDATES,
    Draw,
    RaceNoise,
    draw_full,
    draw_greedy,
    draw_restricted,
    sampler_of,
)
from slime_ppo.types.sample import SamplingParams
from tests.helpers.engine_harness import joint_support

CPU = torch.device("cpu")


def _logits(*probs: float) -> torch.Tensor:
    return torch.tensor([probs], dtype=torch.float32).log()


def _noise(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float32)


def _drawn_noise(num_rows: int, vocab_size: int, *, seed: int) -> torch.Tensor:
    return torch.empty(num_rows, vocab_size).exponential_(generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("noise", "token"), [([1, 1, 1, 1, 1], 2), ([1e-9, 1, 1, 0.4, 1e-9], 3), ([1e-9, 0.1, 0.3, 0.2, 1e-9], 1), ([1, 1, 9, 2, 1], 1)]
)
def test_draw_full_hand_race_picks_the_largest_probability_over_noise(noise: list[float], token: int) -> None:
    # Probabilities 0, 1/4, 1/2, 1/4, 0; over the noise: (.25, .5, .25), (.25, .5, .625), (2.5, 1.67, 1.25), (.25, .06, .125)
    # in the middle. The tokens of probability 0 are never drawn, whatever their noise.
    draw = draw_full(_logits(0.0, 0.25, 0.5, 0.25, 0.0), _noise(noise), temperature=1.0)
    assert draw.tokens.tolist() == [token]
    assert draw.log_probs.item() == pytest.approx(np.log([0.0001, 0.25, 0.5, 0.25][token]), abs=1e-6)


def test_draw_full_temperature_two_takes_the_root_of_probabilities() -> None:
    # sqrt(.64), sqrt(.36) = .8, .6 -> 4/7, 3/7: .571 against .612 over the noise (at temperature 1 .64 against .51).
    draw = draw_full(_logits(0.64, 0.36), _noise([1, 0.7]), temperature=2.0)
    assert draw.tokens.tolist() == [1]
    assert draw.log_probs.item() == pytest.approx(np.log(3 / 7), abs=1e-6)


def test_draw_greedy_ignores_temperature_and_reports_unit_temperature_log_prob() -> None:
    draw_next = sampler_of(SamplingParams(1, temperature=0.0, top_k=3), [5], vocab_size=3, device=CPU)
    draw = draw_next(_logits(0.2, 0.7, 0.1), [True])
    assert draw.tokens.tolist() == [1]
    assert draw.log_probs.item() == pytest.approx(np.log(0.7), abs=1e-6)
    assert draw.kept is None and draw.full_log_probs is None


def test_draw_restricted_hand_example_renormalises_over_joint_support() -> None:
    # Sorted .4 (id 2), .3 (id 0), .2 (id 3), .1 (id 1); cumulative before: 0, .4, .7, .9. top_p .65 keeps ids 2 and 0.
    logits = _logits(0.3, 0.1, 0.4, 0.2).repeat(2, 1)
    noise = _noise([1, 1, 1, 1], [0.7, 0.01, 1, 0.01])
    draw = draw_restricted(logits, noise, temperature=1.0, top_k=3, top_p=0.65, min_p=0.0)
    assert draw.kept is not None
    assert draw.kept.ids.tolist() == [2, 0, 2, 0]
    assert draw.kept.counts.tolist() == [2, 2]
    # Over the noise of ids 2 and 0: .4, .3 and .4, .429; the small noise of ids 1 and 3 is outside. Renormalised: 4/7, 3/7.
    assert draw.tokens.tolist() == [2, 0]
    assert draw.log_probs.tolist() == pytest.approx([np.log(4 / 7), np.log(3 / 7)], abs=1e-6)
    assert draw.full_log_probs is not None
    assert draw.full_log_probs.tolist() == pytest.approx([np.log(0.4), np.log(0.3)], abs=1e-6)


def test_draw_restricted_joint_rule_is_not_the_sequential_one() -> None:
    # Cumulative before: 0, .4, .7. Joint top_k 2, top_p .5 keeps 2; sequential would see .571 > .5 after the first, and
    # keep 2 as well; with top_p .42 joint keeps 2 (.4 <= .42), sequential (.571 > .42) keeps 1.
    draw = draw_restricted(_logits(0.4, 0.3, 0.3), torch.ones(1, 3), temperature=1.0, top_k=2, top_p=0.42, min_p=0.0)
    assert draw.kept is not None
    assert draw.kept.counts.tolist() == [2]


@pytest.mark.parametrize(
    ("min_p", "top_k", "top_p", "kept"),
    [(0.5, 0, 1.0, [2, 0, 3]), (0.51, 0, 1.0, [2, 0]), (0.2, 3, 1.0, [2, 0, 3]), (0.2, 0, 0.65, [2, 0]), (1.0, 0, 1.0, [2])],
)
def test_draw_restricted_min_p_hand_example_is_joint_with_the_others(min_p: float, top_k: int, top_p: float, kept: list) -> None:
    # Sorted 8/20 (id 2), 6/20 (id 0), 4/20 (id 3), 2/20 (id 1): min_p .5 asks for 4/20. Renormalised over two, the largest would
    # be 8/14 and a sequential rule no other; but .2 after top_p .65 keeps the same two only because top_p does.
    logits = _logits(6.0, 2.0, 8.0, 4.0)
    draw = draw_restricted(logits, torch.ones(1, 4), temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p)
    assert draw.kept is not None
    assert draw.kept.ids.tolist() == kept
    weights = np.array([6.0, 2.0, 8.0, 4.0])
    assert draw.log_probs.item() == pytest.approx(np.log(8.0 / weights[kept].sum()), abs=1e-6)


def test_draw_restricted_min_p_looks_beyond_the_first_candidates() -> None:
    """A flat row keeps the whole vocabulary at any min_p."""
    size = 3 * FIRST_CANDIDATES
    draw = sampler_of(SamplingParams(1, min_p=0.9), [1], vocab_size=size, device=CPU)(torch.zeros(1, size), [True])
    assert draw.kept is not None and draw.kept.counts.tolist() == [size]
    assert draw.log_probs.item() == pytest.approx(-np.log(size), abs=1e-5)


def test_draw_restricted_ties_keep_the_lower_ids() -> None:
    draw = draw_restricted(
        torch.zeros(1, 9), _noise([1, 1, 1, 0.5, 1, 1, 1, 1, 0.01]), temperature=1.0, top_k=4, top_p=1.0, min_p=0.0
    )
    assert draw.kept is not None
    assert draw.kept.ids.tolist() == [0, 1, 2, 3]
    assert draw.tokens.tolist() == [3]


def test_draw_restricted_tokens_that_swap_ranks_keep_their_noise() -> None:
    # Ids 0 and 1 swap ranks 1 and 2. Over the noise of the ids: .31, .58, .4 and .29, .62, .4: id 1 wins both. Noise by rank
    # would let the token of rank 1 win: id 0, then id 1.
    logits = torch.cat([_logits(0.31, 0.29, 0.4), _logits(0.29, 0.31, 0.4)])
    draw = draw_restricted(logits, _noise([1, 0.5, 1], [1, 0.5, 1]), temperature=1.0, top_k=3, top_p=1.0, min_p=0.0)
    assert draw.kept is not None
    assert draw.kept.ids.tolist() == [2, 0, 1, 2, 1, 0]
    assert draw.tokens.tolist() == [1, 1]


def test_draw_restricted_agrees_with_full_draw_inside_the_support() -> None:
    """The race over fewer tokens has the same winner whenever the winner of all tokens takes part."""
    logits, noise = torch.randn(500, 40, generator=torch.Generator().manual_seed(2)), _drawn_noise(500, 40, seed=2)
    full = draw_full(logits, noise, temperature=1.0).tokens
    restricted = draw_restricted(logits, noise, temperature=1.0, top_k=20, top_p=1.0, min_p=0.0)
    assert restricted.kept is not None
    inside = (torch.from_numpy(restricted.kept.ids).view(500, 20) == full[:, None]).any(-1)
    assert 300 < inside.sum() < 500
    torch.testing.assert_close(restricted.tokens[inside], full[inside], rtol=0, atol=0)


def test_ratio_mean_of_restricted_draws_is_1_on_their_supports_and_shows_the_bias_of_the_full_vocabulary() -> None:
    """A trainer that ignores the supports scores each token by the mass of its support too little."""
    logits = 2 * torch.randn(4000, 40, generator=torch.Generator().manual_seed(4))
    draw = draw_restricted(logits, _drawn_noise(4000, 40, seed=4), temperature=0.9, top_k=0, top_p=0.85, min_p=0.0)
    assert draw.kept is not None and draw.full_log_probs is not None
    supports = TokenSupports(torch.from_numpy(draw.kept.ids).long(), torch.from_numpy(draw.kept.counts).long())
    options = {"vocab_size": 40, "temperature": 0.9, "group": None, "entropy": "none"}
    trainer = support_and_vocab_log_probs(logits, draw.tokens, supports, **options)
    every = torch.ones(4000, dtype=torch.bool)
    assert rollout_mismatch(trainer.log_probs, draw.log_probs, every).ratio_mean == pytest.approx(1.0, abs=1e-6)
    assert rollout_mismatch(trainer.full_log_probs, draw.full_log_probs, every).max_abs < 1e-5
    biased = rollout_mismatch(trainer.full_log_probs, draw.log_probs, every)
    assert biased.ratio_mean == pytest.approx(1 - trainer.outside_mass.mean().item(), abs=1e-6)
    assert 0.85 < biased.ratio_mean < 0.95


def test_draw_restricted_support_of_one_has_log_prob_zero() -> None:
    draw = draw_restricted(torch.randn(5, 50), _drawn_noise(5, 50, seed=1), temperature=1.0, top_k=1, top_p=1.0, min_p=0.0)
    assert draw.log_probs.tolist() == [0.0] * 5


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    vocab_size=st.sampled_from([3, FIRST_CANDIDATES, FIRST_CANDIDATES + 1, 700]),
    scale=st.sampled_from([0.0, 0.3, 3.0]),
    top_k=st.sampled_from([0, 1, 7, 5000]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.013, 0.3, 1.0]),
)
def test_draw_restricted_support_equals_plain_rule(
    seed: int, vocab_size: int, scale: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = scale * torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(seed))
    noise = _drawn_noise(3, vocab_size, seed=seed)
    draw = draw_restricted(logits, noise, temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p)
    assert draw.kept is not None
    rows = np.split(draw.kept.ids, np.cumsum(draw.kept.counts)[:-1])
    for probs, ids, token in zip(logits.log_softmax(-1).exp().numpy(), rows, draw.tokens.tolist(), strict=True):
        expected = joint_support(probs.astype(np.float64), top_k=top_k, top_p=top_p if top_p < 1 else 2.0, min_p=min_p)
        # A sum that meets top_p to the last bit may fall on either side.
        assert abs(len(ids) - len(expected)) <= (1 if top_p < 1 else 0)
        both = min(len(ids), len(expected))
        assert ids[:both].tolist() == expected[:both]
        assert token in ids


def _noise_of_many_seeds(num_rows: int, vocab_size: int) -> torch.Tensor:
    return RaceNoise(range(num_rows), vocab_size, CPU).step([True] * num_rows)


def _noise_of_many_steps(num_rows: int, vocab_size: int) -> torch.Tensor:
    noise = RaceNoise([3], vocab_size, CPU)
    return torch.cat([noise.step([True]).clone() for _ in range(num_rows)])


@pytest.mark.parametrize("noise_of", [_noise_of_many_seeds, _noise_of_many_steps])
def test_draw_full_frequencies_match_probabilities(noise_of: Callable[[int, int], torch.Tensor]) -> None:
    """20,000 draws: each frequency within four standard errors."""
    probs = np.array([0.5, 0.2, 0.15, 0.1, 0.05])
    num_draws = 20_000
    draw = draw_full(_logits(*probs).expand(num_draws, -1), noise_of(num_draws, 5), temperature=1.0)
    frequencies = np.bincount(draw.tokens.numpy(), minlength=5) / num_draws
    assert (np.abs(frequencies - probs) < 4 * np.sqrt(probs * (1 - probs) / num_draws)).all()


def test_draw_full_and_top_k_frequencies_agree_on_the_support() -> None:
    """The restricted sampler draws from the full distribution conditioned on the support."""
    num_draws = 20_000
    logits = _logits(0.1, 0.4, 0.3, 0.2).expand(num_draws, -1)
    draw = draw_restricted(logits, _noise_of_many_seeds(num_draws, 4), temperature=1.0, top_k=2, top_p=1.0, min_p=0.0)
    frequencies = np.bincount(draw.tokens.numpy(), minlength=4) / num_draws
    np.testing.assert_allclose(frequencies, [0, 4 / 7, 3 / 7, 0], atol=4 * np.sqrt(0.25 / num_draws))


def _distributions(draw: Draw, logits: torch.Tensor) -> torch.Tensor:
    """float64 [B, V]: what the rows drew from, 0 outside the support."""
    log_probs = logits.double()
    if draw.kept is not None:
        rows = np.repeat(np.arange(len(logits)), draw.kept.counts)
        outside = torch.ones_like(logits).bool()
        outside[rows, draw.kept.ids.astype(np.int64)] = False
        log_probs = log_probs.masked_fill(outside, float("-inf"))
    return log_probs.softmax(-1)


@pytest.mark.parametrize(
    ("sampling", "perturbation"),
    [(SamplingParams(1), 1e-6), (SamplingParams(1), 1e-3), (SamplingParams(1, top_p=0.9, top_k=64), 1e-3)],
    ids=["full-rounding", "full", "restricted"],
)
def test_draws_of_perturbed_logits_flip_no_oftener_than_total_variation_allows(
    sampling: SamplingParams, perturbation: float
) -> None:
    """20,000 draws of one seed each from p and from q, V = 1024: P(flip) <= 2 TV / (1 + TV) (Moulton, Jiang 2018).

    At 1e-6 that allows hundredths of a flip in all; at 1e-3 it allows tens, where an inverse CDF has hundreds.
    """
    num_rows, vocab_size, num_batches = 2000, 1024, 10
    generator = torch.Generator().manual_seed(7)
    flips, expected = 0, 0.0
    for batch in range(num_batches):
        logits = 2 * torch.randn(num_rows, vocab_size, generator=generator)
        shifted = logits + perturbation * torch.randn(num_rows, vocab_size, generator=generator)
        seeds = range(batch * num_rows, (batch + 1) * num_rows)
        first, second = (
            sampler_of(sampling, seeds, vocab_size=vocab_size, device=CPU)(row_logits, [True] * num_rows)
            for row_logits in (logits, shifted)
        )
        flips += int((first.tokens != second.tokens).sum())
        variation = (_distributions(first, logits) - _distributions(second, shifted)).abs().sum(-1) / 2
        expected += float((2 * variation / (1 + variation)).sum())
    # Four standard deviations of a Poisson count, and two for float32 rounding.
    assert flips <= expected + 4 * expected**0.5 + 2


def test_draw_full_nan_logits_give_nan_log_prob_and_a_token_inside_the_vocabulary() -> None:
    for sampling in (SamplingParams(1), SamplingParams(1, top_k=2), SamplingParams(1, top_p=0.5)):
        draw = sampler_of(sampling, [1], vocab_size=5, device=CPU)(torch.full((1, 5), float("nan")), [True])
        assert 0 <= draw.tokens.item() < 5
        assert np.isnan(draw.log_probs.item())


def test_draw_greedy_bfloat16_logits_are_normalised_in_float32() -> None:
    logits = torch.randn(2, 200).to(torch.bfloat16)
    torch.testing.assert_close(draw_greedy(logits).log_probs, logits.float().log_softmax(-1).max(-1).values)


def test_race_noise_depends_on_own_seed_and_own_steps_alone() -> None:
    """An odd V puts every row at another alignment; the values must not feel it."""
    together, alone = RaceNoise([11, 12, 13], 1023, CPU), RaceNoise([13], 1023, CPU)
    for others_run in (True, False, True):
        noise = together.step([others_run, True, True]).clone()
        torch.testing.assert_close(alone.step([True])[0], noise[2], rtol=0, atol=0)
        assert len({tuple(row) for row in noise.tolist()}) == 3
    assert noise.dtype == torch.float32 and (noise > 0).all()


def test_race_noise_is_the_stream_of_the_rows_own_generator() -> None:
    generator = torch.Generator().manual_seed(12)
    expected = [torch.empty(6).exponential_(generator=generator) for _ in range(2)]
    noise = RaceNoise([12, 5], 6, CPU)
    for row in expected:
        torch.testing.assert_close(noise.step([True, True])[0], row, rtol=0, atol=0)


def test_race_noise_of_a_row_that_is_not_running_draws_nothing() -> None:
    noise = RaceNoise([3, 4], 8, CPU)
    first = noise.step([True, True]).clone()
    torch.testing.assert_close(noise.step([False, True])[0], first[0], rtol=0, atol=0)
    resumed = noise.step([True, True])[0].clone()
    fresh = RaceNoise([3], 8, CPU)
    fresh.step([True])
    torch.testing.assert_close(resumed, fresh.step([True])[0], rtol=0, atol=0)
