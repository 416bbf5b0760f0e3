"""Folders of a push by files; both ends are played."""

from pathlib import Path
from typing import Any

import pytest

from slime_ppo.errors import WeightSyncError
from slime_ppo.rollout.engine import EnginePart
from slime_ppo.weight_sync.bucket import Bucket, TensorSpec
from slime_ppo.weight_sync.disk import DiskSync

SPECS = (TensorSpec("a", (2,), "float32"), TensorSpec("b", (3,), "uint8"))


class Ends:
    """Trainer and engine in one, with a journal."""

    def __init__(self) -> None:
        self.journal: list[str] = []
        self.full = False

    def manifest(self) -> tuple[TensorSpec, ...]:
        return SPECS

    def begin_update(self, manifest: tuple[TensorSpec, ...], version: int, *, bucket_bytes: int) -> None:
        self.version = version

    def publish_hf(self, folder: str) -> None:
        if self.full:
            raise WeightSyncError("no space left")
        Path(folder).mkdir(parents=True)

    def load_folder(self, folder: str) -> None:
        assert Path(folder).is_dir()
        self.journal.append(f"load {Path(folder).name}")

    def export_bucket(self, bucket: Bucket) -> str:
        return f"bytes {bucket.index}"

    def check_bucket(self, bucket: Bucket, flat: Any) -> None:
        self.journal.append(f"check {flat}")

    def end_update(self) -> int:
        self.journal.append("end")
        return self.version

    def wake(self, parts: EnginePart) -> None:
        self.journal.append(f"wake {parts.name}")


def test_push_reads_a_folder_per_version_checks_the_first_and_keeps_the_last(tmp_path: Path) -> None:
    ends = Ends()
    sync = DiskSync(ends, ends, folder=str(tmp_path), bucket_bytes=8)
    sync.connect()
    assert sync.push(3) == 3
    assert ends.journal == ["load version_3", "check bytes 0", "check bytes 1", "end", "wake KV_CACHE"]
    ends.journal.clear()
    assert sync.push(4) == 4
    assert ends.journal == ["load version_4", "end", "wake KV_CACHE"]
    assert [path.name for path in tmp_path.iterdir()] == ["version_4"]
    sync.close()
    sync.close()
    assert list(tmp_path.iterdir()) == []


def test_push_without_room_names_the_flag_and_keeps_the_folder_that_is_served(tmp_path: Path) -> None:
    ends = Ends()
    sync = DiskSync(ends, ends, folder=str(tmp_path), bucket_bytes=8)
    sync.connect()
    sync.push(0)
    ends.full = True
    with pytest.raises(WeightSyncError, match=r"version_1 \(--weight-sync-folder\).*no space left"):
        sync.push(1)
    assert [path.name for path in tmp_path.iterdir()] == ["version_0"]
    ends.full = False
    assert sync.push(2) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["version_2"]


def test_connect_removes_what_a_killed_start_of_the_run_has_left_and_nothing_else(tmp_path: Path) -> None:
    for name in ("version_3", "version_4.partial", "version_2.old", "version_4.backup", "versions"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").touch()
    (tmp_path / "version_5").touch()
    DiskSync(Ends(), Ends(), folder=str(tmp_path), bucket_bytes=8).connect()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["version_4.backup", "version_5", "versions"]
