"""Reward functions for the tests of the runner; worker processes import them by dotted path."""

import os
import sys
import time
from collections.abc import Sequence

import numpy as np

from slime_ppo.rewards.base import RewardFailure, RewardInput, RewardResult

not_callable = 3.0


def by_metadata(inputs: Sequence[RewardInput]) -> object:
    """The length of the response, unless the prompt's metadata asks for something worse."""
    wishes = [str(item.metadata["wish"]) for item in inputs]
    if "raise" in wishes:
        raise ValueError("cannot judge this")
    if "exit" in wishes:
        raise SystemExit(3)
    if "die" in wishes:
        os._exit(7)
    if "sleep" in wishes:
        time.sleep(3600)
    if "return None" in wishes:
        return None
    if "return too few" in wishes:
        return [1.0] * (len(inputs) - 1)
    if "return a number" in wishes:
        return 1.0
    bad: dict[str, object] = {"None": None, "NaN": float("nan"), "inf": float("inf"), "text": "good", "huge": 1e300}
    return [bad[wish] if wish in bad else float(len(item.response)) for wish, item in zip(wishes, inputs, strict=True)]


def lower_case(inputs: Sequence[RewardInput]) -> list[float]:
    """The share of lower-case letters among the characters."""
    return [sum(map(str.islower, item.response)) / max(len(item.response), 1) for item in inputs]


def all_fields(inputs: Sequence[RewardInput]) -> list[float]:
    """1 for each input whose every field came through, else 0."""
    expected = ("prompt 0", "xx", "label 0", {"wish": "-"}, "stop", [4, 5, 6], [1, 1])
    return [float(_fields(item) == expected) for item in inputs]


def _fields(item: RewardInput) -> tuple[object, ...]:
    ids = (item.prompt_ids.tolist(), item.response_ids.tolist())
    return item.prompt, item.response, item.label, item.metadata, item.finish.value, *ids


async def asynchronous(inputs: Sequence[RewardInput]) -> list[RewardResult]:
    return [RewardResult(reward=0.5) for _ in inputs]


def process_rewards(inputs: Sequence[RewardInput]) -> list[RewardResult]:
    """Reward 1; the metadata's wish says what is paid to single tokens, "-" being nothing."""
    paid: dict[str, object] = {
        "-": None,
        "array": np.linspace(0, 1, 3),
        "short": [0.5, 0.5],
        "NaN": [0.0, float("nan"), 0.0],
        "huge": [0.0, 0.0, 1e300],
        "text": ["good", 0.0, 0.0],
        "number": 0.5,
    }
    wishes = [str(item.metadata["wish"]) for item in inputs]
    answers = [item.response_ids.tolist() if wish == "list" else paid[wish] for wish, item in zip(wishes, inputs, strict=True)]
    return [RewardResult(1.0, process_rewards=answer) for answer in answers]


def array(inputs: Sequence[RewardInput]) -> np.ndarray:
    return np.arange(len(inputs), dtype=np.float32)


def only_alone(inputs: Sequence[RewardInput]) -> list[bool]:
    if len(inputs) > 1:
        raise RuntimeError("one at a time please")
    return [True]


def noisy(inputs: Sequence[RewardInput]) -> list[float]:
    sys.stdout.write("a word from the worker\n")
    sys.stdout.flush()
    return [0.0] * len(inputs)


class CannotBuild:
    def __init__(self) -> None:
        raise OSError("no lexicon here")

    def __call__(self, inputs: Sequence[RewardInput]) -> list[float]:
        return []


def failure_for_the_second(inputs: Sequence[RewardInput]) -> list[RewardFailure | float]:
    return [RewardFailure("is not for me") if index == 1 else 0.5 for index, _ in enumerate(inputs)]


class WithArguments:
    """A class that is built with the arguments of its RewardSpec."""

    def __init__(self, *, factor: float, label: str | None) -> None:
        self._factor, self._label = factor, label

    def __call__(self, inputs: Sequence[RewardInput]) -> list[float]:
        return [self._factor * len(item.response) if self._label is None else 0.0 for item in inputs]


def none_for_the_third(inputs: Sequence[RewardInput]) -> list[float | None]:
    return [None if item.sample_id == 2 else 0.0 for item in inputs]
