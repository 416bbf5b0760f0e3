"""Rank 0 is the trainer's, rank 1 plays a server's rank: it joins as SGLang's `init_custom_process_group` does."""

import time
from datetime import timedelta
from threading import Timer

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world, rendezvous

from slime_ppo.errors import WeightSyncError
from slime_ppo.weight_sync.base import Meeting
from slime_ppo.weight_sync.process_group import EngineGroup

TIMEOUT_S = 1.5


def meet_twice() -> dict[str, object]:
    """A broadcast, one in which the server takes no part, one after both have met again, one whose server leaves, and a meeting
    that is given up."""
    return _trainer() if dist.get_rank() == 0 else _server()


def _trainer() -> dict[str, object]:
    group = EngineGroup(host="127.0.0.1", device="cpu", timeout_s=TIMEOUT_S)
    told: dict[str, object] = {"before": _problem(lambda: group.broadcast(torch.ones(3, dtype=torch.uint8)))}
    names = []
    for value in (7, 9):
        meeting = group.meet(1)
        names.append(meeting.group_name)
        _tell(meeting)
        group.join(meeting)
        group.broadcast(torch.full((1000,), value, dtype=torch.uint8))
        if value == 7:
            began = time.monotonic()
            # more than the sockets hold, so that somebody must read it
            told["alone"] = _problem(lambda: group.broadcast(torch.zeros(64 << 20, dtype=torch.uint8)))
            told["seconds"] = time.monotonic() - began
            told["after it"] = _problem(lambda: group.broadcast(torch.ones(3, dtype=torch.uint8)))
            dist.barrier()
    meeting = group.meet(1)
    _tell(meeting)
    group.join(meeting)
    began = time.monotonic()
    told["left"] = _problem(lambda: group.broadcast(torch.zeros(64 << 20, dtype=torch.uint8)))
    told["left after"] = time.monotonic() - began
    group.leave()
    group.leave()
    meeting = group.meet(1)
    Timer(0.2, group.abandon).start()
    began = time.monotonic()
    told["nobody"] = _problem(lambda: group.join(meeting))
    told["nobody after"] = time.monotonic() - began
    return told | {"names": names}


def _server() -> dict[str, object]:
    received = []
    for turn in range(2):
        group = _join(_hear())
        flat = torch.zeros(1000, dtype=torch.uint8)
        dist.broadcast(flat, 0, group=group)
        received.append(sorted(set(flat.tolist())))
        if turn == 0:
            dist.barrier()
        dist.destroy_process_group(group)
    dist.destroy_process_group(_join(_hear()))
    return {"received": received}


def _join(meeting: Meeting) -> dist.ProcessGroup:
    timeout = timedelta(seconds=20)
    store, rank, world_size = next(rendezvous(f"tcp://{meeting.address}:{meeting.port}", 1, meeting.world_size, timeout=timeout))
    store.set_timeout(timeout)
    named = PrefixStore(meeting.group_name, store)
    group, _ = _new_process_group_helper(
        world_size, rank, [], Backend(meeting.backend), named, group_name=meeting.group_name, backend_options=None, timeout=timeout
    )
    _world.pg_group_ranks[group] = {0: 0, 1: 1}
    return group


def _tell(meeting: Meeting) -> None:
    dist.broadcast_object_list([meeting], src=0)


def _hear() -> Meeting:
    box: list[Meeting] = [None]  # type: ignore[list-item]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _problem(action: object) -> str:
    try:
        action()  # type: ignore[operator]
    except WeightSyncError as error:
        return str(error)
    return "no error"
