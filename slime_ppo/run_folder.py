"""What a run does to its folder when it begins."""

import logging
import os
import shutil
import sys
from pathlib import Path

from slime_ppo.checkpoint.files import write_atomically
from slime_ppo.checkpoint.lock import FolderLocks
from slime_ppo.checkpoint.run_state import RunState
from slime_ppo.checkpoint.start import StartPoint
from slime_ppo.config.preflight import CONFIG_FILE, METRICS_FILE, RUN_STATE_FILE, loads_own_folder
from slime_ppo.config.root import Config
from slime_ppo.errors import CheckpointError

_log = logging.getLogger(__name__)

RECORDS = (METRICS_FILE, "samples.jsonl")
"""What a run that goes on in another folder takes with it."""


def folder_locks(config: Config) -> FolderLocks:
    """Those of the run folder, and of the critic's: another run may have been told to save its critic there."""
    folders = {"--save": Path(config.run.save)}
    if config.has_critic and (config.saves_checkpoints or config.model.save_hf):
        folders["--critic-save"] = Path(config.role("critic").checkpoint_folder)
    return FolderLocks(folders)


def claim_run_folder(config: Config, start: StartPoint) -> None:
    """Write the resolved config. Where the run goes on, the folder has the records of the saved run, of which the trackers drop
    what comes after the checkpoint; otherwise those of an earlier run go, its list of checkpoints first: two runs never mix.

    Called when all processes are up: a run that could not start has destroyed nothing. Weights stay until this run's own
    take their place: a run that is interrupted must not cost those of the one before.
    """
    folder = Path(config.run.save)
    if start.resumed and loads_own_folder(config):
        start.run_state.write(folder)  # without the checkpoints after the one that is resumed
    else:
        for file in (RUN_STATE_FILE, *RECORDS, "run.json", "report.html"):
            (folder / file).unlink(missing_ok=True)
        if config.tracking.use_tensorboard:
            shutil.rmtree(folder / "tensorboard", ignore_errors=True)  # event files of two runs would be drawn as one
        if start.records is not None:
            for source in filter(Path.exists, (start.records / name for name in RECORDS)):
                shutil.copyfile(source, folder / source.name)
    write_atomically(folder / CONFIG_FILE, config.to_yaml().encode())


def open_logs(config: Config) -> None:
    """The driver's log in the run folder, behind what is in it: that may tell what has ended the run before, and this one may end
    before it has begun. Warnings are shown on the console, too."""
    folder = Path(config.run.save)
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(folder / "logs" / "driver.log", encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(message)s"))
    package = logging.getLogger("slime_ppo")
    console = logging.StreamHandler(sys.stderr)
    console.setLevel(logging.WARNING)
    console.setFormatter(logging.Formatter("warning: %(message)s"))
    package.handlers = [handler, console]
    package.setLevel(logging.INFO)
    package.propagate = False
    _log.info("process %d starts a run", os.getpid())


def way_on(config: Config, start: StartPoint | None) -> str:
    """How to go on with what a run that was stopped has saved, in words; where its folder is when it has saved nothing.

    `start` is None when the run was stopped before the folder was its own.
    """
    folder = config.run.save
    if start is None:
        return "the run had not begun"
    try:
        state = RunState.read(Path(folder))
    except CheckpointError:
        state = None
    if state is None or state.newest is None or state.run_id != start.run_state.run_id:
        return f"the run folder is {folder}"
    return f"saved after {state.newest.rollout_id} rollouts: go on with --load {folder} --save {folder}"
