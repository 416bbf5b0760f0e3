"""Checkpoints of a role in Megatron's torch_dist format, by the names and shapes of the whole model.

Every rank writes its own numbers into one file, on a thread of its own; the first rank writes what all of them share. Whatever
fails, fails on all ranks with the same words, and a load changes nothing before it is known that everything is there.
"""

import io
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel

from slime_ppo.backends.megatron.collectives import gather_objects
from slime_ppo.backends.megatron.stored_state import (
    optimizer_shards,
    set_steps_done,
    steps_done,
    stored_parameters,
    weight_pieces,
)
from slime_ppo.backends.megatron.torch_dist_io import Piece, RankWriter
from slime_ppo.conversion.hf_io import write_companions
from slime_ppo.conversion.torch_dist import BACKEND_FILE, COMMON_FILE, HF_FOLDER, OPTIMIZER_PREFIX, RNG_PREFIX
from slime_ppo.conversion.torch_dist_folder import extra_states
from slime_ppo.conversion.torch_dist_read import TorchDistReader
from slime_ppo.conversion.torch_dist_write import Written, packed, write_common, write_metadata
from slime_ppo.disk import flush, root_cause
from slime_ppo.errors import CheckpointError
from slime_ppo.types.load_report import LoadReport

if TYPE_CHECKING:
    from slime_ppo.backends.megatron.role import MegatronRole

Made = TypeVar("Made")

_OWN_SECTION = "slime_ppo"
_VALUE_HEAD = "output_layer.weight"


@dataclass(frozen=True)
class UnfinishedSave:
    """A save whose file is being written; `common` is what the first rank writes when all files are there."""

    folder: Path
    writing: "Future[Written]"
    common: dict[str, Any]


def save_checkpoint(role: "MegatronRole", folder: str, *, in_background: bool) -> None:
    """Write weights, optimizer and random states of the role into `folder`, new or empty and the same for all ranks.

    The role is awake, and its parameters are whole. In the background the state is copied to the host before this returns, and
    `finish_save` must follow; otherwise tensors come to the host one by one, and all is done. Raises CheckpointError, the same
    on all ranks. Collective.
    """
    if role.unfinished_save is not None:
        raise RuntimeError(f"a save to {role.unfinished_save.folder} is under way: finish_save comes before the next one")
    _check_awake(role)
    target = Path(folder)
    # the first rank alone: another one might find what a faster rank has written already
    _agree(lambda: _make_folder(target) if _is_first(role) else None, f"making {target}")
    steps = max(gather_objects(steps_done(role.optimizer), dist.group.WORLD))
    writer = _agree(lambda: _writer(role, target, detached=in_background), f"collecting the state for {target}")
    thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
    role.unfinished_save = UnfinishedSave(target, thread.submit(writer.write), _common_state(role, steps))
    thread.shutdown(wait=False)
    if not in_background:
        finish_save(role)


def finish_save(role: "MegatronRole") -> None:
    """Wait until all files of the last save are on disk, and write what makes a checkpoint of them. Does nothing without one.

    Raises CheckpointError, the same on all ranks, when a rank could not write. Collective.
    """
    save, role.unfinished_save = role.unfinished_save, None
    if save is None:
        return
    written = _agree(save.writing.result, f"writing the checkpoint {save.folder}")
    everything: list[Any] | None = [None] * dist.get_world_size() if _is_first(role) else None
    dist.gather_object(written, everything, dst=0)
    _agree(lambda: _complete(role, save, everything), f"completing the checkpoint {save.folder}")


