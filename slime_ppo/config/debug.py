"""Section `debug`: rollouts kept in files, training from such files, generating without training."""

from dataclasses import dataclass
from pathlib import Path

from slime_ppo.config.fields import option

_PLACE = "{rollout_id}"
_WHERE = f"a folder, or a file name with {_PLACE} in it"


@dataclass(frozen=True)
class DebugConfig:
    """Halves of a run on their own, joined by one file per rollout."""

    save_debug_rollout_data: str | None = option(
        None,
        help=f"keep every rollout in a file of its own: {_WHERE}. Samples and rewards when they are collected, and before the "
        "first update all columns, the step plan, learning rates and the KL coefficient",
        default_text="kept nowhere",
    )
    load_debug_rollout_data: str | None = option(
        None,
        help=f"train on the rollouts that --save-debug-rollout-data has kept here: {_WHERE}. No engine is started; comes with "
        "--debug-train-only",
        default_text="rollouts are generated",
    )
    debug_rollout_only: bool = option(
        False, help="generate and reward with the weights of --hf-checkpoint; no actor and no critic is started"
    )
    debug_train_only: bool = option(False, help="train without a rollout engine, on --load-debug-rollout-data")


def rollout_file(where: str, rollout_id: int) -> Path:
    """The file of one rollout: `{rollout_id}` in the name stands for its number, otherwise `where` is a folder.

    Example: rollout_file("dumps", 3) is dumps/rollout_0000003.npz, rollout_file("d/{rollout_id}.npz", 3) is d/3.npz.
    """
    return Path(where.replace(_PLACE, str(rollout_id))) if _PLACE in where else Path(where) / f"rollout_{rollout_id:07}.npz"
