"""Saves checkpoints of a whole run: actor, then critic, then the loop's state, and last the one file that says "done".

A kill at any moment leaves the checkpoint before it whole and listed: folders are written beside their place and renamed, and
nothing is deleted before run_state.json names its successor.
"""

import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

from slime_ppo.checkpoint.buffer import write_samples
from slime_ppo.checkpoint.files import delete_checkpoint, file_sizes, json_bytes, publish_folder, write_atomically
from slime_ppo.checkpoint.layout import (
    IDENTITY_FILE,
    PARTIAL,
    STATE_FOLDER,
    buffer_name,
    is_iteration,
    is_state_file,
    state_name,
)
from slime_ppo.checkpoint.ownership import Ownership
from slime_ppo.checkpoint.progress import Progress
from slime_ppo.checkpoint.run_state import FORMAT, Checkpoint, RunState, SavedState, path_in
from slime_ppo.config.roles import RoleName
from slime_ppo.conversion.torch_dist_folder import LATEST_FILE, iteration_folder
from slime_ppo.errors import CheckpointError, ParallelError, SlimePpoError
from slime_ppo.orchestration.interrupts import Interrupted, Preempted, StopRequest
from slime_ppo.orchestration.protocols import TrainGroup
from slime_ppo.tracking.clock import RunClock

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SavePlan:
    """Where a run saves, how often, and what of it never changes. `folders` are the roles', in the order in which they are saved;
    `interval` None: only at the end. `keep` None: all. `settings` and `models` as in SavedState. `replaced_runs` are those that the
    run folder held before, and whose checkpoints go, `replaced_paths` what was listed then."""

    run_folder: Path
    folders: Mapping[RoleName, Path]
    interval: int | None
    keep: int | None
    settings: Mapping[str, object]
    models: Mapping[str, Mapping[str, object]]
    replaced_runs: frozenset[str] = frozenset()
    replaced_paths: frozenset[str] = frozenset()


@dataclass(frozen=True)
class _Unpublished:
    """A checkpoint that the ranks write, or have written, and that nothing lists yet."""

    progress: Progress
    began: float


