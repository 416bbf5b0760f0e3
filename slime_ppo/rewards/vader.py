"""Sentiment of the response by VADER's lexicon: cheap, and easily flattered with a few happy words."""

from collections.abc import Sequence

from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

from slime_ppo.rewards.base import RewardInput


class VaderReward:
    """VADER's compound score in [-1, 1] of the response text alone.

    Hutto and Gilbert, "VADER: A Parsimonious Rule-based Model for Sentiment Analysis of Social Media Text", ICWSM 2014. The
    prompt is left out, so that only what the policy wrote is paid. Text without a word of the lexicon scores 0.
    """

    def __init__(self) -> None:
        # reads the lexicon, 7,500 lines: once per worker process
        self._analyzer = SentimentIntensityAnalyzer()

    def __call__(self, inputs: Sequence[RewardInput]) -> list[float]:
        return [float(self._analyzer.polarity_scores(item.response)["compound"]) for item in inputs]
