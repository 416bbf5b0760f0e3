"""Reading and writing the weights of a Hugging Face folder (safetensors, one file or an index of several)."""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from slime_ppo.config.hf_folder import (
    COMPANION_FILES,
    INDEX_FILE,
    SINGLE_FILE,
    check_replaceable,
    find_weights_index,
    part_file,
    read_weight_map,
    staging_folders,
)
from slime_ppo.conversion.safetensors_stream import PlannedTensor, write_safetensors
from slime_ppo.disk import flush, flush_tree, make_folder, swap_in
from slime_ppo.errors import CheckpointError


class HfWeights(Mapping[str, torch.Tensor]):
    """Name -> tensor of a HF folder, read from disk one tensor at a time.

    Raises CheckpointError for a folder without safetensors, or an index that names a file that is not there.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._file_of = self._find_files()

    def _find_files(self) -> dict[str, str]:
        index = find_weights_index(self.folder)
        if index is not None:
            return read_weight_map(index)
        single = self.folder / SINGLE_FILE
        try:
            with safe_open(single, framework="pt") as file:
                return dict.fromkeys(file.keys(), SINGLE_FILE)
        except SafetensorError as error:
            raise CheckpointError(f"{single} cannot be read ({error}): download or convert the model again") from error

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._file_of:
            raise CheckpointError(f"{self.folder} has no tensor {name}")
        path = self.folder / self._file_of[name]
        try:
            with safe_open(path, framework="pt") as file:
                tensor: torch.Tensor = file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{name} cannot be read from {path} ({error}): download or convert the model again") from error
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._file_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)


class HfWriter:
    """Writes a HF folder file by file beside its final place, and puts it there by renaming when it is whole.

    An export that is there already steps aside and is removed last. Raises CheckpointError, at the start and again at
    publication, for a target that holds anything else than an export's files. `durable`: all of it is on disk before it gets its
    name; what an engine reads at once and nobody later need not be.
    """

    def __init__(
        self, target: str | Path, *, source_folder: str | Path, config_changes: Mapping[str, object], durable: bool = True
    ) -> None:
        self.target = Path(os.path.realpath(target))  # a link stays, the folder behind it is replaced
        self.partial, self._replaced = staging_folders(self.target)
        self._source = Path(source_folder)
        self._config_changes = config_changes
        self._durable = durable
        self._weight_map: dict[str, str] = {}
        self._total_bytes = 0
        self._num_files = 0
        check_replaceable(self.target)
        check_replaceable(self._replaced)
        _remove_export(self.partial)
        make_folder(self.partial) if durable else self.partial.mkdir(parents=True)

    def write(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Add one file with these tensors. Raises CheckpointError or OSError when it can't be written."""
        self._num_files += 1
        name = part_file(self._num_files)
        try:
            save_file(dict(tensors), self.partial / name, metadata={"format": "pt"})
        except SafetensorError as error:
            raise CheckpointError(f"{self.partial / name} cannot be written ({error}): make room, or save elsewhere") from error
        self._weight_map |= dict.fromkeys(tensors, name)
        self._total_bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())

    def stream(
        self, planned: Mapping[str, PlannedTensor], make: Callable[[str], torch.Tensor], progress: Callable[[int], None]
    ) -> None:
        """Add one file with these tensors, each made when its turn comes. Raises CheckpointError when it can't be written."""
        self._num_files += 1
        name = part_file(self._num_files)
        write_safetensors(self.partial / name, planned, make, progress)
        self._weight_map |= dict.fromkeys(planned, name)
        self._total_bytes += sum(plan.num_bytes for plan in planned.values())

    def discard(self) -> None:
        """Remove what was written."""
        _remove_export(self.partial)

    def publish(self) -> None:
        """Write config, tokenizer files and index, then put the folder in its place."""
        if self._num_files == 1:
            (self.partial / part_file(1)).rename(self.partial / SINGLE_FILE)
        else:
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": self._weight_map}
            (self.partial / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True), encoding="utf-8")
        write_companions(self.partial, source=self._source, config_changes=self._config_changes)
        check_replaceable(self.target)
        if self._durable:
            flush_tree(self.partial)
        if self.target.exists():
            _remove_export(self._replaced)
        swap_in(self.partial, self.target, self._replaced)
        if self._durable:
            flush(self.target.parent)
        _remove_export(self._replaced)


def write_companions(target: Path, *, source: Path, config_changes: Mapping[str, object]) -> None:
    """What weights need to be understood: the config.json of the folder `source`, changed, and its tokenizer files."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8")) | dict(config_changes)
    (target / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")
    for file in COMPANION_FILES:
        if (source / file).is_file():
            shutil.copy2(source / file, target / file)


def _remove_export(folder: Path) -> None:
    """Remove a folder if it is there; CheckpointError if it holds anything else than an export's files."""
    check_replaceable(folder)
    if folder.exists():
        shutil.rmtree(folder)
