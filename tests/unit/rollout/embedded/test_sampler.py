"""The sampler against hand-computed draws, a plain joint rule, and the distribution it claims to draw from."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_ppo.rollout.embedded.sampler import (
    FIRST_CANDIDATES,
    LARGEST_UNIFORM,
    draw_full,
    draw_greedy,
    draw_restricted,
    row_uniforms,
    sampler_of,
)
from slime_ppo.types.sample import SamplingParams
from tests.helpers.engine_harness import joint_support


def _logits(*probs: float) -> torch.Tensor:
    return torch.tensor([probs], dtype=torch.float32).log()


def _uniforms(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 1), (0.24, 1), (0.26, 2), (0.74, 2), (0.76, 3), (LARGEST_UNIFORM, 3)])
def test_draw_full_hand_cdf_picks_the_interval_of_the_uniform(uniform: float, token: int) -> None:
    # Probabilities 0, 1/4, 1/2, 1/4, 0: cumulative 0, .25, .75, 1, 1. The tokens of probability 0 are never drawn.
    draw = draw_full(_logits(0.0, 0.25, 0.5, 0.25, 0.0), _uniforms(uniform), temperature=1.0)
    assert draw.tokens.tolist() == [token]
    assert draw.log_probs.item() == pytest.approx(np.log([0.0001, 0.25, 0.5, 0.25][token]), abs=1e-6)


def test_draw_full_temperature_two_takes_the_root_of_probabilities() -> None:
    # sqrt(.64), sqrt(.36) = .8, .6 -> 4/7, 3/7.
    draw = draw_full(_logits(0.64, 0.36), _uniforms(0.58), temperature=2.0)
    assert draw.tokens.tolist() == [1]
    assert draw.log_probs.item() == pytest.approx(np.log(3 / 7), abs=1e-6)


def test_draw_greedy_ignores_temperature_and_reports_unit_temperature_log_prob() -> None:
    draw = sampler_of(SamplingParams(max_new_tokens=1, temperature=0.0, top_k=3))(_logits(0.2, 0.7, 0.1), _uniforms(0.999))
    assert draw.tokens.tolist() == [1]
    assert draw.log_probs.item() == pytest.approx(np.log(0.7), abs=1e-6)
    assert draw.kept is None


def test_draw_restricted_hand_example_renormalises_over_joint_support() -> None:
    # Sorted .4 (id 2), .3 (id 0), .2 (id 3), .1 (id 1); cumulative before: 0, .4, .7, .9. top_p .65 keeps ids 2 and 0.
    logits = _logits(0.3, 0.1, 0.4, 0.2).repeat(2, 1)
    draw = draw_restricted(logits, _uniforms(0.5, 0.6), temperature=1.0, top_k=3, top_p=0.65)
    assert draw.kept is not None
    assert draw.kept.ids.tolist() == [2, 0, 2, 0]
    assert draw.kept.counts.tolist() == [2, 2]
    # Within the support: .4/.7 = .571, .3/.7 = .429.
    assert draw.tokens.tolist() == [2, 0]
    assert draw.log_probs.tolist() == pytest.approx([np.log(4 / 7), np.log(3 / 7)], abs=1e-6)


def test_draw_restricted_joint_rule_is_not_the_sequential_one() -> None:
    # Cumulative before: 0, .4, .7. Joint top_k 2, top_p .5 keeps 2; sequential would see .571 > .5 after the first, and
    # keep 2 as well; with top_p .42 joint keeps 2 (.4 <= .42), sequential (.571 > .42) keeps 1.
    draw = draw_restricted(_logits(0.4, 0.3, 0.3), _uniforms(0.9), temperature=1.0, top_k=2, top_p=0.42)
    assert draw.kept is not None
    assert draw.kept.counts.tolist() == [2]


def test_draw_restricted_ties_keep_the_lower_ids() -> None:
    draw = draw_restricted(torch.zeros(1, 9), _uniforms(0.99), temperature=1.0, top_k=4, top_p=1.0)
    assert draw.kept is not None
    assert draw.kept.ids.tolist() == [0, 1, 2, 3]
    assert draw.tokens.tolist() == [3]


def test_draw_restricted_support_of_one_has_log_prob_zero() -> None:
    draw = draw_restricted(torch.randn(5, 50), _uniforms(0, 0.2, 0.5, 0.8, 0.99), temperature=1.0, top_k=1, top_p=1.0)
    assert draw.log_probs.tolist() == [0.0] * 5


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    vocab_size=st.sampled_from([3, FIRST_CANDIDATES, FIRST_CANDIDATES + 1, 700]),
    scale=st.sampled_from([0.0, 0.3, 3.0]),
    top_k=st.sampled_from([0, 1, 7, 5000]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]),
)
def test_draw_restricted_support_equals_plain_rule(seed: int, vocab_size: int, scale: float, top_k: int, top_p: float) -> None:
    logits = scale * torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(seed))
    draw = draw_restricted(logits, _uniforms(0.1, 0.5, 0.9), temperature=1.0, top_k=top_k, top_p=top_p)
    assert draw.kept is not None
    rows = np.split(draw.kept.ids, np.cumsum(draw.kept.counts)[:-1])
    for probs, ids, token in zip(logits.log_softmax(-1).exp().numpy(), rows, draw.tokens.tolist(), strict=True):
        expected = joint_support(probs.astype(np.float64), top_k=top_k, top_p=top_p if top_p < 1 else 2.0)
        # A sum that meets top_p to the last bit may fall on either side.
        assert abs(len(ids) - len(expected)) <= (1 if top_p < 1 else 0)
        both = min(len(ids), len(expected))
        assert ids[:both].tolist() == expected[:both]
        assert token in ids


def test_draw_full_frequencies_match_probabilities() -> None:
    """20,000 draws of a fixed seed: each frequency within four standard errors."""
    probs = np.array([0.5, 0.2, 0.15, 0.1, 0.05])
    num_draws = 20_000
    uniforms = row_uniforms([3], num_draws)[0]
    draw = draw_full(_logits(*probs).expand(num_draws, -1), uniforms, temperature=1.0)
    frequencies = np.bincount(draw.tokens.numpy(), minlength=5) / num_draws
    assert (np.abs(frequencies - probs) < 4 * np.sqrt(probs * (1 - probs) / num_draws)).all()


def test_draw_full_and_top_k_frequencies_agree_on_the_support() -> None:
    """The restricted sampler draws from the full distribution conditioned on the support."""
    num_draws = 20_000
    draw = draw_restricted(
        _logits(0.1, 0.4, 0.3, 0.2).expand(num_draws, -1), row_uniforms([4], num_draws)[0], temperature=1.0, top_k=2, top_p=1.0
    )
    frequencies = np.bincount(draw.tokens.numpy(), minlength=4) / num_draws
    np.testing.assert_allclose(frequencies, [0, 4 / 7, 3 / 7, 0], atol=4 * np.sqrt(0.25 / num_draws))


def test_draw_full_nan_logits_give_nan_log_prob_and_a_token_inside_the_vocabulary() -> None:
    for sampling in (SamplingParams(1), SamplingParams(1, top_k=2), SamplingParams(1, top_p=0.5)):
        draw = sampler_of(sampling)(torch.full((1, 5), float("nan")), _uniforms(0.5))
        assert 0 <= draw.tokens.item() < 5
        assert np.isnan(draw.log_probs.item())


def test_draw_greedy_bfloat16_logits_are_normalised_in_float32() -> None:
    logits = torch.randn(2, 200).to(torch.bfloat16)
    torch.testing.assert_close(draw_greedy(logits).log_probs, logits.float().log_softmax(-1).max(-1).values)


def test_row_uniforms_depend_on_own_seed_and_extend_without_change() -> None:
    together = row_uniforms([11, 12, 13], 6)
    torch.testing.assert_close(row_uniforms([13], 9)[0, :6], together[2], rtol=0, atol=0)
    assert len({tuple(row.tolist()) for row in together}) == 3
    assert together.dtype == torch.float64
    # numpy's Philox with seed 12: the generator that SEMANTICS 14's keys feed.
    np.testing.assert_array_equal(together[1].numpy(), np.random.Generator(np.random.Philox(12)).random(6))
