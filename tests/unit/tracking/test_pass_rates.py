"""pass@k against hand-computed values and against counting all choices."""

from itertools import combinations

import pytest

from slime_ppo.tracking.pass_rates import pass_at_k, pass_rates, reported_ks


@pytest.mark.parametrize(
    ("n", "passed", "k", "expected"),
    [
        (4, 0, 2, 0.0),
        (4, 1, 1, 1 / 4),
        (4, 1, 2, 1 / 2),  # 3 of the 6 pairs hold the one that passed
        (5, 2, 3, 9 / 10),  # 1 of the 10 triples holds none of the two
        (4, 3, 2, 1.0),  # no pair without one
        (1000, 1, 500, 1 / 2),
    ],
)
def test_pass_at_k_hand_values(n: int, passed: int, k: int, expected: float) -> None:
    assert pass_at_k(n, passed, k) == pytest.approx(expected, rel=1e-12)


def test_pass_at_k_is_the_share_of_choices_with_a_passing_answer() -> None:
    for n, passed, k in [(6, 2, 3), (7, 3, 2), (5, 5, 1), (6, 1, 6)]:
        chosen = list(combinations(range(n), k))
        assert pass_at_k(n, passed, k) == pytest.approx(sum(min(one) < passed for one in chosen) / len(chosen), rel=1e-12)


@pytest.mark.parametrize(("n", "passed", "k"), [(4, 1, 5), (4, 1, 0), (4, 5, 1), (4, -1, 1)])
def test_pass_at_k_impossible_numbers_are_refused(n: int, passed: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"pass@{k} of {n} samples of which {passed} passed"):
        pass_at_k(n, passed, k)


def test_reported_ks_are_powers_of_two_and_n() -> None:
    assert [reported_ks(n) for n in (1, 2, 4, 6)] == [(), (1, 2), (1, 2, 4), (1, 2, 4, 6)]


def test_pass_rates_of_two_prompts_are_means_over_prompts_with_the_threshold_itself_passing() -> None:
    """Of prompt 5 one of four passes, of prompt 6 three of four; their answers may come mixed."""
    rewards, groups = [1.0, 0.5, 0.9, 0.0, 0.5, 0.1, 0.4, 0.7], [6, 5, 6, 5, 6, 5, 5, 6]
    rewards[groups.index(6)] = 0.49
    found = pass_rates(rewards, groups, threshold=0.5, n_samples_per_prompt=4)
    assert found == pytest.approx({"pass@1": (1 / 4 + 3 / 4) / 2, "pass@2": (1 / 2 + 1) / 2, "pass@4": 1.0}, rel=1e-12)


def test_pass_rates_prompt_that_lost_answers_counts_for_the_k_it_has_enough_for() -> None:
    rewards, groups = [1.0, 0.0, 0.0, 0.0, 0.0, 1.0], [0, 0, 0, 1, 1, 1]
    whole = pass_rates([*rewards, 0.0], [*groups, 0], threshold=1.0, n_samples_per_prompt=4)
    assert whole == pytest.approx({"pass@1": (1 / 4 + 1 / 3) / 2, "pass@2": (1 / 2 + 2 / 3) / 2, "pass@4": 1.0}, rel=1e-12)
    assert "pass@4" not in pass_rates(rewards, groups, threshold=1.0, n_samples_per_prompt=4)


def test_pass_rates_of_one_answer_per_prompt_are_not_reported() -> None:
    assert pass_rates([1.0, 0.0], [0, 1], threshold=1.0, n_samples_per_prompt=1) == {}
