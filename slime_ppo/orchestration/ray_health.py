"""Waiting for Ray calls so that a failure anywhere ends the wait, and is told once, with its cause."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from slime_ppo.errors import ParallelError, SlimePpoError
from slime_ppo.orchestration.failures import is_echo

# a dead rank and its peers' broken collectives fail within moments of each other
_SETTLE_S = 2.0
# Ray reports an error raised by a process's constructor as a death, too
_CREATION_MARK = "creation task"


@dataclass(frozen=True)
class Call:
    """One remote call: its result, and who runs it, for messages ("actor rank 1")."""

    ref: "ray.ObjectRef[Any]"
    who: str


def gather(
    calls: Sequence[Call],
    *,
    phase: str,
    timeout_s: float,
    watched: Sequence[Call] = (),
    limit: str = "--call-timeout-s",
    on_done: Callable[[Call], None] = lambda call: None,
) -> list[Any]:
    """The results in order; `on_done` is told of each call that has succeeded, as it does.

    When any call fails, or a process behind `watched` (calls that never return while it lives) dies, the others get a
    moment to fail too; then the most telling cause is raised: a dead process, then an error of our own or any Python
    error, then a broken collective, which is mostly an echo. Raises ParallelError, or the rank's own SlimePpoError type.
    """
    pending = [call.ref for call in calls]
    deadline = time.monotonic() + timeout_s
    guards = [call.ref for call in watched]
    while pending:
        ready, _ = ray.wait(pending + guards, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            late = ", ".join(call.who for call in calls if call.ref in pending)
            raise ParallelError(f"{phase} took longer than {timeout_s:g} s ({limit}): no answer from {late}")
        # all that has finished by now, not only the one that ended the wait: a failure must not slip by beside a success
        done, pending = ray.wait(pending, num_returns=len(pending), timeout=0)
        if ready[0] in guards or any(_failure(ref) is not None for ref in done):
            raise _most_telling(calls, watched, phase)
        for call in calls:
            if call.ref in done:
                on_done(call)
    return ray.get([call.ref for call in calls])


def check_alive(watched: Sequence[Call], phase: str) -> None:
    """Raise as `gather` does when a process behind `watched` has died; for waits that are not Ray's."""
    ready, _ = ray.wait([call.ref for call in watched], num_returns=1, timeout=0)
    if ready:
        raise _most_telling([], watched, phase)


def _failure(ref: "ray.ObjectRef[Any]") -> Exception | None:
    """Why a finished call failed, None when it did not, or has not finished."""
    try:
        ray.get(ref, timeout=0)
    except GetTimeoutError:
        return None
    except Exception as error:
        return error
    return None


def _most_telling(calls: Sequence[Call], watched: Sequence[Call], phase: str) -> SlimePpoError:
    waited_for = calls or watched
    ray.wait([call.ref for call in waited_for], num_returns=len(waited_for), timeout=_SETTLE_S)
    failures = [(call.who, error) for call in [*calls, *watched] if (error := _failure(call.ref)) is not None]
    if not failures:
        return ParallelError(f"a process ended during {phase} without an error")
    who, error = min(failures, key=lambda failure: _rank(failure[1]))
    others = sorted({name for name, _ in failures} - {who})
    echo = f" (then failed too: {', '.join(others)})" if others else ""
    if isinstance(error, RayActorError) and _CREATION_MARK in str(error):
        return ParallelError(f"{who} could not be started: {str(error).strip().splitlines()[-1]}")
    if isinstance(error, RayActorError):
        return ParallelError(
            f"{who} died during {phase}{echo}: its process ended without a Python error (killed, out of memory, or a crash in "
            "native code). Its log is in the run folder's logs"
        )
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, SlimePpoError):
        return type(cause)(f"{cause} [{who}, {phase}]{echo}")
    return ParallelError(
        f"{who} failed during {phase}{echo}: {type(cause).__name__}: {cause}. The traceback is in the run folder's logs"
    )


def _rank(error: Exception) -> int:
    """0 dead process, 1 an error of its own, 2 an echo: a broken collective, or another rank's bad news."""
    if isinstance(error, RayActorError):
        return 0
    return 2 if is_echo(error) else 1
