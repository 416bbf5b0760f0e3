"""Between Hugging Face folders and torch_dist folders, both ways: first a plan, which finds everything that is wrong, then the
writing, one tensor at a time.

Out of a HF folder comes a folder as training writes it: `iter_0000000/`, the mark of the latest checkpoint, and `hf/` with config
and tokenizer, so that it converts back by itself.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from slime_ppo.config.hf_folder import COMPANION_FILES, read_tensor_entries, staging_folders
from slime_ppo.config.model_shape import ModelShape, padded_vocab_size
from slime_ppo.conversion.check import DTYPES, hf_problems, require_none, require_tied, torch_dist_problems
from slime_ppo.conversion.hf_io import HfWeights, HfWriter, write_companions
from slime_ppo.conversion.safetensors_stream import PlannedTensor, split_into_files
from slime_ppo.conversion.table import ConversionTable, Head
from slime_ppo.conversion.torch_dist import BACKEND_FILE, COMMON_FILE, HF_FOLDER, METADATA_FILE
from slime_ppo.conversion.torch_dist_folder import (
    LATEST_FILE,
    extra_states,
    find_torch_dist,
    iteration_folder,
)
from slime_ppo.conversion.torch_dist_read import TorchDistReader, TorchDistWeights
from slime_ppo.conversion.torch_dist_write import Chunk, model_chunks, write_torch_dist
from slime_ppo.errors import CheckpointError, ConversionError

_CLASSIFIER = "ForSequenceClassification"
_ITERATION = iteration_folder(0)
Progress = Callable[[int], None]
"""Is told the bytes of each tensor that was written."""


@dataclass(frozen=True)
class TorchDistPlan:
    """What will be written of the HF folder `source`."""

    source: Path
    table: ConversionTable
    chunks: tuple[Chunk, ...]

    @property
    def num_bytes(self) -> int:
        return sum(chunk.num_bytes for chunk in self.chunks)

    @property
    def num_tensors(self) -> int:
        return len({chunk.key for chunk in self.chunks})


@dataclass(frozen=True)
class HfPlan:
    """What will be written of a torch_dist folder: weights by file, and what config.json says differently from the companion's."""

    companion: Path
    table: ConversionTable
    weights: TorchDistWeights
    files: tuple[Mapping[str, PlannedTensor], ...]
    config_changes: Mapping[str, object]

    @property
    def num_bytes(self) -> int:
        return sum(plan.num_bytes for file in self.files for plan in file.values())

    @property
    def num_tensors(self) -> int:
        return sum(map(len, self.files))


def table_of_hf_folder(folder: Path) -> ConversionTable:
    """The table of the model that config.json describes: a language model, or, for a sequence classifier, one with a value head.

    Raises CheckpointError or ConversionError for a model that is not in this version.
    """
    shape = ModelShape.from_hf_folder(folder)
    return ConversionTable(shape, "value" if _architecture(folder).endswith(_CLASSIFIER) else "language_model")


def table_of_torch_dist(reader: TorchDistReader, companion: Path) -> ConversionTable:
    """The table of a checkpoint of the model that `companion` describes; its output layer of one row says that it is a critic."""
    shape, output = ModelShape.from_hf_folder(companion), reader.tensors.get("output_layer.weight")
    head: Head = "value" if output is not None and output.size[0] == 1 else "language_model"
    if head == "language_model" and _architecture(companion).endswith(_CLASSIFIER):
        raise ConversionError(
            f"{companion / 'config.json'} describes a {_architecture(companion)}, but {reader.folder} has no value head. Give the "
            "config.json of the language model"
        )
    return ConversionTable(shape, head)


