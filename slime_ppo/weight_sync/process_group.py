"""The process group of the trainer's rank 0 and the ranks of the engine's servers, seen from rank 0.

SGLang's servers join with `sglang.srt.utils.init_custom_process_group`; `EngineGroup.join` does what that does, without an import
of sglang (8 CPU seconds and 0.6 GB in every trainer). Torch is imported where the group is made.
"""

import datetime
import os
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from slime_ppo.errors import WeightSyncError
from slime_ppo.weight_sync.base import Meeting

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
_POLL_S = 0.001


class EngineGroup:
    """Rank 0's place in a group that is met anew after every failure: a new port, a name that was never used.

    Every failure leaves the group, so that servers that wait in it hear of it, and is a WeightSyncError: a dead or hung server
    must not take the trainer with it. With gloo a dead server is noticed at once, a hung one after `timeout_s`. Over NCCL we wait
    ourselves: NCCL's own watchdog would end the process (written after torch's source, not run on a GPU).
    """

    def __init__(self, *, host: str, device: Literal["cpu", "cuda"], timeout_s: float) -> None:
        """`host` is the name under which the servers reach this node."""
        self._host = host
        self._device = device
        self._timeout_s = timeout_s
        self._server: dist.TCPStore | None = None  # type: ignore[name-defined]
        self._store: dist.TCPStore | None = None  # type: ignore[name-defined]
        self._abandoned = threading.Event()
        self._group: dist.ProcessGroup | None = None

    def meet(self, num_engine_ranks: int) -> Meeting:
        """Serve a store for a new group, at a port that is held from the moment it is chosen."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self.leave()
        self._abandoned.clear()
        common: dict[str, Any] = {"wait_for_workers": False, "timeout": self._timeout()}
        self._server = TCPStore(self._host, 0, is_master=True, **common)
        self._store = TCPStore(self._host, self._server.port, is_master=False, **common)
        return Meeting(
            address=self._host,
            port=self._server.port,
            world_size=1 + num_engine_ranks,
            group_name=f"slime_ppo-{uuid.uuid4().hex}",
            backend=_BACKENDS[self._device],
        )

    def join(self, meeting: Meeting) -> None:
        """Returns when all ranks of the meeting have joined."""
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]
        from torch.distributed.distributed_c10d import Backend, GroupName, _new_process_group_helper, _world

        if self._store is None:
            raise WeightSyncError("servers were to be joined without a meeting")
        # an NCCL group gives up after us: the end it makes is that of the process
        timeout = self._timeout(1 if self._device == "cpu" else 10)
        with (
            self._leaving_on_failure(f"not all {meeting.world_size} ranks joined the group of trainer and servers"),
            _no_watchdog(),
        ):
            self._group, _ = _new_process_group_helper(
                meeting.world_size,
                0,
                [],
                Backend(meeting.backend),
                PrefixStore(meeting.group_name, self._store),
                group_name=GroupName(meeting.group_name),
                backend_options=None,
                timeout=timeout,
            )
            _world.pg_group_ranks[self._group] = {rank: rank for rank in range(meeting.world_size)}

    def broadcast(self, flat: "torch.Tensor") -> None:
        """Send to every server's rank, which must be waiting for as many bytes."""
        import torch.distributed as dist

        if self._group is None:
            raise WeightSyncError("a bucket was to be broadcast before the servers were met; join them first")
        with self._leaving_on_failure("the broadcast to the servers broke"):
            work = dist.broadcast(flat, group_src=0, group=self._group, async_op=True)
            if self._device == "cuda":
                self._wait_for(work)
            work.wait()

    def leave(self) -> None:
        """Leave the group, if there is one; servers that wait in it are told by the end of the connection."""
        import torch.distributed as dist

        group, self._group, self._store, self._server = self._group, None, None, None
        if group is not None:
            if self._device == "cuda":
                group.abort()
            dist.destroy_process_group(group)

    def abandon(self) -> None:
        """Called beside a `join` or `broadcast` that waits for servers which will not come: the first ends at once, the second
        over NCCL; over gloo it ends when a server leaves the group."""
        self._abandoned.set()
        self._server = None  # whoever waits for its store hears that it is gone

    def _wait_for(self, work: "dist.Work") -> None:
        deadline = time.monotonic() + self._timeout_s
        while not work.is_completed():
            if self._abandoned.is_set():
                raise RuntimeError("the servers refuse to take part")
            if time.monotonic() > deadline:
                raise RuntimeError(f"not all servers took part within {self._timeout_s:g} s")
            time.sleep(_POLL_S)

    def _timeout(self, factor: float = 1) -> datetime.timedelta:
        return datetime.timedelta(seconds=factor * self._timeout_s)

    @contextmanager
    def _leaving_on_failure(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self.leave()
            reason = str(error).strip().splitlines()[0]
            raise WeightSyncError(
                f"{what} (a server died, hangs, or was slower than {self._timeout_s:g} s, --weight-sync-timeout-s): {reason}"
            ) from error


@contextmanager
def _no_watchdog() -> Iterator[None]:
    """A group made in here does not end the process when NCCL reports a lost peer: torch reads this at the start of a group."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
