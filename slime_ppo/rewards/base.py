"""What a reward function is: a callable that gets light records and gives one number for each."""

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from slime_ppo.types.sample import FinishReason, Sample


@dataclass(frozen=True)
class RewardInput:
    """What a reward function sees of a sample.

    `prompt` is the text that the policy reads, with --apply-chat-template as it was rendered, special tokens and all; `response` is
    text without special tokens; `label` and `metadata` come from the prompt file (the label key, and all other keys of the row,
    but for the prompt's and the tools'); `finish` says why the response ended; `prompt_ids` int32 [P] and `response_ids` int32 [R]
    are the tokens that the policy saw and wrote, special ones included, for functions that pay single tokens or score tokens.
    """

    sample_id: int
    prompt: str
    response: str
    label: str | None
    metadata: Mapping[str, object]
    finish: FinishReason
    prompt_ids: np.ndarray
    response_ids: np.ndarray

    @staticmethod
    def from_sample(sample: Sample) -> "RewardInput":
        return RewardInput(
            sample_id=sample.sample_id,
            prompt=sample.prompt.text,
            response=sample.response_text,
            label=sample.prompt.label,
            metadata=sample.prompt.metadata,
            finish=sample.finish,
            prompt_ids=sample.prompt.token_ids,
            response_ids=sample.response_ids,
        )


@dataclass(frozen=True)
class RewardResult:
    """The reward of one sample; a plain number says the same.

    `process_rewards`, one finite number per response token, are paid to single tokens beside the reward of the whole; what is
    paid to a masked token goes to the trainable one before it (SEMANTICS 4).
    """

    reward: float
    process_rewards: Sequence[float] | None = None


@dataclass(frozen=True)
class RewardFailure:
    """Stands for the reward of a sample that could not be scored, beside others that were; `reason` goes into the message that
    names the sample, as in "got status 400 from ...".
    """

    reason: str


RewardReturn = Sequence[RewardResult | RewardFailure | float]


class RewardFn(Protocol):
    """One reward for each input, in their order; plain or `async`.

    A dotted path may also name a class with this call: it is built once in each worker process, which is the place for what
    takes long to load.
    """

    def __call__(self, inputs: Sequence[RewardInput]) -> RewardReturn | Awaitable[RewardReturn]: ...


@dataclass(frozen=True)
class RewardSpec:
    """Where a reward function is imported from; `origin` is the flag that named it.

    `arguments` are handed to the class by keyword, pairs of name and value. `warnings` are what was noticed of its server and
    deserves a line at the start of the run.
    """

    path: str
    origin: str
    arguments: tuple[tuple[str, str | int | float | None], ...] = ()
    warnings: tuple[str, ...] = ()
