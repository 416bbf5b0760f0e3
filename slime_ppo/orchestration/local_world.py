"""The store where the ranks of a run without Ray meet, and what they leave there: the start, failures, and the end.

What goes through it is small and must arrive although a collective hangs: why a rank failed, and that the run is over.
"""

import logging
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime_ppo.config.launcher import RankPlace
from slime_ppo.errors import ParallelError, SlimePpoError
from slime_ppo.orchestration.failures import is_echo
from slime_ppo.parallel.worker_settings import DeviceKind

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

_log = logging.getLogger(__name__)

_POLL_S = 0.05
_WATCH_S = 0.5
# a failing rank and its peers' broken collectives come within moments of each other
_SETTLE_S = 2.0


@dataclass(frozen=True)
class RankStart:
    """What every rank is told before it sets up torch."""

    log_dir: str
    device: DeviceKind
    timeout_s: float


@dataclass(frozen=True)
class Failure:
    """An error of one rank as the others can tell it; `text` is ready to be shown."""

    kind: type[SlimePpoError]
    text: str
    echo: bool

    @staticmethod
    def of(error: BaseException) -> "Failure":
        if isinstance(error, SlimePpoError):
            return Failure(type(error), str(error), is_echo(error))
        return Failure(ParallelError, f"{type(error).__name__}: {error}", is_echo(error))


class LocalWorld:
    """This process among the ranks. The store is opened when it is first needed: by torchrun's agent, or by rank 0."""

    def __init__(self, place: RankPlace) -> None:
        self.place = place
        self._store: Store | None = None
        self._ended = False

    @property
    def store(self) -> "Store":
        if self._store is None:
            self._store = self._open()
        return self._store

    def _open(self) -> "Store":
        from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]
        from torch.distributed.rendezvous import rendezvous

        if not self.place.started_by_torchrun:
            return HashStore()
        store, _, _ = next(rendezvous("env://", self.place.rank, self.place.world_size))
        return PrefixStore("slime_ppo", store)

    def start(self, start: RankStart) -> None:
        """Rank 0: let the others set up."""
        self.store.set("start", _text_of(start))

    def wait_for_start(self) -> RankStart | None:
        """The other ranks: what rank 0 said, or None when the run ended before it began. Rank 0 may read files for long."""
        while not self.store.check(["start"]):
            if self.exit_code() is not None:
                return None
            time.sleep(_POLL_S)
        start: RankStart = _object_of(self.store.get("start"))
        return start

    def ready(self) -> None:
        """The other ranks: everything is imported."""
        self.store.set(f"ready/{self.place.rank}", "yes")

    def wait_for_ranks(self, timeout_s: float) -> None:
        """Rank 0: until all others are ready. Raises the error of one that failed, ParallelError naming those that are late."""
        deadline = time.monotonic() + timeout_s
        while missing := [rank for rank in range(1, self.place.world_size) if not self.store.check([f"ready/{rank}"])]:
            self.check_alive()
            if time.monotonic() > deadline:
                raise ParallelError(
                    f"start-up took longer than {timeout_s:g} s (--worker-start-timeout-s): no word from rank "
                    f"{', '.join(map(str, missing))} of {self.place.world_size}"
                )
            time.sleep(_POLL_S)

    def check_alive(self) -> None:
        """Raise the error of another rank that has left word of its end, for waits that would not notice."""
        for rank, failure in self.failures().items():
            raise failure.kind(f"{failure.text} [rank {rank}]")

    def end(self, exit_code: int) -> None:
        """Rank 0: tell the others that the run is over, and with which exit code. The first call counts."""
        if self._ended or self.place.world_size == 1:
            return
        self._ended = True
        self.store.set("end", str(exit_code))

    def exit_code(self) -> int | None:
        """What rank 0 ended the run with; None while it runs. 1 when the store is gone, and rank 0 with it."""
        try:
            return int(self.store.get("end")) if self.store.check(["end"]) else None
        except RuntimeError:
            return 1

    def report(self, error: BaseException) -> None:
        """The other ranks: leave why this one ends."""
        self.store.set(f"failure/{self.place.rank}", _text_of(Failure.of(error)))

    def failures(self) -> dict[int, Failure]:
        """What other ranks have left, by rank."""
        ranks = [rank for rank in range(self.place.world_size) if self.store.check([f"failure/{rank}"])]
        return {rank: _object_of(self.store.get(f"failure/{rank}")) for rank in ranks}

    def most_telling(self, own: Exception, phase: str) -> SlimePpoError:
        """The cause among this rank's error and those of the others, which get a moment to fail too when it is an echo."""
        mine = Failure.of(own)
        deadline = time.monotonic() + (_SETTLE_S if mine.echo else 0.0)
        found = {self.place.rank: mine} | self.failures()
        while all(failure.echo for failure in found.values()) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            found |= self.failures()
        rank = min(found, key=lambda one: (found[one].echo, one))
        cause = found[rank]
        others = ", ".join(f"rank {one}" for one in sorted(found) if one != rank)
        echo = f" (then failed too: {others})" if others else ""
        if cause.echo and cause.kind is ParallelError:
            return ParallelError(
                f"a rank died or hangs: {phase} broke off on rank {rank}{echo}, and no rank has said why (killed, out of memory, "
                "a crash in native code, or longer than --call-timeout-s). Their logs are rank-<n>.log in the run folder's logs. "
                f"{cause.text}"
            )
        return cause.kind(f"{cause.text} [rank {rank}, {phase}]{echo}")


class FailureWatch:
    """Ends rank 0 when another rank has failed and this one does not notice: a collective on GPUs waits for a lost rank, deaf to
    torchrun's signal, until it is killed without a word."""

    def __init__(self, world: LocalWorld, *, grace_s: float = 15.0, end: Callable[[int], None] = os._exit) -> None:
        self._world, self._grace_s, self._end = world, grace_s, end
        self._noticed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="failure-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Rank 0 has noticed, or is done."""
        self._noticed.set()

    def _run(self) -> None:
        try:
            while not self._noticed.wait(_WATCH_S):
                if self._world.failures() and not self._noticed.wait(self._grace_s):
                    found = self._world.failures()
                    rank = min(found, key=lambda one: (found[one].echo, one))
                    sys.stderr.write(f"error: {found[rank].text} [rank {rank}]; rank 0 was left waiting for it\n")
                    sys.stderr.flush()
                    self._end(1)
                    return
        except RuntimeError:
            _log.exception("the store is gone, and with it the word of ranks that fail")


def _text_of(value: object) -> str:
    """For a store, which carries text. Only our own ranks write to it."""
    return pickle.dumps(value).hex()


def _object_of(text: bytes) -> Any:
    return pickle.loads(bytes.fromhex(text.decode()))


def own_device_only(place: RankPlace) -> None:
    """Leave one visible GPU to this rank, as Ray does. Call before torch is imported; on a machine without GPUs it is without
    effect."""
    if not place.started_by_torchrun:
        return
    name = "CUDA_VISIBLE_DEVICES"
    visible = os.environ[name].split(",") if name in os.environ else [str(place.local_rank)]
    if len(visible) > 1:
        visible = visible[place.local_rank : place.local_rank + 1]
    os.environ[name] = ",".join(visible)
