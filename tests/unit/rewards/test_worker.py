"""The worker's functions called in this process: how an answer is checked. What needs processes is in test_runner."""

import numpy as np
import pytest

from slime_ppo.rewards.base import RewardInput, RewardSpec
from slime_ppo.rewards.worker import BatchScores, import_problem, score_batch
from slime_ppo.types.sample import FinishReason

FUNCTIONS = "tests.helpers.reward_functions"


def spec(name: str) -> RewardSpec:
    return RewardSpec(f"{FUNCTIONS}.{name}", "--custom-rm-path")


def score(name: str, *wishes: str) -> BatchScores:
    """Of responses of three tokens."""
    inputs = [
        RewardInput(
            index, "prompt", "xx", None, {"wish": wish}, FinishReason.STOP, np.ones(2, np.int32), np.array([4, 5, 3], np.int32)
        )
        for index, wish in enumerate(wishes)
    ]
    return score_batch(spec(name), inputs)


def test_score_numbers_are_rewards_in_order() -> None:
    assert score("by_metadata", "-", "-") == BatchScores(rewards=(2.0, 2.0), process_rewards=(None, None), problems=("", ""))


def test_score_async_function_with_results() -> None:
    assert score("asynchronous", "-", "-").rewards == (0.5, 0.5)


def test_score_array_and_bool_are_numbers() -> None:
    assert score("array", "-", "-", "-").rewards == (0.0, 1.0, 2.0)
    assert score("only_alone", "-").rewards == (1.0,)


@pytest.mark.parametrize(
    ("wish", "problem"),
    [
        ("None", "returned None"),
        ("NaN", "returned nan"),
        ("inf", "returned inf"),
        ("huge", "returned 1e+300"),
        ("text", "returned 'good' (a str)"),
    ],
)
def test_score_value_that_is_no_reward_is_a_problem_of_its_sample(wish: str, problem: str) -> None:
    scores = score("by_metadata", "-", wish, "-")
    assert (scores.rewards, scores.problems) == ((2.0, 0.0, 2.0), ("", problem, ""))


@pytest.mark.parametrize(
    ("wish", "broken"),
    [
        ("return None", "returned None for 2 samples"),
        ("return too few", "returned 1 rewards for 2 samples"),
        ("return a number", "returned 1.0 (a float) for 2 samples"),
    ],
)
def test_score_answer_without_one_entry_per_sample_is_broken(wish: str, broken: str) -> None:
    assert score("by_metadata", "-", wish) == BatchScores(broken=broken)


def test_score_process_rewards_are_float32_and_none_where_not_given() -> None:
    scores = score("process_rewards", "list", "-", "array")
    assert (scores.rewards, scores.problems) == ((1.0, 1.0, 1.0), ("", "", ""))
    first, second, third = scores.process_rewards
    assert first is not None and first.dtype == np.float32 and first.tolist() == [4, 5, 3]
    assert second is None
    assert third is not None and third.dtype == np.float32 and third.tolist() == [0, 0.5, 1]


@pytest.mark.parametrize(
    ("wish", "problem"),
    [
        ("short", "returned 2 process rewards for 3 response tokens"),
        ("NaN", "returned process reward nan at response token 1"),
        ("huge", "returned process reward 1e+300 at response token 2"),
        ("text", "returned process reward 'good' (a str) at response token 0"),
        ("number", "returned process rewards 0.5 (a float), expected a list"),
    ],
)
def test_score_process_rewards_that_do_not_fit_are_a_problem_of_their_sample(wish: str, problem: str) -> None:
    scores = score("process_rewards", "-", wish)
    assert (scores.rewards, scores.process_rewards, scores.problems) == ((1.0, 0.0), (None, None), ("", problem))


def test_score_exception_is_a_failure_with_its_place() -> None:
    failure = score("by_metadata", "-", "raise").failure
    assert failure is not None
    assert failure.startswith("raised ValueError: cannot judge this at ")
    assert "reward_functions.py:" in failure


def test_score_exit_is_a_failure() -> None:
    failure = score("by_metadata", "exit").failure
    assert failure is not None
    assert failure.startswith("raised SystemExit: 3")


def test_import_problem_of_a_good_function_is_empty() -> None:
    assert import_problem(spec("by_metadata")) == ""


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("by_metadat", "has no 'by_metadat'; did you mean 'by_metadata'?"),
        ("not_callable", "is a float, expected a function or a class with __call__"),
        ("CannotBuild", "cannot be used, building it raised OSError: no lexicon here at "),
    ],
)
def test_import_problem_says_why(name: str, reason: str) -> None:
    problem = import_problem(spec(name))
    assert problem.startswith("--custom-rm-path: ")
    assert reason in problem


def test_score_failure_is_a_problem_of_its_sample_alone() -> None:
    scores = score("failure_for_the_second", "-", "-", "-")
    assert (scores.rewards, scores.problems) == ((0.5, 0.0, 0.5), ("", "is not for me", ""))


def test_score_class_is_built_with_the_arguments_of_its_spec() -> None:
    found = RewardSpec(f"{FUNCTIONS}.WithArguments", "--custom-rm-path", (("factor", 1.5), ("label", None)))
    item = RewardInput(0, "prompt", "xx", None, {}, FinishReason.STOP, np.ones(2, np.int32), np.ones(3, np.int32))
    assert import_problem(found) == ""
    assert score_batch(found, [item]).rewards == (3.0,)
    assert "missing 1 required keyword-only argument: 'label'" in import_problem(
        RewardSpec(f"{FUNCTIONS}.WithArguments", "--custom-rm-path", (("factor", 1.5),))
    )
