"""Answers that are right in another form, wrong ones, and those that no one can compute."""

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from slime_ppo.rewards.base import RewardFailure, RewardInput, RewardSpec
from slime_ppo.rewards.math import MathReward, _marked
from slime_ppo.rewards.runner import RewardRunner
from slime_ppo.types.sample import FinishReason, Prompt, Sample, one_version

ENDLESS = r"\boxed{9^{9^{9^9}}}"


@pytest.fixture(scope="module")
def reward() -> MathReward:
    return MathReward()


def score(reward: MathReward, label: str | None, response: str) -> float | RewardFailure:
    one = np.ones(1, np.int32)
    [result] = reward([RewardInput(0, "", response, label, {}, FinishReason.STOP, one, one)])
    return result


@pytest.mark.parametrize(
    ("label", "response"),
    [
        ("72", r"4 + 5 = 9, so \boxed{72}."),
        ("48/2 = 24 and 48 + 24 = 72\n#### 72", "48 and 24 make 72"),
        ("#### 1,234", "#### 1234"),
        ("72", "First 5.\n#### 72\n"),
        ("72", "#### 5\nNo, wait.\n#### 72"),
        ("72.", "#### 72."),
        ("72", "#### **72.0**"),
        ("1000", r"\boxed{1\,000}"),
        ("-3", "The answer is \N{MINUS SIGN}3."),
        ("391", r"\boxed{17 \times 23}"),
        ("72", r"\boxed{72.}"),
        ("72", r"\boxed{5} no, wait: \boxed{72.0} apples, of 99"),
        ("72", r"\boxed{72} and I began \boxed{9"),
        (r"\boxed{\frac{1}{2}}", r"\boxed{0.5}"),
        ("1/2", r"\boxed{\dfrac{2}{4}}"),
        (r"\{1, 2\}", r"\boxed{\{2, 1\}}"),
        ("1, 2", r"\boxed{2, 1}"),
        ("(1, 2)", r"\boxed{(1,2)}"),
        ("5", r"\boxed{x = 5}"),
        ("18", r"It costs \boxed{\$18.00}"),
        ("50%", r"\boxed{0.5}"),
        (r"2\sqrt{3}", r"$\boxed{\sqrt{12}}$"),
        ("x^2 + 2x + 1", r"\boxed{(x+1)^2}"),
        ("-3", "So x is -3."),
        ("3/4", "The answer is $\\frac{3}{4}$."),
        ("7", r"\boxed{\boxed{7}}"),
        (r"\text{Monday}", r"\boxed{monday}"),
        ("yes", "The answer is: Yes."),
        ("no", "The answer is: No."),
        ("B", r"\boxed{B}"),
        ("B", r"\boxed{\text{(B)}}"),
        ("B", "A is wrong.\n#### (b)"),
        ("(B)", "I took A first. The answer is B."),
        ("B", "The answer is A. No: the correct answer is **(B)**. Paris it is."),
        ("B", "**Answer:** B"),
        ("#### B", "Answer: $B$\n"),
        ("B", "Answer: \\(B\\)"),
        ("B", "**Answer:**\n\n**B**\n"),
        ("B", "The correct option is (B)."),
        ("B", "The answer is B) Paris"),
        ("B", "Answer: **(B)** Paris, a city. It isn't Rome."),
        ("B", r"\boxed{\textbf{(B) } 12}"),
        ("b", "#### B: none of the above"),
        ("yes", "**Yes**"),
        ("New York", r"\boxed{\text{new  york}}"),
        ("New York", "The final answer is: New York. It is large."),
        ("St. Louis", "The answer is St. Louis. It is large."),
        ("Zürich", "The answer is “zürich”!"),
        ("none of the above", "#### None of the above."),
        ("ab", r"\boxed{ba}"),
    ],
)
def test_math_right_answer_is_paid(reward: MathReward, label: str, response: str) -> None:
    assert score(reward, label, response) == 1.0


