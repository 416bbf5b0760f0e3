"""Weight sync by files: the trainer writes a Hugging Face folder that every server reads. Needs a file system that both see."""

import os
import re
import shutil
from pathlib import Path

from slime_ppo.errors import WeightSyncError
from slime_ppo.weight_sync.base import CheckMode, FolderSource, FolderTarget, PushCheck, finish_push
from slime_ppo.weight_sync.bucket import plan_buckets

_OWN_NAME = re.compile(r"version_\d+(\.partial|\.old)?")


class FolderSync:
    """`WeightSync` without a trainer: the engine reads the weights of a Hugging Face folder that nobody changes."""

    def __init__(self, target: FolderTarget, folder: str, *, bucket_bytes: int) -> None:
        self._target, self._folder, self._bucket_bytes = target, os.path.abspath(folder), bucket_bytes

    def connect(self) -> None:
        self._manifest = self._target.manifest()

    def push(self, version: int) -> int:
        self._target.begin_update(self._manifest, version, bucket_bytes=self._bucket_bytes)
        self._target.load_folder(self._folder)
        return finish_push(self._target, version)

    def close(self) -> None:
        """There is no connection."""


class DiskSync:
    """`WeightSync` by one folder per version, `<folder>/version_<n>`, which appears when it is whole; the one before it is removed
    when the engine serves the new one. So there must be room for two copies of the model. `folder` is this run's alone: what an
    earlier start of it, killed, has left there goes first."""

    def __init__(
        self, source: FolderSource, target: FolderTarget, *, folder: str, bucket_bytes: int, check: CheckMode = "first"
    ) -> None:
        self._source = source
        self._target = target
        self._folder = Path(os.path.abspath(folder))
        self._bucket_bytes = bucket_bytes
        self._check = PushCheck(check)
        self._served: Path | None = None

    def connect(self) -> None:
        self._manifest = self._source.manifest()
        self._buckets = plan_buckets(self._manifest, self._bucket_bytes)
        for left in self._folder.glob("version_*"):
            if _OWN_NAME.fullmatch(left.name):
                shutil.rmtree(left, ignore_errors=True)

    def push(self, version: int) -> int:
        target, folder = self._target, self._folder / f"version_{version}"
        target.begin_update(self._manifest, version, bucket_bytes=self._bucket_bytes)
        self._write(folder)
        target.load_folder(str(folder))
        if self._check.is_due:
            for bucket in self._buckets:
                target.check_bucket(bucket, self._source.export_bucket(bucket))
        reported = finish_push(target, version)
        self._check.passed()
        if self._served is not None and self._served != folder:
            shutil.rmtree(self._served, ignore_errors=True)
        self._served = folder
        return reported

    def close(self) -> None:
        """The last folder is removed, too."""
        if self._served is not None:
            shutil.rmtree(self._served, ignore_errors=True)
            self._served = None
        self._check.renew()

    def _write(self, folder: Path) -> None:
        try:
            self._source.publish_hf(str(folder))
        except WeightSyncError as error:
            raise WeightSyncError(
                f"the weights could not be written to {folder} (--weight-sync-folder), which needs room for two copies: {error}"
            ) from error
