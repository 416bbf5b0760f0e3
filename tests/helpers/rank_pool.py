"""A persistent pool of gloo ranks for tests of sharded code.

    pool = RankPool()
    results = pool.run("tests.dist.ppo_utils.ranks:whiten", world=2, seed=3)      # one result per rank
    pool.preload("slime_ppo.backends.megatron.device")                            # imported once, before ranks are forked

Three layers of processes. The test process talks to one *server* (`python -m tests.helpers.rank_pool`), started fresh so
that nothing is ever forked from a process in which torch's threads have run. The server imports torch and whatever
was preloaded, once, computes nothing, and forks *ranks* on demand; a rank serves many calls. A call runs
`module:function(**kwargs)` in `world` ranks inside an initialised default process group and returns what they return.

Ranks are not daemonic (checkpoint writers fork children), have one thread, seed 0 at the start of each call, and no process
group and no Megatron state after it. When a rank raises, the others get a moment to finish and are killed if they don't; when
the call runs out of time, all of its ranks are killed. The next call forks new ones. A dead test process takes the server
down with it (end of file), and a dead server its ranks.
"""

import contextlib
import gc
import importlib
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

REPOSITORY = Path(__file__).resolve().parents[2]
# How long ranks may take to finish after another one raised: long enough to report the same error, if they found it.
GRACE_S = 2.0
# Groups that something still refers to keep their threads, which wake up all the time: a rank with more is replaced by a fresh one.
MAX_THREADS = 150


class RankError(RuntimeError):
    """A function failed on some rank; the message holds the traceback of every rank that reported one."""


@dataclass(frozen=True)
class Call:
    """One function in `world` ranks; `payload` is the pickled keyword arguments, which the server never opens."""

    target: str
    world: int
    timeout_s: float
    payload: bytes


@dataclass(frozen=True)
class Outcome:
    """What one rank answered: a pickled result or a traceback."""

    result: bytes | None
    failure: str


class RankPool:
    """The test process's side. Not thread-safe. Use as a context manager, or call `close`."""

    def __init__(self, preload: Sequence[str] = ()) -> None:
        ours, theirs = socket.socketpair()
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *_python_path()])}
        command = [sys.executable, "-m", "tests.helpers.rank_pool", str(theirs.fileno())]
        with theirs:
            self._server = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], cwd=REPOSITORY, env=environment, stdin=subprocess.DEVNULL
            )
        self._connection = Connection(ours.detach())
        self._preloaded: set[str] = set()
        self.preload(*preload)

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def preload(self, *modules: str) -> None:
        """Import `modules` in the server, so that ranks start with them; idle ranks without them are replaced."""
        missing = [name for name in modules if name not in self._preloaded]
        if missing:
            self._ask(missing)
            self._preloaded.update(missing)

    def run(self, target: str, *, world: int, timeout_s: float = 60.0, **kwargs: Any) -> list[Any]:
        """Results of `module:function` called with `kwargs` in each of `world` ranks, by rank.

        Arguments and results travel by pickle. Raises RankError with the tracebacks, or naming the ranks that hung or died.
        """
        outcomes = self._ask(Call(target, world, timeout_s, pickle.dumps(kwargs)))
        failures = [f"[rank {rank}] {outcome.failure}" for rank, outcome in enumerate(outcomes) if outcome.result is None]
        if failures:
            raise RankError(f"{target} failed on {len(failures)} of {world} ranks\n" + "\n".join(failures))
        return [pickle.loads(outcome.result) for outcome in outcomes]

    def rank_pids(self) -> list[int]:
        """Process ids of the ranks that exist now."""
        return list(self._ask("pids"))

    def close(self) -> None:
        """End the server and its ranks."""
        self._connection.close()
        try:
            self._server.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()

    def _ask(self, request: object) -> Any:
        try:
            self._connection.send_bytes(pickle.dumps(request))
            answer = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise RankError(f"the server of the rank pool ended (exit code {self._server.poll()}); its output tells why") from error
        if isinstance(answer, RankError):
            raise answer
        return answer


def _python_path() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


@dataclass(frozen=True)
class _Rank:
    process: BaseProcess
    connection: Connection


