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

from slime_ppo.config.hf_folder import INDEX_FILE, read_tensor_entries, staging_folders
from slime_ppo.config.model_shape import ModelShape, padded_vocab_size
from slime_ppo.conversion.check import DTYPES, hf_problems, require_none, require_tied, torch_dist_problems
from slime_ppo.conversion.hf_io import HfWeights, HfWriter, write_companions
from slime_ppo.conversion.output import (
    ITERATION,
    Stamps,
    check_hf_output,
    check_torch_dist_output,
    check_torch_dist_replaceable,
    config_stamps,
    stamps,
    whole_or_nothing,
)
from slime_ppo.conversion.safetensors_stream import PlannedTensor, split_into_files
from slime_ppo.conversion.table import ConversionTable, Head
from slime_ppo.conversion.torch_dist import HF_FOLDER
from slime_ppo.conversion.torch_dist_folder import LATEST_FILE, extra_states, find_torch_dist
from slime_ppo.conversion.torch_dist_read import TorchDistReader, TorchDistWeights
from slime_ppo.conversion.torch_dist_write import Chunk, model_chunks, write_torch_dist
from slime_ppo.disk import flush, flush_tree, make_folder, swap_in
from slime_ppo.errors import CheckpointError, ConversionError

_CLASSIFIER = "ForSequenceClassification"
Progress = Callable[[int], None]
"""Is told the bytes of each tensor that was written."""


@dataclass(frozen=True)
class TorchDistPlan:
    """What will be written of the HF folder `source`, whose files are as they were in `stamps`."""

    source: Path
    table: ConversionTable
    chunks: tuple[Chunk, ...]
    stamps: Stamps

    @property
    def num_bytes(self) -> int:
        return sum(chunk.num_bytes for chunk in self.chunks)

    @property
    def num_tensors(self) -> int:
        return len({chunk.key for chunk in self.chunks})

    def check_output(self, out: Path) -> None:
        """Raise CheckpointError for a folder that `write_torch_dist_folder` would not write."""
        check_torch_dist_output(out, sources=(self.source,), num_bytes=self.num_bytes)


@dataclass(frozen=True)
class HfPlan:
    """What will be written of a torch_dist folder, whose files are as they were in `stamps`: weights by file, and what config.json
    says differently from the companion's."""

    companion: Path
    table: ConversionTable
    weights: TorchDistWeights
    files: tuple[Mapping[str, PlannedTensor], ...]
    config_changes: Mapping[str, object]
    stamps: Stamps

    @property
    def num_bytes(self) -> int:
        return sum(plan.num_bytes for file in self.files for plan in file.values())

    @property
    def num_tensors(self) -> int:
        return sum(map(len, self.files))

    def check_output(self, out: Path) -> None:
        """Raise CheckpointError for a folder that `write_hf_folder` would not write."""
        check_hf_output(out, sources=(self.weights.reader.folder, self.companion), num_bytes=self.num_bytes)


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
        named = config.get("architectures") or ["ForCausalLM"]
        architecture = str(named if isinstance(named, str) else named[0])
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
    read = config_stamps(source)
    table = table_of_hf_folder(source)
    entries = read_tensor_entries(source)
    read |= stamps(source, (INDEX_FILE, *(entry.file for entry in entries.values())))
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
    return TorchDistPlan(source, table, tuple(chunks), read)


def plan_hf(source: Path, *, companion: Path | None, dtype: torch.dtype | None, max_file_bytes: int) -> HfPlan:
    """Check a torch_dist folder and plan its conversion. `companion`: the folder with config and tokenizer, where the checkpoint
    brings none. `dtype` None: as stored, tensor by tensor.

    Raises as `plan_torch_dist`.
    """
    reader, companion = open_torch_dist(source, companion)
    read = stamps(reader.folder, os.listdir(reader.folder)) | config_stamps(companion)
    table = table_of_torch_dist(reader, companion)
    require_none(torch_dist_problems(table, reader), table, str(reader.folder))
    weights = TorchDistWeights(reader, table)
    planned = {name: PlannedTensor(weights.shape(name), dtype or weights.dtype(name)) for name in weights}
    first = str(next(iter(planned.values())).dtype).removeprefix("torch.")
    changes = _config_changes(table, companion, first)
    return HfPlan(companion, table, weights, tuple(split_into_files(planned, max_file_bytes)), changes, read)


def open_torch_dist(source: Path, companion: Path | None) -> tuple[TorchDistReader, Path]:
    """The checkpoint in `source`, and the folder with its config.json: `companion`, or the one it brings along."""
    found = find_torch_dist(source)
    companion = companion or found.companion
    if companion is None:
        raise CheckpointError(
            f"{found.weights} has no {HF_FOLDER}/config.json beside it, and weights alone do not say what model they are: "
            "give the Hugging Face folder that training started from with --hf-folder"
        )
    reader = TorchDistReader(found.weights)
    reader.check_whole()
    return reader, companion


def _config_changes(table: ConversionTable, companion: Path, dtype: str) -> dict[str, object]:
    config = json.loads((companion / "config.json").read_text(encoding="utf-8"))
    changes: dict[str, object] = {key: dtype for key in ("dtype", "torch_dtype") if key in config} or {"torch_dtype": dtype}
    return changes | table.config_changes


def write_hf_folder(plan: HfPlan, out: Path, progress: Progress) -> None:
    """Write the plan beside `out`, then rename. Raises CheckpointError, and leaves nothing behind, when it can't."""
    plan.check_output(out)
    writer = HfWriter(out, source_folder=plan.companion, config_changes=plan.config_changes)
    with whole_or_nothing(out, plan.stamps, writer.discard) as require_unchanged:
        for file in plan.files:
            writer.stream(file, plan.weights.__getitem__, progress)
        require_unchanged()
        writer.publish()


def write_torch_dist_folder(plan: TorchDistPlan, out: Path, progress: Progress) -> None:
    """Write the plan beside `out`, then rename. Raises CheckpointError, and leaves nothing behind, when it can't."""
    plan.check_output(out)
    target = Path(os.path.realpath(out))
    partial, replaced = staging_folders(target)
    shutil.rmtree(partial, ignore_errors=True)
    with whole_or_nothing(out, plan.stamps, lambda: shutil.rmtree(partial, ignore_errors=True)) as require_unchanged:
        make_folder(partial / ITERATION)
        write_torch_dist(partial / ITERATION, plan.chunks, empty_objects=extra_states(plan.table), iteration=0, progress=progress)
        (partial / HF_FOLDER).mkdir()
        write_companions(partial / HF_FOLDER, source=plan.source, config_changes=plan.table.config_changes)
        (partial / LATEST_FILE).write_text("0", encoding="utf-8")
        flush_tree(partial)
        require_unchanged()
        check_torch_dist_replaceable(target)
        if target.exists():  # otherwise a killed run has left the earlier output there, and nowhere else
            shutil.rmtree(replaced, ignore_errors=True)
        swap_in(partial, target, replaced)
        flush(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)
