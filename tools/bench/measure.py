"""Candidates of one computation measured side by side: time, peak memory, error, and what each of them has to reach.

Time is CPU time of the one thread that computes, the least over rounds in which the candidates take turns; a turn repeats a
quick one. Memory is what torch's allocator handed out during one run and was alive at a time: torch.profiler's allocation
events, the same in every run, with the buffers that operators make and drop inside.
"""

import ctypes
import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

Scale = Literal["small", "full"]

# A turn of a candidate is one run, or as many as fit in this.
TURN_S = 0.05
# mallopt's names for what it is told
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


@dataclass(frozen=True)
class Figures:
    """`ms` of one run; `peak` in multiples of the case's input, None where it was not measured; `error` as the case defines it."""

    ms: float
    peak: float | None
    error: float


@dataclass(frozen=True)
class Reach:
    """A figure to reach: how the table says it, and whether a candidate's figures do, given those of all by name."""

    text: str
    met: Callable[[Figures, dict[str, Figures]], bool]


def time_within(share: float, base: str) -> Reach:
    return Reach(f"time {share:g}x {base}", lambda own, all_: own.ms <= share * all_[base].ms)


def peak_within(multiple: float) -> Reach:
    return Reach(f"peak {multiple:g}x", lambda own, _: own.peak is not None and own.peak <= multiple)


def peak_within_share(share: float, base: str) -> Reach:
    def met(own: Figures, all_: dict[str, Figures]) -> bool:
        theirs = all_[base].peak
        return own.peak is not None and theirs is not None and own.peak <= share * theirs

    return Reach(f"peak {share:g}x {base}'s", met)


def error_within(limit: float) -> Reach:
    return Reach(f"error {limit:g}", lambda own, _: own.error <= limit)


def error_no_worse(base: str) -> Reach:
    return Reach(f"error <= {base}'s", lambda own, all_: own.error <= all_[base].error)


@dataclass(frozen=True)
class Candidate:
    """One way to compute a case. `before` restores what `run` uses up, outside the clock. A `slow` one is run in the first
    round only and its memory is not measured."""

    name: str
    run: Callable[[], Any]
    reach: tuple[Reach, ...] = ()
    before: Callable[[], None] | None = None
    slow: bool = False


@dataclass(frozen=True)
class Limit:
    """What the machine needs for the unavoidable part: `run` is timed, `factor` times that is the limit."""

    name: str
    run: Callable[[], Any]
    factor: float = 1.0


@dataclass(frozen=True)
class Case:
    """Candidates for the same result. `bases` name those that others are compared with; `error` of a result is what `error_is`
    says. `input_bytes` None: memory is not measured. `given` picks from a result what every candidate must hand over, which is
    left out of the peak."""

    title: str
    candidates: tuple[Candidate, ...]
    bases: tuple[str, ...]
    error_is: str
    error: Callable[[Any], float]
    limit: Limit | None = None
    input_bytes: int | None = None
    given: Callable[[Any], Sequence[Tensor]] = lambda _: ()


@dataclass(frozen=True)
class Measured:
    """Figures of each candidate of a case by name, and the time of its limit."""

    case: Case
    figures: dict[str, Figures]
    limit_ms: float | None


def measure(case: Case, *, repeats: int) -> Measured:
    """All figures of a case."""
    errors, peaks = {}, {}
    for candidate in case.candidates:  # first, so that lazy imports and caches are warm when times are taken
        result, peak = _inspected(candidate, case)
        errors[candidate.name], peaks[candidate.name] = case.error(result), peak
        del result
    runs: dict[str, Candidate] = {candidate.name: candidate for candidate in case.candidates}
    if case.limit is not None:
        runs[case.limit.name] = Candidate(case.limit.name, case.limit.run)
    best = dict.fromkeys(runs, float("inf"))
    for number in range(repeats):
        for name, candidate in runs.items():
            if number == 0 or not candidate.slow:
                best[name] = min(best[name], _turn(candidate))
    figures = {name: Figures(1e3 * best[name], peaks[name], errors[name]) for name in errors}
    limit_ms = None if case.limit is None else 1e3 * best[case.limit.name] * case.limit.factor
    return Measured(case, figures, limit_ms)


def _inspected(candidate: Candidate, case: Case) -> tuple[Any, float | None]:
    """The result of a candidate, and its peak in multiples of the input."""
    if candidate.before is not None:
        candidate.before()
    if case.input_bytes is None or candidate.slow:
        return candidate.run(), None
    result, num_bytes = peak_bytes(candidate.run, case.given)
    return result, num_bytes / case.input_bytes


def _turn(candidate: Candidate) -> float:
    """The least seconds of one run."""
    best, stop = float("inf"), time.thread_time() + TURN_S
    gc.collect()
    while best == float("inf") or (time.thread_time() < stop and not candidate.slow):
        if candidate.before is not None:
            candidate.before()
        start = time.thread_time()
        result = candidate.run()
        best = min(best, time.thread_time() - start)
        del result
    return best


def peak_bytes(run: Callable[[], Any], given: Callable[[Any], Sequence[Tensor]]) -> tuple[Any, int]:
    """The result of a run, and the most bytes alive at a time that it allocated, those of the tensors `given` not counted."""
    gc.collect()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own lines would land in the table
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as prof:
        result = run()
    left_out = {tensor.untyped_storage().data_ptr() for tensor in given(result)}
    sizes = [(event.ptr, event.alloc_size) for event in _allocations(prof.profiler.kineto_results.experimental_event_tree())]
    for pointer in left_out:
        # an earlier tensor may have lain at the same place
        place = max(place for place, (where, size) in enumerate(sizes) if where == pointer and size > 0)
        sizes[place] = (pointer, 0)
    now = top = 0
    for _, size in sizes:
        now += size
        top = max(top, now)
    return result, top


def _allocations(tree: Sequence[Any]) -> Iterator[Any]:
    """Allocations and frees of a tree of profiler events, in order of time."""
    found, events = [], list(tree)
    while events:
        event = events.pop()
        events.extend(event.children)
        if event.tag.name == "Allocation":
            found.append((event.start_time_ns, event.extra_fields))
    return (fields for _, fields in sorted(found, key=lambda one: one[0]))


def keep_freed_memory(num_bytes: int) -> None:
    """From now on `malloc` reuses what is freed, as the caching allocators of GPUs do, and holds `num_bytes` to begin with; what
    was freed before goes back to the system.

    Else each large buffer is new pages from the system, and their first touch (on a virtual machine 5 to 30 times a copy)
    is most of what a naive form and ours are both timed for.
    """
    libc = ctypes.CDLL(None)
    if not (libc.mallopt(_M_MMAP_MAX, 0) and libc.mallopt(_M_TRIM_THRESHOLD, -1)):
        raise SystemExit("this C library has no mallopt of glibc's kind; expected glibc, which torch's Linux wheels need")
    gc.collect()
    libc.malloc_trim(0)
    torch.zeros(num_bytes, dtype=torch.uint8)