def _architecture(folder: Path) -> str:
    """The first architecture that config.json names; that of a language model when it names none."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        architecture = str((config.get("architectures") or ["ForCausalLM"])[0])
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder / 'config.json'} names no architecture ({type(error).__name__}: {error})") from error
    if not architecture.endswith((_CLASSIFIER, "ForCausalLM")):
        raise ConversionError(
            f"{folder / 'config.json'}: {architecture} is not in this version, expected ...ForCausalLM or ...{_CLASSIFIER}"
        )
    return architecture


def plan_torch_dist(source: Path, *, dtype: torch.dtype | None, make_vocab_size_divisible_by: int) -> TorchDistPlan:
    """Check a HF folder and plan its conversion. `dtype` None: as stored, tensor by tensor.

    Raises CheckpointError for files that are not whole, and ConversionError that lists every tensor that is missing, not used,
    or of another shape.
    """
    table = table_of_hf_folder(source)
    entries = read_tensor_entries(source)
    require_none(hf_problems(table, entries), table, str(source))
    weights = HfWeights(source)
    if table.shape.tie_word_embeddings and table.head == "language_model":
        require_tied(table, weights, str(source))
    chunks = model_chunks(
        table,
        weights,
        dtype_of=lambda name: dtype or DTYPES[entries[name].dtype],
        vocab_rows=padded_vocab_size(table.shape.vocab_size, divisible_by=make_vocab_size_divisible_by, tp_size=1),
    )
    return TorchDistPlan(source, table, tuple(chunks))


def plan_hf(source: Path, *, companion: Path | None, dtype: torch.dtype | None, max_file_bytes: int) -> HfPlan:
    """Check a torch_dist folder and plan its conversion. `companion`: the folder with config and tokenizer, where the checkpoint
    brings none. `dtype` None: as stored, tensor by tensor.

    Raises as `plan_torch_dist`.
    """
    reader, companion = open_torch_dist(source, companion)
    table = table_of_torch_dist(reader, companion)
    require_none(torch_dist_problems(table, reader), table, str(reader.folder))
    weights = TorchDistWeights(reader, table)
    planned = {name: PlannedTensor(weights.shape(name), dtype or weights.dtype(name)) for name in weights}
    first = str(next(iter(planned.values())).dtype).removeprefix("torch.")
    changes = _config_changes(table, companion, first)
    return HfPlan(companion, table, weights, tuple(split_into_files(planned, max_file_bytes)), changes)


def open_torch_dist(source: Path, companion: Path | None) -> tuple[TorchDistReader, Path]:
    """The checkpoint in `source`, and the folder with its config.json: `companion`, or the one it brings along."""
    found = find_torch_dist(source)
    companion = companion or found.companion
    if companion is None:
        raise CheckpointError(
            f"{found.weights} has no {HF_FOLDER}/config.json beside it, and weights alone do not say what model they are: "
            "give the Hugging Face folder that training started from with --hf-folder"
        )
    return TorchDistReader(found.weights), companion


def _config_changes(table: ConversionTable, companion: Path, dtype: str) -> dict[str, object]:
    config = json.loads((companion / "config.json").read_text(encoding="utf-8"))
    changes: dict[str, object] = {key: dtype for key in ("dtype", "torch_dtype") if key in config} or {"torch_dtype": dtype}
    return changes | table.config_changes


def write_hf_folder(plan: HfPlan, out: Path, progress: Progress) -> None:
    """Write the plan beside `out`, then rename. Raises CheckpointError, and leaves nothing behind, when it can't."""
    _require_apart(plan.weights.reader.folder, out)
    _require_apart(plan.companion, out)
    _require_room(out, plan.num_bytes)
    writer = HfWriter(out, source_folder=plan.companion, config_changes=plan.config_changes)
    try:
        for file in plan.files:
            writer.stream(file, plan.weights.__getitem__, progress)
    except BaseException:
        writer.discard()
        raise
    writer.publish()


def write_torch_dist_folder(plan: TorchDistPlan, out: Path, progress: Progress) -> None:
    """Write the plan beside `out`, then rename. Raises CheckpointError, and leaves nothing behind, when it can't."""
    target = Path(os.path.realpath(out))
    _require_apart(plan.source, target)
    _require_room(target, plan.num_bytes)
    partial, replaced = staging_folders(target)
    for folder in (target, partial, replaced):
        check_torch_dist_replaceable(folder)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        (partial / _ITERATION).mkdir(parents=True)
        write_torch_dist(partial / _ITERATION, plan.chunks, empty_objects=extra_states(plan.table), iteration=0, progress=progress)
        (partial / HF_FOLDER).mkdir()
        write_companions(partial / HF_FOLDER, source=plan.source, config_changes=plan.table.config_changes)
        (partial / LATEST_FILE).write_text("0", encoding="utf-8")
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    check_torch_dist_replaceable(target)
    if target.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        target.rename(replaced)
    partial.rename(target)
    shutil.rmtree(replaced, ignore_errors=True)


def check_torch_dist_replaceable(folder: Path) -> None:
    """Return if `folder` may be removed to make room: it is not there, or holds nothing but a conversion's files.

    Raises CheckpointError naming what else it holds: checkpoints of a training run, and whatever else a user names, must survive.
    """
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file, expected a folder to write to. Write elsewhere")
    foreign = [
        path for path in folder.rglob("*") if path.is_symlink() or (path.is_file() and not _is_ours(path.relative_to(folder)))
    ]
    if foreign:
        raise CheckpointError(
            f"{folder} holds {foreign[0].relative_to(folder)}: it is not an earlier conversion, so it is not replaced. Write to a "
            "new or empty folder, or move this file away"
        )


def _is_ours(path: Path) -> bool:
    if path == Path(LATEST_FILE):
        return True
    if path.parent == Path(HF_FOLDER):
        return path.name in ("config.json", *COMPANION_FILES)
    known = path.name in (METADATA_FILE, f"{METADATA_FILE}.tmp", BACKEND_FILE, COMMON_FILE) or path.suffix == ".distcp"
    return known and path.parent == Path(_ITERATION)


def _require_apart(source: Path, out: Path) -> None:
    """Neither may be the other or lie in it: the output is renamed to its place, and what was there is removed."""
    source, out = source.resolve(), out.resolve()
    if source == out or source in out.parents or out in source.parents:
        raise CheckpointError(f"the output {out} and the input {source} lie in each other. Write elsewhere")


def _require_room(out: Path, num_bytes: int) -> None:
    parent = next(folder for folder in out.resolve().parents if folder.is_dir())
    free = shutil.disk_usage(parent).free
    if free < num_bytes:
        raise CheckpointError(f"{parent} has {free / 1e9:.1f} GB free, the output needs {num_bytes / 1e9:.1f} GB. Make room")
