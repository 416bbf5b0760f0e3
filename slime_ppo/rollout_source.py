"""Where the samples of a rollout come from: an engine that answers prompts, or files that another run has left.

The training loop knows the protocol alone, so that a run on files starts no engine, and generates nothing.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import yaml

from slime_ppo.config.debug import rollout_file
from slime_ppo.config.fields import shown
from slime_ppo.config.model_shape import ModelShape
from slime_ppo.config.root import OPTION_BY_KEY, Config
from slime_ppo.data.source import DataSource
from slime_ppo.data.tokenizer import TextTokenizer
from slime_ppo.errors import DataError, RewardError
from slime_ppo.orchestration.engine_keeper import EngineKeeper
from slime_ppo.rewards.runner import RewardRunner
from slime_ppo.rollout.dump import read_dump, read_header
from slime_ppo.rollout.generate import SampleBuilder, without_aborted
from slime_ppo.tracking.clock import RunClock
from slime_ppo.types.sample import Prompt, Sample, SamplingParams

_log = logging.getLogger(__name__)

# what decides which samples a rollout has, and how the trainer scores them
_MUST_AGREE = (
    "run.seed",
    "data.shuffle",
    "rollout.rollout_batch_size",
    "rollout.n_samples_per_prompt",
    "rollout.rollout_temperature",
    "rollout.rollout_top_p",
    "rollout.rollout_top_k",
    "rollout.rollout_min_p",
    "ppo.truncation_policy",
)


class RolloutSource(Protocol):
    """One rollout after the other, in order."""

    def connect(self) -> None:
        """Once, before the first rollout."""
        ...

    def use_weights(self, version: int) -> None:
        """The actor's present weights are `version`: whatever generates has them afterwards."""
        ...

    def collect(self, rollout_id: int, version: int) -> list[Sample]:
        """The rollout's rewarded samples, made by the weights of `version`; bad ones are an error or left out (--on-bad-sample)."""
        ...

    def abort(self) -> None:
        """Nobody waits for answers any more."""
        ...

    def state_dict(self) -> dict[str, object]:
        """The place in the prompts, as DataSource has it."""
        ...


@dataclass(frozen=True)
class GeneratedRollouts:
    """Draws prompts, has the engine answer them, and the reward function judge the answers. `check_alive` raises when a process of
    the run has died."""

    keeper: EngineKeeper
    samples: SampleBuilder
    rewards: RewardRunner
    prompts: DataSource
    sampling: SamplingParams
    num_prompts: int
    n_samples_per_prompt: int
    clock: RunClock
    check_alive: Callable[[], None]

    def connect(self) -> None:
        self.keeper.connect()

    def use_weights(self, version: int) -> None:
        self.keeper.push(version)

    def collect(self, rollout_id: int, version: int) -> list[Sample]:
        prompts = self.prompts.next_prompts(self.num_prompts)
        with self.clock.phase("generate"):
            answered = self.samples.generate(
                rollout_id, prompts, self.sampling, n_samples_per_prompt=self.n_samples_per_prompt, purpose="rollout"
            )
        trainable = without_aborted(answered, version)
        with self.clock.phase("reward"):
            outcome = self.rewards.score(trainable, check=self.check_alive)
        if not outcome.samples:
            first = next(iter(outcome.reasons.values()))
            raise RewardError(f"all {len(trainable)} samples were dropped, nothing to train on; the first reward call {first}")
        return list(outcome.samples)

    def abort(self) -> None:
        self.keeper.engine.abort()

    def state_dict(self) -> dict[str, object]:
        return self.prompts.state_dict()