def load_checkpoint(role: "MegatronRole", folder: str, *, with_optimizer: bool, keeps_missing_head: bool = False) -> LoadReport:
    """Take over the weights in `folder`, and with the optimizer its state and, where the ranks are alike, the random states.

    The role is awake; its layout may be another one than that of the ranks that have saved. Weights alone may be of another
    floating-point type. `keeps_missing_head`: a critic's value head stays as it is where `folder` holds none. Raises
    CheckpointError, the same on all ranks, that lists everything missing, unexpected or of another shape or type; then nothing
    has changed. Collective.
    """
    _check_awake(role)
    action, path = f"loading {folder}", Path(folder)
    source = _agree(lambda: TorchDistReader(path), action)
    common = _agree(lambda: _read_common(path), action) if with_optimizer else {}
    steps = int(common["optimizer_steps"]) if with_optimizer else 0
    stored = stored_parameters(role.models, role.table, role.layout)
    keeps_head = keeps_missing_head and role.table.head == "value" and not _holds_head(source, role.shape.hidden_size)
    if keeps_head:
        stored = [one for one in stored if one.place.key != _VALUE_HEAD]
    shards = optimizer_shards(role.optimizer, stored) if with_optimizer else []
    weights = [piece for one in stored for piece in weight_pieces(one)]
    expected = weights + [piece for shard in shards for piece in shard.expected_pieces(with_moments=steps > 0)]
    _check_contents(source, expected, with_optimizer=with_optimizer, ignored=(_VALUE_HEAD,) if keeps_head else ())
    plan = _agree(lambda: source.plan([piece.region for piece in expected]), action)

    if with_optimizer:
        set_steps_done(role.optimizer, steps)
    for one in stored:
        if one.place.padded:
            one.parameter.data.zero_()
    pieces = weights + [piece for shard in shards for piece in shard.pieces()]
    _agree(lambda: source.fill(plan, [piece.tensor for piece in pieces]), action)
    if not with_optimizer:
        role.optimizer.reload_model_params()
    restores_rng = with_optimizer and common.get("ranks") == _ranks(role)
    if restores_rng:
        _restore_rng(_agree(lambda: source.read_object(_rng_key(role)), action))
    return LoadReport(with_optimizer=with_optimizer, restored_rng=restores_rng)


def _holds_head(source: TorchDistReader, hidden_size: int) -> bool:
    found = source.tensors.get(_VALUE_HEAD)
    return found is not None and tuple(found.size) == (1, hidden_size)


def _check_awake(role: "MegatronRole") -> None:
    if not role.memory.awake:
        raise RuntimeError("a role that is offloaded can neither be saved nor loaded: wake it first")


def _is_first(role: "MegatronRole") -> bool:
    return role.settings.rank.rank == 0


def _agree(make: Callable[[], Made], action: str) -> Made:
    """What `make` returns here, once it has returned on every rank of the role; else CheckpointError with what all ranks that
    failed say. Collective."""
    problem, made = None, None
    cause: Exception | None = None
    try:
        made = make()
    except CheckpointError as error:
        problem, cause = str(error), error
    except (OSError, RuntimeError) as error:
        problem, cause = f"{action} failed: {root_cause(error)}", error
    found = [one for one in gather_objects(problem, dist.group.WORLD) if one is not None]
    if found:
        raise CheckpointError("; ".join(dict.fromkeys(found))) from cause
    return made  # type: ignore[return-value]