class _Server:
    """Forks ranks and passes calls on. Does no arithmetic: a fork of a process whose OpenMP threads ran can hang."""

    def __init__(self, client: Connection) -> None:
        self._client = client
        self._ranks: dict[int, _Rank] = {}

    def serve(self) -> None:
        """Answer requests until the test process is gone."""
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                request = pickle.loads(self._client.recv_bytes())
                if isinstance(request, Call):
                    answer: object = self._call(request)
                elif request == "pids":
                    answer = [rank.process.pid for rank in self._ranks.values()]
                else:
                    answer = self._preload(request)
                self._client.send_bytes(pickle.dumps(answer))
        self._kill(list(self._ranks))

    def _preload(self, modules: Sequence[str]) -> RankError | None:
        self._kill(list(self._ranks))
        for name in modules:
            try:
                importlib.import_module(name)
            except Exception:
                return RankError(f"preloading {name} failed in the server of the rank pool\n{traceback.format_exc()}")
        return None

    def _call(self, call: Call) -> list[Outcome]:
        for index in range(call.world):
            if index in self._ranks and not _is_usable(self._ranks[index].process):
                self._kill([index])
            if index not in self._ranks:
                self._ranks[index] = self._fork(index)
        with tempfile.TemporaryDirectory(prefix="rank_pool_") as folder:
            for index in range(call.world):
                self._ranks[index].connection.send((call, f"{folder}/store"))
            outcomes = self._collect(call)
        missing = [index for index in range(call.world) if index not in outcomes]
        self._kill(missing)
        for index in missing:
            outcomes[index] = Outcome(None, f"gave no answer (timeout {call.timeout_s} s, or another rank failed); it was killed")
        return [outcomes[index] for index in range(call.world)]

    def _collect(self, call: Call) -> dict[int, Outcome]:
        """Outcomes that arrive in time, by rank; a rank that died counts as one."""
        outcomes: dict[int, Outcome] = {}
        deadline = time.monotonic() + call.timeout_s
        while len(outcomes) < call.world and time.monotonic() < deadline:
            waiting = {self._ranks[index].connection: index for index in range(call.world) if index not in outcomes}
            ready = wait([*waiting, self._client], timeout=max(0.0, deadline - time.monotonic()))
            if self._client in ready:
                raise EOFError("the test process is gone")
            for connection in ready:
                index = waiting[connection]
                try:
                    outcomes[index] = connection.recv()
                except (EOFError, OSError):
                    process = self._ranks.pop(index).process
                    process.join()
                    outcomes[index] = Outcome(None, f"died with exit code {process.exitcode}")
                if outcomes[index].result is None:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return outcomes

    def _fork(self, index: int) -> _Rank:
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        foreign = [self._client, ours, *(rank.connection for rank in self._ranks.values())]
        # what was imported lives as long as the rank: not to be looked through at the end of every call
        gc.freeze()
        process = context.Process(target=_rank_main, args=(index, theirs, foreign), name=f"rank {index}", daemon=False)
        process.start()
        theirs.close()
        return _Rank(process, ours)

    def _kill(self, indices: Sequence[int]) -> None:
        for index in indices:
            rank = self._ranks.pop(index)
            rank.process.kill()
            rank.process.join()
            rank.connection.close()


def _is_usable(process: BaseProcess) -> bool:
    return process.is_alive() and psutil.Process(process.pid).num_threads() <= MAX_THREADS


def _rank_main(index: int, connection: Connection, foreign: Sequence[Connection]) -> None:
    """A rank: run calls until the server is gone. Ends of other pipes are closed, or their owners would never see them close."""
    for other in foreign:
        with contextlib.suppress(OSError):
            other.close()
    import torch

    gc.enable()
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            call, store = connection.recv()
            connection.send(_answer(index, call, store))


def _answer(index: int, call: Call, store: str) -> Outcome:
    try:
        return Outcome(pickle.dumps(_run_in_group(index, call, store)), "")
    except BaseException:
        return Outcome(None, traceback.format_exc())


def _run_in_group(index: int, call: Call, store: str) -> Any:
    import torch
    import torch.distributed as dist

    os.environ.update(RANK=str(index), WORLD_SIZE=str(call.world), LOCAL_RANK=str(index))
    torch.manual_seed(0)
    timeout = timedelta(seconds=call.timeout_s)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=index, world_size=call.world, timeout=timeout)
    dist.barrier()  # a rank that leaves again while another still connects to it would leave that one hanging
    try:
        module, function = call.target.split(":")
        return getattr(importlib.import_module(module), function)(**pickle.loads(call.payload))
    finally:
        if "megatron.core.parallel_state" in sys.modules:
            sys.modules["megatron.core.parallel_state"].destroy_model_parallel()
        if dist.is_initialized():
            dist.destroy_process_group()
        # models hold the groups in cycles; the threads of a group live as long as it does
        gc.collect()


def main() -> None:
    """The server process; the number of its socket is its argument."""
    # the test process handles Ctrl-C; the server ends when that closes the socket
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # imports leave nothing to collect, and looking for it costs more than they do
    gc.disable()
    importlib.import_module("torch.distributed")
    _Server(Connection(int(sys.argv[1]))).serve()


if __name__ == "__main__":
    # under its own name, so that requests unpickle to the classes that the server compares them with
    importlib.import_module("tests.helpers.rank_pool").main()
