"""run_state.json, which lists the complete checkpoints of a run folder, and the state file of each of them."""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from slime_ppo.checkpoint.files import json_bytes, read_json, write_atomically
from slime_ppo.config.preflight import RUN_STATE_FILE
from slime_ppo.config.roles import RoleName
from slime_ppo.errors import CheckpointError

FORMAT = 1


@dataclass(frozen=True)
class Checkpoint:
    """A complete one. Paths are relative to the run folder where they lie in it, so that a run folder can be moved."""

    rollout_id: int
    folders: Mapping[RoleName, str]
    state_file: str
    state_sha256: str
    buffer_file: str | None = None

    @property
    def buffered(self) -> bool:
        """True when it holds samples that wait for their training."""
        return self.buffer_file is not None

    @property
    def paths(self) -> tuple[str, ...]:
        """Everything that belongs to it."""
        return (*self.folders.values(), self.state_file, *([] if self.buffer_file is None else [self.buffer_file]))


@dataclass(frozen=True)
class RunState:
    """The checkpoints of a run folder, oldest first. `run_id` is what trackers know the run by."""

    run_id: str
    checkpoints: tuple[Checkpoint, ...] = ()

    @property
    def newest(self) -> Checkpoint | None:
        return self.checkpoints[-1] if self.checkpoints else None

    def with_checkpoint(self, checkpoint: Checkpoint, *, keep: int | None) -> Self:
        """With this one as the newest, in the place of one of the same rollout; at most `keep` in all."""
        others = tuple(one for one in self.checkpoints if one.rollout_id != checkpoint.rollout_id)
        return replace(self, checkpoints=(*others, checkpoint)[-keep if keep else None :])

    def until(self, rollout_id: int) -> Self:
        """Without the checkpoints of later rollouts."""
        return replace(self, checkpoints=tuple(one for one in self.checkpoints if one.rollout_id <= rollout_id))

    def real_paths(self, run_folder: Path) -> set[str]:
        """Where everything lies that they hold."""
        return {os.path.realpath(run_folder / path) for one in self.checkpoints for path in one.paths}

    def write(self, run_folder: Path) -> None:
        """Publish: from now on these checkpoints count, and no others."""
        entries = [asdict(one) for one in self.checkpoints]
        content: dict[str, object] = {"format": FORMAT, "run_id": self.run_id, "checkpoints": entries}
        write_atomically(run_folder / RUN_STATE_FILE, json_bytes(content))

    @classmethod
    def read(cls, run_folder: Path) -> Self | None:
        """None where there is none. Raises CheckpointError for one that is not ours to read."""
        path = run_folder / RUN_STATE_FILE
        if not path.exists():
            return None
        content = read_json(path)
        check_format(path, content)
        try:
            checkpoints = tuple(Checkpoint(**entry) for entry in content["checkpoints"])
            return cls(run_id=str(content["run_id"]), checkpoints=checkpoints)
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"{path} has not the entries it was written with ({error}): it was edited or damaged") from error


@dataclass(frozen=True)
class SavedState:
    """One checkpoint's state file.

    `progress` is the loop's. `settings` are the run's options by `section.field`, `models` each role's shape by field. `files` are
    the bytes of every file of each role's folder, `buffer` those of the samples' file, None without samples.
    """

    progress: Mapping[str, Any]
    settings: Mapping[str, Any]
    models: Mapping[str, Mapping[str, Any]]
    files: Mapping[str, Mapping[str, int]]
    buffer: int | None = None

    def to_json(self) -> bytes:
        content: dict[str, object] = {
            "format": FORMAT,
            "progress": dict(self.progress),
            "settings": dict(self.settings),
            "models": {role: dict(shape) for role, shape in self.models.items()},
            "files": {role: dict(sizes) for role, sizes in self.files.items()},
            "buffer": self.buffer,
        }
        return json_bytes(content)

    @classmethod
    def read(cls, path: Path, sha256: str) -> Self:
        """Raises CheckpointError naming a file that is missing or not as it was written."""
        content = read_json(path, digest=sha256)
        check_format(path, content)
        return cls(**{name: content[name] for name in ("progress", "settings", "models", "files", "buffer")})


def check_format(path: Path, content: Mapping[str, Any]) -> None:
    """Raise CheckpointError for a file of another version."""
    if content.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has format {content.get('format')!r}, this version reads {FORMAT}: another version of slime_ppo has written it"
        )


def path_in(run_folder: Path, path: Path) -> str:
    """`path` as a checkpoint lists it: relative to the run folder when it lies in it."""
    real, run = os.path.realpath(path), os.path.realpath(run_folder)
    return os.path.relpath(real, run) if os.path.commonpath((real, run)) == run else real
