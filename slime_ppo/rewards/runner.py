"""Reward functions in worker processes of their own: they may be slow, crash or hang without taking the run along."""

import logging
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, wait
from concurrent.futures import TimeoutError as TaskTimeoutError
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from types import TracebackType
from typing import Literal

from pebble import ProcessExpired, ProcessFuture, ProcessPool

from slime_ppo.errors import ConfigError, RewardError
from slime_ppo.rewards.base import RewardInput, RewardSpec
from slime_ppo.rewards.worker import BatchScores, import_problem, prepare_worker, score_batch
from slime_ppo.types.sample import Sample

_log = logging.getLogger(__name__)

# a reward function may import a deep-learning framework or load a model
_START_TIMEOUT_S = 300.0
_CHECK_INTERVAL_S = 0.5


@dataclass(frozen=True)
class RewardOutcome:
    """Samples with their rewards and process rewards, in the order given; `reasons` tells by sample id why the `num_dropped`
    others are left out."""

    samples: tuple[Sample, ...]
    num_dropped: int
    reasons: Mapping[int, str]


class _Watch:
    """Runs the caller's check every _CHECK_INTERVAL_S, counted over all waits: each of many calls may be shorter than that."""

    def __init__(self, check: Callable[[], None] | None) -> None:
        self._check = check
        self._due = time.monotonic() + _CHECK_INTERVAL_S

    def wait(self, task: ProcessFuture[BatchScores]) -> None:
        """Return when the task is done or the next check was due, and went well."""
        wait([task], timeout=max(0.0, self._due - time.monotonic()))
        if time.monotonic() >= self._due:
            if self._check is not None:
                self._check()
            self._due = time.monotonic() + _CHECK_INTERVAL_S


@dataclass(frozen=True, eq=False)
class _Call:
    """A call of the reward function that was handed to a pool."""

    pool: ProcessPool
    task: ProcessFuture[BatchScores]
    watch: _Watch

    def result(self) -> BatchScores:
        """Wait for it. A pool that broke may have lost the task without telling: hence the look at the pool."""
        while not self.task.done():
            self.watch.wait(self.task)
            if not self.pool.active and not self.task.done():
                raise BrokenProcessPool
        return self.task.result()


