"""Debug modes that contradict each other, or have nothing to work on. Every message names the options."""

import os

from slime_ppo.config.checked import Checked
from slime_ppo.config.debug import rollout_file
from slime_ppo.config.root import Config
from slime_ppo.errors import ConfigError

_FLAGS = {
    "debug.load_debug_rollout_data": "--load-debug-rollout-data",
    "debug.save_debug_rollout_data": "--save-debug-rollout-data",
}


def check_debug(checked: Checked) -> None:
    """Refuse debug modes that exclude each other. Raises ConfigError."""
    debug = checked.config.debug
    if debug.debug_rollout_only and (debug.debug_train_only or debug.load_debug_rollout_data is not None):
        other = "debug.debug_train_only" if debug.debug_train_only else "debug.load_debug_rollout_data"
        raise ConfigError(
            f"{checked.cite('debug.debug_rollout_only')} starts no trainer, {checked.cite(other)} no rollout engine: nothing would "
            "be left of the run. Leave one of them out"
        )
    if debug.debug_train_only != (debug.load_debug_rollout_data is not None):
        given, missing = "debug.debug_train_only", "--load-debug-rollout-data, the rollouts to train on"
        if not debug.debug_train_only:
            given, missing = (
                "debug.load_debug_rollout_data",
                "--debug-train-only: a run that trains on files has no use for an engine",
            )
        raise ConfigError(f"{checked.cite(given)} needs {missing}. Add that, or leave it out")
    for key, flag in _FLAGS.items():
        where = checked.values[key]
        if isinstance(where, str) and where.endswith(".npz") and "{rollout_id}" not in where:
            raise ConfigError(
                f"{checked.cite(key)} is one file, and every rollout has its own. Put {{rollout_id}} into the name, as in "
                f"{flag} {where.removesuffix('.npz')}_{{rollout_id}}.npz, or give a folder"
            )
    save, load = debug.save_debug_rollout_data, debug.load_debug_rollout_data
    if save is not None and load is not None and os.path.realpath(rollout_file(save, 0)) == os.path.realpath(rollout_file(load, 0)):
        raise ConfigError(
            f"{checked.cite('debug.save_debug_rollout_data')} is where the rollouts are loaded from: they would be replaced while "
            "they are read. Save elsewhere, or leave it out"
        )


def check_rollout_files_free(config: Config) -> None:
    """No rollout of another run is overwritten unless --overwrite says so. Raises ConfigError."""
    where = config.debug.save_debug_rollout_data
    if where is None or config.run.overwrite:
        return
    for rollout_id in range(config.run.num_rollout):
        file = rollout_file(where, rollout_id)
        if file.exists():
            raise ConfigError(
                f"--save-debug-rollout-data {where}: already holds {file.name} of another run. Choose another folder, or say "
                "--overwrite"
            )
