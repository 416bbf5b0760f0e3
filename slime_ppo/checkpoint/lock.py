"""The locks on the folders that a run writes: while it lives no other run gets into them.

They are POSIX record locks: the kernel takes them back when the process ends, in whatever way, forked children do not have them,
and they work between machines over NFS. The file stays behind; it is the lock that counts.
"""

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from slime_ppo.errors import ConfigError

LOCK_FILE = ".lock"
_HELD = (errno.EACCES, errno.EAGAIN)
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_MAX_BYTES = 4096


class FolderLocks:
    """The locks of one run; `folders` by the flag that names them.

    On entry those folders are locked that are there, before anything in them is read, and `claim` makes and locks the others when
    the run is known to begin. One that ends without having claimed them leaves no file that was not there. Raises ConfigError
    that names the run which holds a folder. `warnings`: of folders that cannot be locked.
    """

    def __init__(self, folders: Mapping[str, Path]) -> None:
        self.warnings: list[str] = []
        self._folders = dict(folders)
        self._open: list[int] = []
        self._made: list[Path] = []

    def __enter__(self) -> Self:
        try:
            for flag, folder in list(self._folders.items()):
                if folder.is_dir():
                    self._lock(flag, self._folders.pop(flag))
        except BaseException:
            self._release()
            raise
        return self

    def claim(self) -> None:
        """The run begins: from here on the folders are its own."""
        for flag, folder in self._folders.items():
            made = Path(os.path.realpath(folder))  # the folder that a link names may have gone, as on a disk that is emptied
            try:
                made.mkdir(parents=True)
            except FileExistsError as error:
                raise ConfigError(f"{flag} {folder}: another run has begun there while this one read its inputs") from error
            except OSError as error:
                raise _not_writable(flag, folder, error) from error
            self._made.append(made)
            self._lock(flag, folder)
        self._folders.clear()
        self._made.clear()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._release()

    def _release(self) -> None:
        """While the locks still hold, take away what an unclaimed run has made, the newest first."""
        for path in reversed(self._made):
            try:
                (path.rmdir if path.is_dir() else path.unlink)()
            except OSError:
                continue  # somebody has put something there, or a disk has gone: not ours to tell
        self._made.clear()
        while self._open:
            os.close(self._open.pop())

    def _lock(self, flag: str, folder: Path) -> None:
        path = folder / LOCK_FILE
        try:
            new = not path.exists()
            handle = _locked(path)
            self._made += [path] if new else []
            if handle is None:
                self.warnings.append(f"{flag} {folder}: its file system has no locks, so nothing keeps a second run out of it")
                return
            self._open.append(handle)
            os.ftruncate(handle, 0)
            os.pwrite(handle, _about_this_process(), 0)
        except _HeldError as error:
            raise ConfigError(
                f"{flag} {folder}: another run writes there ({error}). Wait until it has ended, end it, or choose another folder. "
                f"If its machine is gone for good, delete {path}"
            ) from error
        except OSError as error:
            raise _not_writable(flag, folder, error) from error


class _HeldError(Exception):
    """Who holds a lock, in words."""


def _locked(path: Path) -> int | None:
    """A descriptor that holds the lock as long as it is open, and no other one of the file is closed; None where there are no
    locks. Raises _HeldError."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            content = os.pread(handle, _MAX_BYTES, 0)
            os.close(handle)
            if error.errno in _HELD:
                raise _HeldError(_holder(content)) from error
            if error.errno in _NO_LOCKS:
                return None
            raise
        if _is_at(handle, path):
            return handle
        os.close(handle)  # whoever held it has deleted it before we had it: the next round makes another file


def _is_at(handle: int, path: Path) -> bool:
    """Whether the open file still has its name."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _about_this_process() -> bytes:
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    return (json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": since}) + "\n").encode()


def _holder(content: bytes) -> str:
    try:
        found = json.loads(content)
        return f"process {found['pid']} on {found['host']}, since {found['since']}"
    except (ValueError, KeyError, TypeError):
        return "it has not said yet which process it is"


def _not_writable(flag: str, folder: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{flag} {folder}: cannot write there ({error.strerror}). Choose a folder you can write to")