class RewardRunner:
    """Scores samples with one reward function, in `num_workers` processes.

    The function is called on at most `batch_size` samples at a time and killed when a call takes longer than `timeout_s`. A call
    that raised, was killed or died is repeated one sample at a time, to find the sample at fault; what those calls return is
    used. A sample that has no reward then, or got None, NaN, an infinity or no number, or process rewards that are not one
    finite number per response token, is an error, or with `on_bad_sample` "drop" left out and counted. `on_timeout` says it for
    those that took too long alone (None: as `on_bad_sample`), and may be "zero": reward 0, marked `reward_cut`. An answer that
    is not one entry per sample is an error always.

    Ctrl-C does not reach the workers; they end with `close`, or with this process however it ends. What they print goes to
    `log_file`, if given. The script that the driver runs must guard its start with `if __name__ == "__main__"`, because
    workers import it.
    """

    def __init__(
        self,
        spec: RewardSpec,
        *,
        num_workers: int,
        batch_size: int,
        timeout_s: float,
        on_bad_sample: Literal["error", "drop"],
        on_timeout: Literal["error", "drop", "zero"] | None = None,
        log_file: Path | None = None,
    ) -> None:
        self._spec = spec
        self._num_workers, self._batch_size, self._timeout_s = num_workers, batch_size, timeout_s
        self._on_bad_sample, self._on_timeout = on_bad_sample, on_timeout or on_bad_sample
        self._log_file = None if log_file is None else str(log_file)
        self._pool: ProcessPool | None = None
        self._calls: set[_Call] = set()
        self._closed = False

    def start(self) -> None:
        """Start the workers and wait until one has imported the reward function: call it before any device is used.

        Raises ConfigError with the reason when the function cannot be imported or built.
        """
        try:
            problem = self._live_pool().schedule(import_problem, args=(self._spec,), timeout=_START_TIMEOUT_S).result()
        except (TaskTimeoutError, ProcessExpired, BrokenProcessPool) as error:
            self.close()
            raise ConfigError(
                f"{self._spec.origin}: {self._spec.path} cannot be used, importing it {_died(error, _START_TIMEOUT_S)}. Import "
                'it by hand to see why; a driver script of your own needs `if __name__ == "__main__":` around its start'
            ) from error
        if problem:
            self.close()
            raise ConfigError(problem)

    def score(self, samples: Sequence[Sample], check: Callable[[], None] | None = None) -> RewardOutcome:
        """The samples with their rewards.

        `check` is called about every half second of waiting, from this thread. A SlimePpoError from it ends the wait and the
        calls and is raised (not so a TimeoutError, which is what a call that took too long raises).
        Raises RewardError that names the sample at fault, or all samples of a call whose answer has the wrong length.
        """
        watch = _Watch(check)
        batches = [samples[start : start + self._batch_size] for start in range(0, len(samples), self._batch_size)]
        calls = [self._call(batch, watch) for batch in batches]
        scored: list[Sample] = []
        reasons: dict[int, str] = {}
        try:
            for batch, call in zip(batches, calls, strict=True):
                for sample, problem in self._settled(batch, call):
                    policy = self._on_timeout if problem == self._took_too_long else self._on_bad_sample
                    if not problem:
                        scored.append(sample)
                    elif policy == "zero":
                        scored.append(sample.with_cut_reward())
                    elif policy == "drop":
                        reasons[sample.sample_id] = problem
                    else:
                        raise RewardError(self._about(sample, problem))
        finally:
            for call in calls:
                self._forget(call)
        self._tell_left_out(samples, reasons)
        self._tell_cut(scored)
        return RewardOutcome(samples=tuple(scored), num_dropped=len(reasons), reasons=reasons)

    def close(self) -> None:
        """End all workers, also those in the middle of a call. Harmless when repeated."""
        self._closed = True
        for call in tuple(self._calls):
            self._forget(call)
        self._discard_pool()

    def __enter__(self) -> "RewardRunner":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _live_pool(self) -> ProcessPool:
        """The pool, started; a new one when the last one broke (a worker that was killed while idle breaks it)."""
        if self._closed:
            raise RewardError(f"the workers of {self._spec.path} were closed; score samples before close()")
        if self._pool is not None and not self._pool.active:
            self._discard_pool()
        if self._pool is None:
            self._pool = ProcessPool(
                max_workers=self._num_workers,
                initializer=prepare_worker,
                initargs=(self._spec, self._log_file),
                context=multiprocessing.get_context("spawn"),
            )
            with _interrupts_held_back():
                started = self._pool.active
            if not started:
                raise RewardError(f"the {self._num_workers} worker processes of {self._spec.path} did not start")
        return self._pool

    def _discard_pool(self) -> None:
        if self._pool is not None:
            self._pool.stop()  # type: ignore[no-untyped-call]
            self._pool.join()
            self._pool = None

    def _call(self, batch: Sequence[Sample], watch: _Watch) -> _Call:
        inputs = [RewardInput.from_sample(sample) for sample in batch]
        pool = self._live_pool()
        call = _Call(pool, pool.schedule(score_batch, args=(self._spec, inputs), timeout=self._timeout_s), watch)
        self._calls.add(call)
        return call

    def _forget(self, call: _Call) -> None:
        """Without effect on a call that is over; one that waits or runs is ended, and so is the wait for it."""
        self._calls.discard(call)
        call.task.cancel()  # type: ignore[no-untyped-call]

    def _scores(self, batch: Sequence[Sample], call: _Call) -> BatchScores:
        try:
            return self._result(batch, call)
        except (TaskTimeoutError, ProcessExpired, BrokenProcessPool) as error:
            return BatchScores(failure=_died(error, self._timeout_s))
        except CancelledError as error:
            raise RewardError(f"the workers of {self._spec.path} were closed while they scored samples") from error

    def _result(self, batch: Sequence[Sample], call: _Call) -> BatchScores:
        try:
            return call.result()
        except BrokenProcessPool:
            # a worker died between calls, which is no fault of these samples: once more
            call = self._call(batch, call.watch)
            try:
                return call.result()
            finally:
                self._forget(call)

    def _settled(self, batch: Sequence[Sample], call: _Call) -> Iterator[tuple[Sample, str]]:
        """(sample, "" or what is wrong) for each sample of a batch, once its call is over; with its reward if nothing is."""
        scores = self._scores(batch, call)
        if scores.broken is not None:
            raise RewardError(self._about_batch(batch, scores.broken))
        if scores.failure is None:
            answers = zip(batch, scores.rewards, scores.process_rewards, scores.problems, strict=True)
            for sample, reward, process_rewards, problem in answers:
                yield (sample if problem else sample.with_reward(reward, process_rewards)), problem
        elif len(batch) == 1:
            yield batch[0], scores.failure
        else:
            _log.warning(
                "reward function %s %s on a batch of %d; scoring them one by one", self._spec.path, scores.failure, len(batch)
            )
            for sample in batch:
                alone = self._call([sample], call.watch)
                try:
                    yield from self._settled([sample], alone)
                finally:
                    self._forget(alone)

    def _tell_left_out(self, samples: Sequence[Sample], reasons: Mapping[int, str]) -> None:
        """The first on the console, all of them in the log."""
        left_out = [sample for sample in samples if sample.sample_id in reasons]
        for sample in left_out:
            _log.info("left out %s: %s %s", _named(sample), self._spec.path, reasons[sample.sample_id])
        if left_out:
            _log.warning(
                "%d of %d samples have no reward and are left out (--on-bad-sample drop), %s among them: reward function %s %s",
                len(left_out),
                len(samples),
                _named(left_out[0]),
                self._spec.path,
                reasons[left_out[0].sample_id],
            )

    def _tell_cut(self, scored: Sequence[Sample]) -> None:
        """As `_tell_left_out`."""
        cut = [sample for sample in scored if sample.reward_cut]
        for sample in cut:
            _log.info("reward 0 for %s: %s %s", _named(sample), self._spec.path, self._took_too_long)
        if cut:
            _log.warning(
                "%d of %d samples count as 0 (--on-reward-timeout zero), %s among them: reward function %s %s",
                *(len(cut), len(scored), _named(cut[0]), self._spec.path, self._took_too_long),
            )

    @property
    def _took_too_long(self) -> str:
        """The problem of a sample that was alone in a call which was killed."""
        return _too_long(self._timeout_s)

    def _about(self, sample: Sample, problem: str) -> str:
        return (
            f"reward function {self._spec.path} ({self._spec.origin}) {problem}, scoring {_named(sample)}; "
            "expected one finite number (process rewards: one per response token). Fix the function, or leave such samples out "
            "with --on-bad-sample drop"
            + (", or score them 0 with --on-reward-timeout zero" if problem == self._took_too_long else "")
        )

    def _about_batch(self, batch: Sequence[Sample], problem: str) -> str:
        ids = ", ".join(str(sample.sample_id) for sample in batch[:8]) + (", ..." if len(batch) > 8 else "")
        return (
            f"reward function {self._spec.path} ({self._spec.origin}) {problem} (sample {ids}); expected a list with one finite "
            "number or RewardResult per input, in their order. Fix the function: whose reward is missing cannot be told"
        )


def _named(sample: Sample) -> str:
    return (
        f"sample {sample.sample_id} (prompt row {sample.prompt.index}: {sample.prompt.text[:60]!r}, response "
        f"{sample.response_text[:60]!r})"
    )


def _died(error: Exception, timeout_s: float) -> str:
    if isinstance(error, ProcessExpired):
        return f"ended its worker process with exit code {error.exitcode}"
    if isinstance(error, BrokenProcessPool):
        return "ended its worker process"
    return _too_long(timeout_s)


def _too_long(timeout_s: float) -> str:
    return f"took longer than {timeout_s:g} s (--reward-timeout-s)"


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Threads and processes started inside never see SIGINT: they inherit the mask, from their first instruction on.

    Workers do ignore SIGINT, but only once Python is up; Ctrl-C in the second before would print a traceback of each.
    """
    # starting the tracker lifts the mask of the thread that does it, so it must run before
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
