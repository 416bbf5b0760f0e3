"""The part of reward scoring that runs in a worker process: import the user's function, call it, check what it returned."""

import asyncio
import inspect
import math
import multiprocessing
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from numbers import Real
from typing import cast

import numpy as np

from slime_ppo.errors import ConfigError
from slime_ppo.registry import import_dotted
from slime_ppo.rewards.base import RewardFailure, RewardFn, RewardInput, RewardResult, RewardSpec


@dataclass(frozen=True)
class BatchScores:
    """What one call of a reward function came to; plain values only, so that it always crosses the process border.

    `rewards`, `process_rewards` and `problems` have one entry per input. Process rewards are float32 [R], None where the function
    gave none; a problem other than "" says why there is no reward. `failure` is set when the call as a whole raised, which may be
    the fault of one sample; `broken` when it returned something that is no list with one entry per input, so that nobody's
    reward can be told.
    """

    rewards: tuple[float, ...] = ()
    process_rewards: tuple[np.ndarray | None, ...] = ()
    problems: tuple[str, ...] = ()
    failure: str | None = None
    broken: str | None = None


def prepare_worker(spec: RewardSpec, log_file: str | None) -> None:
    """Runs once in a fresh worker, outside any timeout.

    Never raises, or the pool would start workers without end; `import_problem` tells what is wrong with the function.
    """
    if log_file is not None:
        target = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(target, 1)
        os.dup2(target, 2)
        os.close(target)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import_problem(spec)


def import_problem(spec: RewardSpec) -> str:
    """Why the reward function cannot be used, "" when it can."""
    try:
        _load(spec)
    except ConfigError as error:
        return str(error)
    except (Exception, SystemExit) as error:
        return f"{spec.origin}: {spec.path} cannot be used, building it raised {_describe(error)}"
    return ""


def score_batch(spec: RewardSpec, inputs: Sequence[RewardInput]) -> BatchScores:
    """Call the reward function on `inputs` and check its answer."""
    try:
        returned: object = _load(spec)(inputs)
        if inspect.isawaitable(returned):
            returned = asyncio.run(_wait_for(returned))
    except (Exception, SystemExit) as error:
        return BatchScores(failure=f"raised {_describe(error)}")
    if not isinstance(returned, list | tuple | np.ndarray):
        return BatchScores(broken=f"returned {_shown(returned)} for {len(inputs)} samples")
    if len(returned) != len(inputs):
        return BatchScores(broken=f"returned {len(returned)} rewards for {len(inputs)} samples")
    problems = tuple(_problem(value, len(item.response_ids)) for value, item in zip(returned, inputs, strict=True))
    usable = [RewardResult(0.0) if problem else _result(value) for value, problem in zip(returned, problems, strict=True)]
    return BatchScores(
        rewards=tuple(float(result.reward) for result in usable),
        process_rewards=tuple(
            None if result.process_rewards is None else np.array(result.process_rewards, np.float32) for result in usable
        ),
        problems=problems,
    )


def _end_with_parent() -> None:
    """A driver that was killed cannot close its workers, and one that hangs in user code does not see that the pipe closed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@cache
def _load(spec: RewardSpec) -> RewardFn:
    found = import_dotted(spec.path, origin=spec.origin)
    if isinstance(found, type):
        found = found(**dict(spec.arguments))
    if not callable(found):
        raise ConfigError(f"{spec.origin}: {spec.path} is a {type(found).__name__}, expected a function or a class with __call__")
    return cast(RewardFn, found)


async def _wait_for(awaitable: object) -> object:
    return await awaitable  # type: ignore[misc]


def _result(value: object) -> RewardResult:
    return value if isinstance(value, RewardResult) else RewardResult(cast(float, value))


def _problem(value: object, num_tokens: int) -> str:
    """Why `value` is no reward of a response of `num_tokens` tokens, "" when it is."""
    if isinstance(value, RewardFailure):
        return value.reason
    result = _result(value)
    problem = _no_number(result.reward)
    if problem:
        return f"returned {problem}"
    given: object = result.process_rewards
    if given is None:
        return ""
    if not isinstance(given, list | tuple | np.ndarray):
        return f"returned process rewards {_shown(given)}, expected a list"
    if len(given) != num_tokens:
        return f"returned {len(given)} process rewards for {num_tokens} response tokens"
    for token, process_reward in enumerate(given):
        problem = _no_number(process_reward)
        if problem:
            return f"returned process reward {problem} at response token {token}"
    return ""


def _no_number(value: object) -> str:
    """`value` as shown in an error when it is no finite number, "" when it is."""
    if not isinstance(value, Real):
        return _shown(value)
    # rewards are stored in float32
    if not math.isfinite(float(value)) or abs(float(value)) > float(np.finfo(np.float32).max):
        return str(float(value))
    return ""


def _shown(value: object) -> str:
    return "None" if value is None else f"{_shortened(repr(value))} (a {type(value).__name__})"


def _describe(error: BaseException) -> str:
    """Type, text, and the innermost line of the user's code."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    place = f" at {last.tb_frame.f_code.co_filename}:{last.tb_lineno}" if last is not None else ""
    return f"{type(error).__name__}: {_shortened(str(error))}{place}"


def _shortened(text: str) -> str:
    return text if len(text) <= 200 else text[:200] + "..."