class CheckpointSaver:
    """The checkpoints of one run. `take` makes a role the one that is awake."""

    def __init__(
        self, plan: SavePlan, state: RunState, *, groups: Mapping[RoleName, TrainGroup], take: Callable[[RoleName], None]
    ) -> None:
        self.plan = plan
        self.state = state
        self._groups = groups
        self._take = take
        self._waiting: _Unpublished | None = None

    def is_due(self, rollout_id: int) -> bool:
        """Whether the interval asks for a checkpoint after so many rollouts."""
        return self.plan.interval is not None and rollout_id % self.plan.interval == 0

    def save(self, progress: Progress, *, in_background: bool = False) -> None:
        """Save what stands between two rollouts, or before the training of one. `in_background`: the files are written while the
        run goes on, and count from the next `publish` on, which comes with the next save at the latest.

        Raises CheckpointError when something cannot be written; the checkpoints of before stay as they are.
        """
        self.publish()
        newest = self._with_weights_of(progress.rollout_id)
        if newest is not None and (newest.buffered or not progress.samples):
            return
        began = time.perf_counter()
        with self._guarded(progress.rollout_id):
            for role, folder in {} if newest is not None else self.plan.folders.items():
                self._take(role)
                partial = folder / (iteration_folder(progress.rollout_id) + PARTIAL)
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
                self._groups[role].save_checkpoint(str(partial), in_background=in_background)
        self._waiting = _Unpublished(replace(progress, skipped_in_a_row=dict(progress.skipped_in_a_row)), began)
        if not in_background:
            self.publish()

    def publish(self) -> None:
        """Wait for the last save and make it count; nothing is done when there is none. Raises CheckpointError as `save`."""
        if self._waiting is None:
            return
        waiting, self._waiting = self._waiting, None
        rollout_id = waiting.progress.rollout_id
        before, newest = self.state, self._with_weights_of(rollout_id)
        with self._guarded(rollout_id):
            folders = self._publish_roles(rollout_id) if newest is None else newest.folders
            checkpoint = self._write_state(waiting.progress, folders)
            after = before.with_checkpoint(checkpoint, keep=self.plan.keep)
            after.write(self.plan.run_folder)
            for folder in self.plan.folders.values():  # for Megatron's tools: never one that is taken back
                write_atomically(folder / LATEST_FILE, str(rollout_id).encode())
        self.state = after
        _log.info("checkpoint after %d rollouts: whole %.1f s after its begin", rollout_id, time.perf_counter() - waiting.began)
        self._sweep(before)

    def publish_before_end(self) -> None:
        """Let a save in the background count although the run ends by an error elsewhere or by a signal: its files are waited for.
        Where that fails too it is given up, which is a warning: the run has a reason to end already."""
        if self._waiting is None:
            return
        rollout_id = self._waiting.progress.rollout_id
        _log.warning("the run ends; it waits for the files of the checkpoint after %d rollouts", rollout_id)
        try:
            self.publish()
        except Exception as error:
            _log.warning("the checkpoint after %d rollouts does not count: %s", rollout_id, error)

    def _with_weights_of(self, rollout_id: int) -> Checkpoint | None:
        """The newest checkpoint, if it was saved after so many rollouts: its weights are the present ones."""
        newest = self.state.newest
        return newest if newest is not None and newest.rollout_id == rollout_id else None

    def _publish_roles(self, rollout_id: int) -> dict[RoleName, str]:
        """The roles' folders get their names when all are whole; as a checkpoint lists them."""
        for role in self.plan.folders:
            self._groups[role].finish_save()
        listed: dict[RoleName, str] = {}
        for role, folder in self.plan.folders.items():
            final = folder / iteration_folder(rollout_id)
            partial = final.with_name(final.name + PARTIAL)
            if not any(partial.iterdir()):
                raise CheckpointError(
                    f"{partial} is empty where the driver runs, although the {role}'s ranks have written to it: the run folder "
                    "must be the same one on all nodes"
                )
            identity = {"format": FORMAT, "run_id": self.state.run_id, "role": role, "rollout_id": rollout_id}
            home = {"run_folder": os.path.realpath(self.plan.run_folder)}
            write_atomically(partial / IDENTITY_FILE, json_bytes(identity | home))
            publish_folder(partial, final)
            listed[role] = path_in(self.plan.run_folder, final)
        return listed

    def _write_state(self, progress: Progress, folders: Mapping[RoleName, str]) -> Checkpoint:
        run, rollout_id = self.plan.run_folder, progress.rollout_id
        home = run / STATE_FOLDER
        home.mkdir(exist_ok=True)
        buffer = home / buffer_name(rollout_id) if progress.samples else None
        if buffer is not None:
            write_samples(buffer, progress.samples)
        content = SavedState(
            progress=progress.state_dict(),
            settings=self.plan.settings,
            models=self.plan.models,
            files={role: file_sizes(run / folder) for role, folder in folders.items()},
            buffer=None if buffer is None else buffer.stat().st_size,
        ).to_json()
        path = home / state_name(rollout_id, buffered=bool(progress.samples))
        write_atomically(path, content)
        return Checkpoint(
            rollout_id,
            folders,
            state_file=path_in(run, path),
            state_sha256=sha256(content).hexdigest(),
            buffer_file=None if buffer is None else path_in(run, buffer),
        )

    def _sweep(self, before: RunState) -> None:
        """Delete what is listed no more, and what a killed run has left half done, never what another run has written. Best effort.

        The actor's come last: they tell which runs this folder has had (`replaced_runs`).
        """
        run, state = self.plan.run_folder, self.state
        listed, was_listed = state.real_paths(run), self.plan.replaced_paths | before.real_paths(run)
        own = Ownership(run, self.plan.replaced_runs | {state.run_id}, was_listed)
        folders = reversed(list(self.plan.folders.values()))
        found = (
            *(path for folder in folders for path in folder.iterdir() if is_iteration(path.name)),
            *(run / path for one in before.checkpoints for path in one.paths),
            *(path for path in (run / STATE_FOLDER).iterdir() if is_state_file(path.name)),
        )
        for path in found:
            if os.path.realpath(path) not in listed and (not is_iteration(path.name) or own.owns(path)):
                _remove(path)

    @contextmanager
    def _guarded(self, rollout_id: int) -> Iterator[None]:
        """Turns whatever stops a save into one CheckpointError that says what is left, and gives back the room of the attempt."""
        try:
            yield
        except (CheckpointError, OSError) as error:
            self._let_ranks_finish()
            run = self.plan.run_folder
            self.state = RunState.read(run) or self.state  # the list may have been replaced before what failed
            if self._with_weights_of(rollout_id) is None:
                for folder in self.plan.folders.values():
                    for name in (iteration_folder(rollout_id) + PARTIAL, iteration_folder(rollout_id)):
                        _remove(folder / name)
            newest = self.state.newest
            left = (
                f"The checkpoint after {newest.rollout_id} rollouts is whole: go on from it with --load {run}"
                if newest is not None
                else "There is none of before"
            )
            cause = error if isinstance(error, CheckpointError) else f"{error.filename or run}: {error.strerror or error}"
            raise CheckpointError(f"the checkpoint after {rollout_id} rollouts could not be saved: {cause}. {left}") from error

    def _let_ranks_finish(self) -> None:
        """No rank writes any more when this returns, also where the save of one role has failed while that of another goes on."""
        for role in self.plan.folders:
            try:
                self._groups[role].finish_save()
            except SlimePpoError as error:  # the first failure is the one to tell
                _log.warning("%s", error)


def save_between(
    saver: CheckpointSaver | None, stop: StopRequest, progress: Progress, *, last: bool, in_background: bool, clock: RunClock
) -> None:
    """The checkpoint that is due between two rollouts; the last one, and one on request, is on disk when this returns. Raises
    Preempted when the run was asked to end, unless it is over."""
    if saver is not None and (last or saver.is_due(progress.rollout_id)):
        with clock.phase("save"):
            saver.save(progress, in_background=in_background and not (last or stop.requested))
    if not last:
        stop.check()


@contextmanager
def saved_at_end(saver: CheckpointSaver | None, progress: Progress, *, before: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Whatever ends the loop inside, what can be saved is.

    On Preempted the present state, after `before`. On another error or signal a checkpoint whose files are written in the
    background: it is waited for, and counts. Between its begin and the loop's next `publish` no rank trains, so they answer. Not so
    when one has died or hangs (ParallelError), or was cut off in the middle of a command: then, and when the signal hits a save
    itself, what is half done stays, listed nowhere, until the next save in the folder removes it.
    """
    try:
        yield
    except Preempted:
        before()
        if saver is not None:
            saver.save(progress)
        raise
    except ParallelError:
        raise
    except (Exception, Interrupted):
        if saver is not None:
            saver.publish_before_end()
        raise


def _remove(path: Path) -> None:
    """Delete a file or folder; what cannot be deleted is a warning."""
    try:
        if path.is_dir() and not path.is_symlink():
            delete_checkpoint(path)
        elif path.exists():
            path.unlink()
    except OSError as error:
        _log.warning("%s could not be deleted: %s", path, error)