class DumpedRollouts:
    """The rollouts of another run, from its files (--load-debug-rollout-data). Prompts are drawn all the same, so that the run is
    at the same place of its data, and compared."""

    def __init__(self, where: str, prompts: DataSource, *, num_prompts: int, clock: RunClock) -> None:
        self._where, self._prompts, self._num_prompts, self._clock = where, prompts, num_prompts, clock
        self._warned = False

    def connect(self) -> None:
        """Nothing to connect."""

    def use_weights(self, version: int) -> None:
        """Nothing generates."""

    def collect(self, rollout_id: int, version: int) -> list[Sample]:
        """Raises DataError for a file that cannot be read, or prompts that this run would not have drawn."""
        drawn = self._prompts.next_prompts(self._num_prompts)
        with self._clock.phase("generate"):
            samples = list(read_dump(rollout_file(self._where, rollout_id)).samples)
        _check_prompts(f"rollout {rollout_id} of {self._where}", samples, drawn)
        self._warn_of_version(rollout_id, samples, version)
        return samples

    def abort(self) -> None:
        """Nothing generates."""

    def state_dict(self) -> dict[str, object]:
        return self._prompts.state_dict()

    def _warn_of_version(self, rollout_id: int, samples: Sequence[Sample], version: int) -> None:
        others = {span.version for sample in samples for span in sample.weight_versions} - {version}
        if others and not self._warned:
            self._warned = True
            _log.warning(
                "rollout %d of %s was generated by weight version %s, the trainer is at %d: it trains off-policy from here on",
                *(rollout_id, self._where, ", ".join(map(str, sorted(others))), version),
            )


def rollout_sampling(config: Config, tokenizer: TextTokenizer) -> SamplingParams:
    """The rollouts' sampler; evaluation has its own."""
    rollout = config.rollout
    return SamplingParams(
        max_new_tokens=rollout.rollout_max_response_len,
        temperature=rollout.rollout_temperature,
        top_p=rollout.rollout_top_p,
        top_k=rollout.sampler_top_k,
        min_p=rollout.rollout_min_p,
        stop_token_ids=tuple(tokenizer.eos_ids),
    )


def check_dumps(config: Config, where: str, shape: ModelShape, *, first: int = 0) -> None:
    """Every rollout of the run from `first` on has its file, made by a model of this shape with the settings that decide what
    samples are. Headers only are read, before any device is used. Raises DataError."""
    for rollout_id in range(first, config.run.num_rollout):
        file = rollout_file(where, rollout_id)
        if not file.is_file():
            fewer = f", or lower --num-rollout to {rollout_id}" if rollout_id > first else ""
            raise DataError(
                f"--load-debug-rollout-data {where}: no file of rollout {rollout_id} ({file}). The run trains on rollouts "
                f"{first} to {config.run.num_rollout - 1}: save the missing ones{fewer}"
            )
        header = read_header(file)
        if header.rollout_id != rollout_id:
            raise DataError(f"{file} holds rollout {header.rollout_id}, expected {rollout_id}: was it renamed?")
        _check_values(str(file), "the model", dict(header.model), shape.plain_values())
        made, now = _flat_values(header.config), config.values()
        _check_values(
            str(file),
            "the run that made it",
            {OPTION_BY_KEY[key].flag: made[key] for key in _MUST_AGREE if key in made},
            {OPTION_BY_KEY[key].flag: now[key] for key in _MUST_AGREE},
        )


def _check_values(file: str, what: str, made: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for name, value in made.items():
        if name in now and now[name] != value:
            raise DataError(
                f"{file}: {what} has {name} {shown(value)}, this run has {shown(now[name])}. Rollouts are trained on with the "
                "model and the settings that they were made with"
            )


def _flat_values(config_yaml: str) -> dict[str, Any]:
    return {f"{section}.{name}": value for section, block in yaml.safe_load(config_yaml).items() for name, value in block.items()}


def _check_prompts(what: str, samples: Sequence[Sample], drawn: Sequence[Prompt]) -> None:
    """Samples may have been dropped; those that are there answer prompts that were drawn."""
    ids = {prompt.index: prompt.token_ids for prompt in drawn}
    for prompt in {id(sample.prompt): sample.prompt for sample in samples}.values():
        if prompt.index not in ids:
            raise DataError(
                f"{what} answers row {prompt.index} of its prompt file ({prompt.text[:60]!r}), and this run draws other rows. "
                "Give the --prompt-data and the data options that the rollouts were made with"
            )
        if not np.array_equal(ids[prompt.index], prompt.token_ids):
            raise DataError(
                f"{what}: row {prompt.index} of its prompt file is {prompt.text[:60]!r}, {len(prompt.token_ids)} tokens, and this "
                f"run has other tokens there ({len(ids[prompt.index])}). Give the --prompt-data and the tokenizer "
                "(--hf-checkpoint) that the rollouts were made with"
            )
