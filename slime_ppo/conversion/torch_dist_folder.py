"""A torch_dist folder seen from outside: where it keeps a model, whoever wrote it. No torch, no Megatron.

A folder holds `.metadata` (which tensor lies in which file), `__*.distcp`, and Megatron's `metadata.json` and `common.pt`. Every
parameter is whole, as one rank would hold it: the layout of the ranks that wrote it does not matter. The experts of a layer are
one tensor with a leading dimension; Megatron-LM may stack layers in the same way.
"""

import re
from dataclasses import dataclass
from math import prod
from pathlib import Path

from slime_ppo.conversion.mapping import Rule, Split
from slime_ppo.conversion.shapes import by_layer
from slime_ppo.conversion.table import FUSED_NORMS, ConversionTable
from slime_ppo.conversion.torch_dist import HF_FOLDER, METADATA_FILE, is_tied_copy, stored_name
from slime_ppo.errors import CheckpointError

LATEST_FILE = "latest_checkpointed_iteration.txt"
# of whole checkpoints, besides weights: optimizer (one per chained optimizer), random states, schedulers
_STATE = re.compile(r"(optimizer|chained_\d+|rng_state|opt_param_scheduler|rerun_state_machine|num_floating_point_operations)\b")


def iteration_folder(iteration: int) -> str:
    """Name of the folder of one checkpoint."""
    return f"iter_{iteration:07d}"


@dataclass(frozen=True)
class StackPlace:
    """Where a parameter lies: the tensor `key`, at `index` of its leading dimensions, which have the sizes `lead`."""

    key: str
    index: tuple[int, ...] = ()
    lead: tuple[int, ...] = ()


def places(rule: Rule, table: ConversionTable) -> tuple[StackPlace, ...]:
    """Where the rule's parameter may lie, the place where we write it first; others are those of transformer-engine's fused norms
    and of layers that are stacked."""
    key, expert = stored_name(rule, table)
    matched = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", key)
    if matched is None:
        return (StackPlace(key),)
    layer, parameter = matched.groups()
    index, lead = ((), ()) if expert is None else ((expert,), (table.shape.num_experts,))
    names = [parameter, *(fused for fused, apart in FUSED_NORMS.items() if apart == parameter)]
    single = [StackPlace(f"decoder.layers.{layer}.{name}", index, lead) for name in names]
    stacked = [StackPlace(f"decoder.layers.{name}", (int(layer), *index), (table.shape.num_layers, *lead)) for name in names]
    return (*single, *stacked)


def stored_rules(table: ConversionTable) -> list[Rule]:
    """The rules whose parameters a checkpoint holds, layer by layer: a tied output layer is that of the embedding."""
    return [rule for rule in by_layer(table.rules) if not is_tied_copy(rule, table)]


def extra_states(table: ConversionTable) -> list[str]:
    """Keys of the (empty) extra states that Megatron's linears ask for when a checkpoint is loaded strictly."""
    found: dict[str, None] = {}
    for rule in stored_rules(table):
        place = places(rule, table)[0]
        module, _, parameter = place.key.rpartition(".")
        if module.startswith("decoder.layers.") and parameter == "weight" and rule.split in (Split.QKV, Split.GATE_UP, Split.ROW):
            found[f"{module}._extra_state/shard_{'.'.join(map(str, place.index)) or 0}_{prod(place.lead)}"] = None
    return list(found)


def is_weight(key: str) -> bool:
    """Whether a key of a checkpoint is one of the model: no optimizer state, no random state, no extra state of a module."""
    return _STATE.match(key) is None and "._extra_state" not in key


@dataclass(frozen=True)
class FoundCheckpoint:
    """`weights` holds `.metadata`; `companion`, where there is one, is the folder with config.json and the tokenizer."""

    weights: Path
    companion: Path | None


def find_torch_dist(path: Path) -> FoundCheckpoint:
    """The checkpoint in `path`, which is its folder, or the one above, whose latest checkpoint is meant.

    Raises CheckpointError that says what was looked for.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder; expected a torch_dist checkpoint")
    weights = path if (path / METADATA_FILE).is_file() else _latest(path)
    companions = (weights / HF_FOLDER, weights.parent / HF_FOLDER)
    return FoundCheckpoint(weights, next((one for one in companions if (one / "config.json").is_file()), None))


def is_torch_dist(path: Path) -> bool:
    """Whether `find_torch_dist` would look for weights there: a folder with their index, or with the mark of the latest one."""
    return (path / METADATA_FILE).is_file() or (path / LATEST_FILE).is_file()


def _latest(path: Path) -> Path:
    mark = path / LATEST_FILE
    if not mark.is_file():
        inside = [name for name in ("actor", "critic") if (path / name / LATEST_FILE).is_file()]
        hint = f"; this is a run folder: give {' or '.join(str(path / name) for name in inside)}" if inside else ""
        raise CheckpointError(f"{path} holds neither {METADATA_FILE} nor {LATEST_FILE}, so it is no torch_dist checkpoint{hint}")
    word = mark.read_text(encoding="utf-8", errors="replace").strip()
    weights = path / (iteration_folder(int(word)) if word.isdecimal() else word)
    if not word or not (weights / METADATA_FILE).is_file():
        raise CheckpointError(f"{mark} names {word!r}, but {weights / METADATA_FILE} is not there: the checkpoint is incomplete")
    return weights