@pytest.mark.parametrize(
    ("label", "response"),
    [
        ("72", r"\boxed{73}"),
        ("72", r"72 is it. \boxed{5}"),
        ("72", "#### 5, not 72"),
        ("72", r"\boxed{71, 72, 73}"),
        ("72", r"\boxed{72 \text{ or } 73}"),
        ("72", "I had 72 and then 5"),
        ("72", ""),
        ("72", r"\boxed{}"),
        ("72", "I do not know"),
        ("72", r"\boxed{72" + "+0" * 300 + "}"),
        ("1/3", r"\boxed{0.333}"),
        ("(1, 2)", r"\boxed{(2, 1)}"),
        (r"\{1, 2\}", r"\boxed{\{1, 2, 3\}}"),
        ("Paris", r"\boxed{pairs}"),
        ("yes", r"\boxed{no}"),
        ("no", r"\boxed{on}"),
        ("yes", "5"),
        ("B", "B"),
        ("B", "It may be B, it may be C."),
        ("B", "The answer is B. The answer is C."),
        ("B", "The answer is not B."),
        ("B", "The answer is A, B, C or D"),
        ("B", r"The answer is B. \boxed{C}"),
        ("B", "#### A B C D"),
        ("B", "The answer is C) Paris"),
        ("B", "The answer is Paris (B)"),
        ("B", "Answer: B) or C)"),
        ("B", "Answer: B) Paris C) Rome"),
        ("B", r"\boxed{B: A, C, D}"),
        ("B", "#### B) not a"),
        ("B", "Answer:\nA\nB"),
        ("x", "#### x: y"),
        ("x", r"\boxed{-x}"),
        ("B", r"\boxed{A = B}"),
        ("x", "#### x!"),
        ("x", "The answer is 2x/2"),
        ("New York", "New York"),
        ("New York", "The answer is York New"),
        ("New York", "The answer is London, New York, Paris."),
        ("New York", r"\boxed{New York or Paris}"),
        ("yes", "The answer is yes or no"),
        ("yes", "The answer is no, I said yes"),
        ("72", r"\boxed{" + "{" * 5000),
        ("72", r"\boxed{(((72}"),
        ("72", r"\boxed{72} or \boxed{9**9**9**9}"),
    ],
)
def test_math_wrong_answer_is_not_paid(reward: MathReward, label: str, response: str) -> None:
    assert score(reward, label, response) == 0.0


def test_math_label_that_is_none_is_no_reward(reward: MathReward) -> None:
    assert score(reward, None, "5") == RewardFailure("needs a label to compare with, and the prompt has none (--label-key)")
    assert score(reward, "####", "5") == RewardFailure("found no answer in the label '####'")
    assert score(reward, " ", "5") == RewardFailure("found no answer in the label ' '")


@pytest.mark.parametrize(
    ("label", "response"),
    [("72", r"\boxed{" * 4000), ("yes", r"\boxed{abc" + " " * 1500 + "x}"), ("New York", "answer is. " * 4000)],
)
def test_math_response_of_repetitions_takes_no_time(reward: MathReward, label: str, response: str) -> None:
    began = time.process_time()
    assert score(reward, label, response) == 0.0
    assert time.process_time() - began < 2.0, "the search went over the text again and again"


def test_math_box_is_closed_by_its_own_brace_alone() -> None:
    assert _marked(r"\boxed{x \{ y} and }") == r"x \{ y"
    assert _marked(r"} \boxed{1 \boxed{2} 3} { \boxed{4 {5}") == "2"
    assert _marked(r"\boxed{\frac{1}{2}} }") == r"\frac{1}{2}"


@pytest.mark.parametrize("response", [r"\boxed{0.125}", "so it is 0.125"])
def test_math_equality_is_found_in_any_thread(reward: MathReward, response: str) -> None:
    """math-verify's own time limit would raise here: its signal needs the main thread."""
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(score, reward, "1/8", response).result() == 1.0


def sample(sample_id: int, response: str) -> Sample:
    ids, numbers = np.ones(2, np.int32), np.zeros(2, np.float32)
    return Sample(
        sample_id=sample_id,
        group_id=sample_id,
        trajectory_id=sample_id,
        prompt=Prompt(sample_id + 100, "how many?", ids, label="... #### 72"),
        response_ids=ids,
        response_text=response,
        rollout_log_probs=numbers,
        support=None,
        loss_mask=np.ones(2, np.bool_),
        finish=FinishReason.STOP,
        weight_versions=one_version(0, 2),
    )


def test_math_endless_expression_is_cut_in_time_in_any_thread_and_named(caplog: pytest.LogCaptureFixture) -> None:
    """In a batch with a right answer, scored from a thread, where a signal could not end it. It counts as a wrong answer."""
    samples = [sample(0, "#### 72"), sample(1, ENDLESS), sample(2, "73")]
    spec = RewardSpec("slime_ppo.rewards.math.MathReward", "--rm-type math")
    runner = RewardRunner(spec, num_workers=1, batch_size=2, timeout_s=2.0, on_bad_sample="error", on_timeout="zero")
    with runner, ThreadPoolExecutor(1) as thread:
        runner.start()
        outcome = thread.submit(runner.score, samples).result(timeout=60)
    found = [(one.sample_id, one.reward, one.reward_cut) for one in outcome.samples]
    assert found == [(0, 1.0, False), (1, 0.0, True), (2, 0.0, False)]
    assert outcome.num_dropped == 0
    told = "1 of 3 samples count as 0 (--on-reward-timeout zero), sample 1 (prompt row 101: 'how many?', response "
    assert any(message.startswith(told) for message in caplog.messages), caplog.messages
