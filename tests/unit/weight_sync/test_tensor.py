"""The order of a push, its check, and what it refuses; both ends are played."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from slime_ppo.errors import WeightSyncError
from slime_ppo.rollout.engine import EnginePart
from slime_ppo.weight_sync.base import CheckMode, check_bucket
from slime_ppo.weight_sync.bucket import Bucket, TensorSpec, checksum
from slime_ppo.weight_sync.tensor import SharedMemorySync, TensorSync

SPECS = (TensorSpec("a", (2,), "float32"), TensorSpec("b", (3,), "uint8"))


class Ends:
    """Trainer and engine in one, with a journal. `reports` is the version the engine says it has, None: the pushed one."""

    def __init__(self, reports: int | None = None) -> None:
        self.journal: list[str] = []
        self.reports = reports

    def manifest(self) -> tuple[TensorSpec, ...]:
        return SPECS

    def export_bucket(self, bucket: Bucket) -> str:
        self.journal.append(f"export {bucket.index}")
        return f"bytes {bucket.index}"

    def begin_update(self, manifest: tuple[TensorSpec, ...], version: int, *, bucket_bytes: int) -> None:
        assert (manifest, bucket_bytes) == (SPECS, 8)
        self.journal.append(f"begin {version}")
        self.version = version

    def load_bucket(self, index: int, flat: Any) -> None:
        self.journal.append(f"load {index}: {flat}")

    def check_bucket(self, bucket: Bucket, flat: Any) -> None:
        self.journal.append(f"check {bucket.index}: {flat}")

    def end_update(self) -> int:
        self.journal.append("end")
        return self.version if self.reports is None else self.reports

    def wake(self, parts: EnginePart) -> None:
        self.journal.append(f"wake {parts.name}")


def test_push_loads_every_bucket_checks_the_first_version_and_wakes_the_cache_last() -> None:
    ends = Ends()
    sync = TensorSync(ends, ends, bucket_bytes=8)
    sync.connect()
    assert sync.push(0) == 0
    first = ["begin 0", "export 0", "load 0: bytes 0", "check 0: bytes 0", "export 1", "load 1: bytes 1", "check 1: bytes 1"]
    assert ends.journal == [*first, "end", "wake KV_CACHE"]
    ends.journal.clear()
    assert sync.push(1) == 1
    assert ends.journal == ["begin 1", "export 0", "load 0: bytes 0", "export 1", "load 1: bytes 1", "end", "wake KV_CACHE"]


def test_push_that_the_engine_reports_as_another_version_is_an_error_and_the_cache_stays_asleep() -> None:
    ends = Ends(reports=3)
    sync = TensorSync(ends, ends, bucket_bytes=8)
    sync.connect()
    with pytest.raises(WeightSyncError, match="version 4 was pushed, the engine reports 3"):
        sync.push(4)
    assert ends.journal[-1] == "end"


def test_check_bucket_names_the_tensors_that_differ() -> None:
    flat = np.arange(11, dtype=np.uint8)
    bucket = Bucket(0, SPECS, (0, 8), 11)

    class Engine:
        def __init__(self, last: int) -> None:
            self.last = last

        def checksums(self, names: object = None) -> dict[str, str]:
            return {"a": checksum("a", flat[:8]), "b": checksum("b", np.array([8, 9, self.last], np.uint8))}

    check_bucket(Engine(10), bucket, flat)
    with pytest.raises(WeightSyncError, match="the engine's b differ"):
        check_bucket(Engine(11), bucket, flat)


class SharedEnds(Ends):
    """Ends on the same GPUs."""

    def share_bucket(self, bucket: Bucket) -> list[str]:
        self.journal.append(f"share {bucket.index}")
        return [f"handle {bucket.index} of rank {rank}" for rank in (0, 1)]

    def load_shared(self, index: int, payloads: Sequence[str]) -> None:
        self.journal.append(f"load {index}: {', '.join(payloads)}")
        if self.reports == 99:
            raise WeightSyncError("a server died")

    def release_shared(self) -> None:
        self.journal.append("release")


def test_push_through_shared_memory_hands_over_every_ranks_handle_and_frees_the_memory_also_after_a_failure() -> None:
    ends = SharedEnds()
    sync = SharedMemorySync(ends, ends, bucket_bytes=8, check="never")
    sync.connect()
    assert sync.push(0) == 0
    both = [[f"share {index}", f"load {index}: handle {index} of rank 0, handle {index} of rank 1"] for index in (0, 1)]
    assert ends.journal == ["begin 0", *both[0], *both[1], "end", "wake KV_CACHE", "release"]
    ends.reports = 99
    with pytest.raises(WeightSyncError, match="a server died"):
        sync.push(1)
    assert ends.journal[-1] == "release"


@pytest.mark.parametrize(("check", "checks"), [("first", 2), ("always", 4), ("never", 0)])
def test_push_check_modes(check: CheckMode, checks: int) -> None:
    ends = Ends()
    sync = TensorSync(ends, ends, bucket_bytes=8, check=check)
    sync.connect()
    sync.push(0)
    sync.push(1)
    assert sum(entry.startswith("check") for entry in ends.journal) == checks
