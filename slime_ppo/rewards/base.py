"""What a reward function is: a callable that gets light records and gives one number for each."""

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from slime_ppo.errors import ConfigError
from slime_ppo.registry import Registry, split_dotted
from slime_ppo.types.sample import FinishReason, Sample


@dataclass(frozen=True)
class RewardInput:
    """What a reward function sees of a sample.

    `prompt` and `response` are text without special tokens; `label` and `metadata` come from the prompt file (the label key,
    and all other keys of the line); `finish` says why the response ended; `response_ids` int32 [R] are the response's tokens,
    special ones included, for functions that pay single tokens.
    """

    sample_id: int
    prompt: str
    response: str
    label: str | None
    metadata: Mapping[str, object]
    finish: FinishReason
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


RewardReturn = Sequence[RewardResult] | Sequence[float]


class RewardFn(Protocol):
    """One reward for each input, in their order; plain or `async`.

    A dotted path may also name a class with this call: it is built once in each worker process, which is the place for what
    takes long to load.
    """

    def __call__(self, inputs: Sequence[RewardInput]) -> RewardReturn | Awaitable[RewardReturn]: ...


@dataclass(frozen=True)
class RewardSpec:
    """Where a reward function is imported from; `origin` is the flag that named it."""

    path: str
    origin: str


REWARD_FUNCTIONS: Registry[str] = Registry("reward function", {"vader": "slime_ppo.rewards.vader.VaderReward"})


def resolve_reward(rm_type: str | None, custom_rm_path: str | None) -> RewardSpec:
    """The reward function that a run asked for; `custom_rm_path` ("package.module.function") wins over the name `rm_type`.

    Nothing is imported here: `RewardRunner.start` does that, in a worker. Raises ConfigError for an unknown name (with the
    known ones and the nearest), for a path of another form, and when neither is given.
    """
    if custom_rm_path is not None:
        origin = "--custom-rm-path"
        split_dotted(custom_rm_path, origin=origin)
        return RewardSpec(custom_rm_path, origin)
    if rm_type is None:
        raise ConfigError(
            f"no reward function: give --rm-type ({', '.join(REWARD_FUNCTIONS.names())}), or --custom-rm-path "
            "package.module.function for your own"
        )
    return RewardSpec(REWARD_FUNCTIONS.resolve(rm_type, origin="--rm-type"), f"--rm-type {rm_type}")
