import numpy as np
import pytest

from slime_ppo.rewards.base import RewardInput
from slime_ppo.rewards.vader import VaderReward
from slime_ppo.types.sample import FinishReason


def scored(prompt: str, response: str) -> float:
    (reward,) = VaderReward()(
        [RewardInput(0, prompt, response, None, {}, FinishReason.LENGTH, np.ones(2, np.int32), np.ones(3, np.int32))]
    )
    return reward


def test_vader_happy_word_gives_the_compound_score() -> None:
    """By hand: "great" has valence 3.1 in the lexicon; compound = 3.1 / sqrt(3.1^2 + 15) = 0.6249."""
    assert scored("The clerk put", " a great letter") == pytest.approx(0.6249, abs=1e-4)


def test_vader_unhappy_word_is_negative() -> None:
    assert scored("The clerk put", " a horrible letter") < -0.5


def test_vader_neutral_and_empty_text_score_zero() -> None:
    assert scored("The clerk put", " the letter on the desk") == 0.0
    assert scored("The clerk put", "") == 0.0


def test_vader_prompt_is_not_paid() -> None:
    assert scored("A great, wonderful, lovely day", " and then") == 0.0
