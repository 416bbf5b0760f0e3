"""Where a run keeps its checkpoints, and what the files and folders are called.

<save>/run_state.json                   the only mark of "done": it lists every complete checkpoint, and is replaced last
<save>/actor/iter_0000020/              after 20 rollouts, in Megatron's torch_dist format; iter_0000020.partial while it is written
                                        and iter_0000020.old while it is deleted
<critic-save>/iter_0000020/             the critic's, in a folder of its own always
<save>/rollout/state_0000020.json       everything that is not in the ranks
<save>/rollout/buffer_0000020.npz       only where samples were collected and not trained yet
"""

import re
from pathlib import Path

from slime_ppo.config.roles import RoleName
from slime_ppo.config.root import Config

IDENTITY_FILE = "slime_ppo.json"
PARTIAL, OLD = ".partial", ".old"
STATE_FOLDER = "rollout"
_ITERATION = re.compile(r"iter_(\d{7,})")
_STATE_FILE = re.compile(r"(state_\d{7,}(_buffered)?\.json|buffer_\d{7,}\.npz)(\.new)?")


def iteration_number(name: str) -> int | None:
    """The number in a folder's name; None when it is no whole checkpoint's."""
    found = _ITERATION.fullmatch(name)
    return None if found is None else int(found.group(1))


def is_iteration(name: str) -> bool:
    """True for folders of checkpoints, whole or not."""
    return iteration_number(name.removesuffix(PARTIAL).removesuffix(OLD)) is not None


def is_half(folder: Path) -> bool:
    """True for folders of checkpoints that are being written or deleted."""
    return folder.suffix in (PARTIAL, OLD)


def state_name(rollout_id: int, *, buffered: bool) -> str:
    """The file of a checkpoint's rollout state. With samples it is another one: a run that was stopped twice after the same rollout
    may have both, one after the other."""
    return f"state_{rollout_id:07d}{'_buffered' if buffered else ''}.json"


def buffer_name(rollout_id: int) -> str:
    """The file of samples that were collected and not trained yet."""
    return f"buffer_{rollout_id:07d}.npz"


def is_state_file(name: str) -> bool:
    """True for the names of the two above, written or half written: nothing else in their folder is ours."""
    return _STATE_FILE.fullmatch(name) is not None


def role_folders(config: Config) -> dict[RoleName, Path]:
    """Where each role of the run saves its checkpoints."""
    return {role: Path(config.role(role).checkpoint_folder) for role in config.roles}
