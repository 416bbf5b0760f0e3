"""Whose the checkpoints in a role's folder are: each one names the run that has written it, and that run's folder."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_ppo.checkpoint.files import read_json
from slime_ppo.checkpoint.layout import IDENTITY_FILE, is_half, iteration_number
from slime_ppo.checkpoint.run_state import RunState
from slime_ppo.errors import CheckpointError


@dataclass(frozen=True)
class Ownership:
    """The checkpoints that a run may delete: those that `runs` have written, itself and those that its folder held before, unless
    they count, or may count, for a run folder elsewhere, as after `cp -r` of one whose critics lie outside. `listed`: the real
    paths of what run_state.json of this folder has listed until now."""

    run_folder: Path
    runs: frozenset[str]
    listed: frozenset[str] = frozenset()

    def owns(self, checkpoint: Path) -> bool:
        """Half a folder that does not say whose it is counts as own: one run at a time writes there."""
        said = _identity(checkpoint)
        if said is None:
            return is_half(checkpoint)
        return said.get("run_id") in self.runs and not self._counts_elsewhere(checkpoint, said)

    def _counts_elsewhere(self, checkpoint: Path, said: Mapping[str, Any]) -> bool:
        home, real = Path(said.get("run_folder", self.run_folder)), os.path.realpath(checkpoint)
        here = os.path.realpath(self.run_folder)
        if os.path.realpath(home) == here:
            return False
        if real not in self.listed and Path(here) not in Path(real).parents:
            return True  # a copy of this folder has written it, and may have been moved since, with its list
        try:
            state = RunState.read(home)
        except CheckpointError:
            return True  # there is a list, and it cannot be read
        return state is not None and real in state.real_paths(home)


def whole_checkpoints(folder: Path) -> list[Path]:
    """Folders of whole checkpoints in that of a role, by name."""
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    return [folder / name for name in names if iteration_number(name) is not None]


def writers(folder: Path, home: Path | None = None) -> frozenset[str]:
    """The runs that have written the checkpoints in a role's folder; with `home` those that have run in that folder."""
    said = [one for one in map(_identity, whole_checkpoints(folder)) if one is not None and "run_id" in one]
    real = None if home is None else os.path.realpath(home)
    return frozenset(str(one["run_id"]) for one in said if real in (None, one.get("run_folder")))


def owner_text(checkpoint: Path) -> str:
    """Whose it is, as far as it can be told."""
    said = _identity(checkpoint) or {}
    if "run_id" not in said:
        return "a run that they do not name"
    return f"run {said['run_id']}" + (f" in {said['run_folder']}" if "run_folder" in said else "")


def _identity(checkpoint: Path) -> Mapping[str, Any] | None:
    """What a checkpoint says about itself; None when it does not."""
    try:
        return read_json(checkpoint / IDENTITY_FILE)
    except CheckpointError:
        return None