def _make_folder(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    present = sorted(os.listdir(folder))
    if present:
        raise CheckpointError(
            f"{folder} holds {', '.join(present[:5])} already, expected a new or empty folder for a checkpoint. Remove it, or save "
            "elsewhere"
        )


def _writer(role: "MegatronRole", folder: Path, *, detached: bool) -> RankWriter:
    writer = RankWriter(folder, _own_pieces(role), _own_objects(role), rank=role.settings.rank.rank)
    if detached:
        writer.detach()
    return writer


def _own_pieces(role: "MegatronRole") -> list[Piece]:
    """What this rank writes."""
    stored = stored_parameters(role.models, role.table, role.layout)
    weights = [piece for one in stored if one.writes_weight for piece in weight_pieces(one)]
    shards = [shard for shard in optimizer_shards(role.optimizer, stored) if shard.stored.writes]
    return weights + [piece for shard in shards for piece in shard.pieces()]


def _own_objects(role: "MegatronRole") -> dict[str, bytes]:
    """This rank's random states; from the first rank also the extra states of linears, all empty, that Megatron's own loader asks
    for."""
    empty = dict.fromkeys(extra_states(role.table), packed(None)) if _is_first(role) else {}
    return {_rng_key(role): _rng_state(role)} | empty


def _common_state(role: "MegatronRole", steps: int) -> dict[str, Any]:
    """What all ranks have in common; the first entries are for Megatron's own loader."""
    common: dict[str, Any] = {
        "checkpoint_version": 3.0,
        "content_metadata": {"distrib_optim_sharding_type": "fully_reshardable", "non_homogeneous_layers": True},
        _OWN_SECTION: {"format": 1, "optimizer_steps": steps, "ranks": _ranks(role)},
    }
    if steps:
        parts = [
            part.state_dict() | {"param_state_sharding_type": "fully_reshardable"} for part in role.optimizer.chained_optimizers
        ]
        common["optimizer"] = parts[0] if len(parts) == 1 else dict(enumerate(parts))
    return common


def _complete(role: "MegatronRole", save: UnfinishedSave, everything: Sequence[Written] | None) -> None:
    """The first rank's last part of a save."""
    if everything is None:
        return
    companions = save.folder / HF_FOLDER
    companions.mkdir()
    write_companions(companions, source=Path(role.settings.model.hf_folder), config_changes=role.table.config_changes)
    write_common(save.folder, save.common)
    write_metadata(save.folder, everything)
    written = (*companions.iterdir(), companions, save.folder / COMMON_FILE, save.folder / BACKEND_FILE, save.folder)
    for path in written:
        flush(path)


def _read_common(folder: Path) -> dict[str, Any]:
    """Our section of what all ranks have in common. Raises CheckpointError for a folder that holds weights alone."""
    path = folder / COMMON_FILE
    try:
        # Megatron-LM's own holds the arguments of its command line, which are not read
        found = torch.load(path, weights_only=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing. Load an earlier checkpoint") from error
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read ({type(error).__name__}). Load an earlier checkpoint") from error
    if _OWN_SECTION not in found or found[_OWN_SECTION]["optimizer_steps"] is None:
        raise CheckpointError(f"{folder} holds weights alone, not the optimizer of a run: load it as weights")
    section: dict[str, Any] = found[_OWN_SECTION]
    return section


def _check_contents(source: TorchDistReader, expected: Sequence[Piece], *, with_optimizer: bool, ignored: Sequence[str]) -> None:
    """One CheckpointError, the same on all ranks, with every difference between what they expect and what is there. Collective."""
    problems: dict[str, list[str]] = {"missing": [], "of another shape or type": []}
    wanted = {piece.key: piece for piece in expected}
    for key, piece in wanted.items():
        found = source.tensors.get(key)
        if found is None:
            problems["missing"].append(key)
            continue
        dtype, whole = found.properties.dtype, tuple(found.size)
        fits = dtype == piece.tensor.dtype or (not with_optimizer and dtype.is_floating_point)
        if not (fits and piece.fits(whole)):
            problems["of another shape or type"].append(
                f"{key} is {dtype} {list(whole)}, expected {piece.tensor.dtype} {list(piece.whole)}"
            )
    everyone = gather_objects((set(wanted), problems), dist.group.WORLD)
    known = set(ignored).union(*(keys for keys, _ in everyone))
    of_model = {key for key in source.tensors if with_optimizer or not key.startswith(OPTIMIZER_PREFIX)}
    lists = {what: sorted({one for _, found in everyone for one in found[what]}) for what in problems}
    lists["unexpected"] = sorted(of_model - known)
    if any(lists.values()):
        raise CheckpointError(
            f"{source.folder} does not hold this model: "
            + "; ".join(f"{what}: {', '.join(names)}" for what, names in lists.items() if names)
            + ". Load a checkpoint of the same model"
        )


def _ranks(role: "MegatronRole") -> dict[str, object]:
    """Random states mean the same between equal ones: the layout, and the kind of device, which has generators of its own."""
    return asdict(role.layout) | {"device": role.device.type}


def _rng_key(role: "MegatronRole") -> str:
    """As Megatron numbers the parts of an object that every rank has its own of."""
    return f"{RNG_PREFIX}shard_{role.settings.rank.rank}_{role.layout.num_ranks}"


def _rng_state(role: "MegatronRole") -> bytes:
    states = {"cpu": torch.get_rng_state(), "tracker": tensor_parallel.get_cuda_rng_tracker().get_states()}
    if role.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state()
    return packed(states)


def _restore_rng(content: bytes) -> None:
    [states] = torch.load(io.BytesIO(content), weights_only=True)
    torch.set_rng_state(states["cpu"])
    tensor_parallel.get_cuda_rng_tracker().set_states(states["tracker"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
