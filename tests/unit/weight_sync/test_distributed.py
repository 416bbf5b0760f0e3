"""The order of a push by broadcast, when both ends meet anew, and what a failure at either end leads to; both ends are played."""

import threading
from typing import Any

import pytest

from slime_ppo.errors import WeightSyncError
from slime_ppo.rollout.engine import EnginePart
from slime_ppo.weight_sync.base import CheckMode, Meeting
from slime_ppo.weight_sync.bucket import Bucket, TensorSpec
from slime_ppo.weight_sync.distributed import DistributedSync

SPECS = (TensorSpec("a", (2,), "float32"), TensorSpec("b", (3,), "uint8"))


class Ends:
    """Trainer and engine in one, with a journal of both. Ends of one transfer wait for each other, as in a process group."""

    def __init__(self) -> None:
        self.journal: list[str] = []
        self.fails: dict[str, str] = {}
        self.incarnations = 1
        self.meetings = 0
        self.both = threading.Barrier(2, timeout=5)
        self.abandoned = threading.Event()

    def manifest(self) -> tuple[TensorSpec, ...]:
        return SPECS

    def num_ranks(self) -> int:
        return 3

    def incarnation(self) -> int:
        return self.incarnations

    def begin_update(self, manifest: tuple[TensorSpec, ...], version: int, *, bucket_bytes: int) -> None:
        assert (manifest, bucket_bytes) == (SPECS, 8)
        self.journal.append(f"begin {version}")
        self.version = version

    def meet_engine(self, num_engine_ranks: int) -> Meeting:
        self.meetings += 1
        self.journal.append(f"meet {self.meetings}")
        return Meeting("host", 1, 1 + num_engine_ranks, f"group {self.meetings}", "gloo")

    def join_engine(self, meeting: Meeting) -> None:
        self._together("join", f"join {meeting.group_name}")

    def join_group(self, meeting: Meeting) -> None:
        self._together("engine joins", None)

    def broadcast_bucket(self, bucket: Bucket) -> None:
        self._together("broadcast", f"send {bucket.index}")

    def receive_bucket(self, index: int) -> None:
        self._together("receive", None)

    def export_bucket(self, bucket: Bucket) -> str:
        return f"bytes {bucket.index}"

    def check_bucket(self, bucket: Bucket, flat: Any) -> None:
        self.journal.append(f"check {flat}")

    def end_update(self) -> int:
        self.journal.append("end")
        return self.version

    def wake(self, parts: EnginePart) -> None:
        self.journal.append(f"wake {parts.name}")

    def leave_group(self) -> None:
        self.journal.append("engine leaves")

    def abandon_engine(self) -> None:
        self.abandoned.set()

    def leave_engine(self) -> None:
        self.journal.append("leave")

    def _together(self, what: str, entry: str | None) -> None:
        self.both.wait()
        if what in self.fails:
            raise WeightSyncError(self.fails[what])
        if entry is not None:
            self.journal.append(entry)


def connected(ends: Ends, check: CheckMode = "first") -> DistributedSync:
    sync = DistributedSync(ends, ends, bucket_bytes=8, check=check)
    sync.connect()
    return sync


MEET = ["engine leaves", "meet 1", "join group 1"]
CHECKED = ["send 0", "check bytes 0", "send 1", "check bytes 1", "end", "wake KV_CACHE"]
UNCHECKED = ["send 0", "send 1", "end", "wake KV_CACHE"]


def test_push_meets_once_and_checks_the_first_version() -> None:
    ends = Ends()
    sync = connected(ends)
    assert sync.push(0) == 0
    assert ends.journal == ["begin 0", *MEET, *CHECKED]
    ends.journal.clear()
    assert sync.push(1) == 1
    assert ends.journal == ["begin 1", *UNCHECKED]
    ends.journal.clear()
    sync.close()
    sync.close()
    assert ends.journal == ["engine leaves", "leave"]


@pytest.mark.parametrize(("check", "order"), [("always", CHECKED), ("never", UNCHECKED)])
def test_push_check_modes(check: CheckMode, order: list[str]) -> None:
    ends = Ends()
    sync = connected(ends, check)
    for version in (0, 1):
        sync.push(version)
        assert ends.journal[-len(order) :] == order


def test_push_to_a_server_that_was_started_anew_meets_again_and_is_checked_as_a_first_one() -> None:
    ends = Ends()
    sync = connected(ends)
    sync.push(0)
    ends.incarnations = 2
    ends.journal.clear()
    sync.push(1)
    assert ends.journal == ["begin 1", "engine leaves", "meet 2", "join group 2", *CHECKED]


@pytest.mark.parametrize("fails", [{"receive": "engine"}, {"broadcast": "trainer"}, {"receive": "engine", "broadcast": "trainer"}])
def test_push_that_fails_at_either_end_tells_the_engines_word_first_and_the_next_one_meets_again(fails: dict[str, str]) -> None:
    ends = Ends()
    sync = connected(ends)
    sync.push(0)
    ends.fails = fails
    with pytest.raises(WeightSyncError, match=fails.get("receive", "trainer")):
        sync.push(1)
    assert ends.journal[-1] in ("begin 1", "send 0")
    ends.fails = {}
    ends.journal.clear()
    assert sync.push(2) == 2
    assert ends.journal == ["begin 2", "engine leaves", "meet 2", "join group 2", *CHECKED]


@pytest.mark.parametrize(("waits", "refuses"), [("join_engine", "join_group"), ("broadcast_bucket", "receive_bucket")])
def test_push_that_the_engine_refuses_does_not_leave_the_trainer_waiting(
    monkeypatch: pytest.MonkeyPatch, waits: str, refuses: str
) -> None:
    ends = Ends()
    waited: list[bool] = []

    def wait(_: object) -> None:
        waited.append(ends.abandoned.wait(20))
        raise WeightSyncError("the group broke")

    def refuse(_: object) -> None:
        raise WeightSyncError("answered 400")

    monkeypatch.setattr(ends, waits, wait)
    monkeypatch.setattr(ends, refuses, refuse)
    with pytest.raises(WeightSyncError, match="answered 400"):
        connected(ends).push(0)
    assert waited == [True]


def test_push_whose_meeting_fails_is_an_error_and_the_next_one_meets_again() -> None:
    ends = Ends()
    sync = connected(ends)
    ends.fails = {"engine joins": "a server did not come"}
    with pytest.raises(WeightSyncError, match="did not come"):
        sync.push(0)
    ends.fails = {}
    assert sync.push(1) == 1
    assert "meet 2" in ends.journal
