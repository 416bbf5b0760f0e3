"""What the tests of the converters run on each rank of the pool."""

from typing import Literal

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async

from slime_ppo.backends.megatron.checkpoint import load_checkpoint, save_checkpoint
from slime_ppo.backends.megatron.role import MegatronRole
from tests.dist.backends.cases import Case
from tests.dist.backends.ranks import _start

Loader = Literal["ours", "megatron", "megatron, stacked layers"]


def load_and_save(case: Case, source: str, out: str, loader: Loader) -> None:
    """Load actor and critic from `source`/actor and /critic, save them to `out`/actor and /critic. Stacked layers are made by
    Megatron's own writer."""
    for name, role in zip(("actor", "critic"), _start(case), strict=True):
        if loader == "ours":
            load_checkpoint(role, f"{source}/{name}/iter_0000000", with_optimizer=False)
        else:
            _load_by_megatron(role, f"{source}/{name}/iter_0000000")
        if loader == "megatron, stacked layers":
            _save_by_megatron(role, f"{out}/{name}")
        else:
            save_checkpoint(role, f"{out}/{name}", in_background=False)


def _save_by_megatron(role: MegatronRole, folder: str) -> None:
    dist_checkpointing.save(_state(role, stacked=True), folder)
    # its writer starts a process that holds a queue, and lets it live as long as the rank, whose end it would not notice
    queue, filesystem_async._results_queue = filesystem_async._results_queue, None
    if queue is not None:
        queue._manager.shutdown()


def _load_by_megatron(role: MegatronRole, folder: str) -> None:
    found = dist_checkpointing.load(_state(role, stacked=False), folder)
    for number, model in enumerate(role.models):
        model.load_state_dict(found[f"model{number}"])


def _state(role: MegatronRole, *, stacked: bool) -> dict:
    metadata = {"non_homogeneous_layers": not stacked}
    return {f"model{number}": model.sharded_state_dict(metadata=metadata) for number, model in enumerate(role.models)}
