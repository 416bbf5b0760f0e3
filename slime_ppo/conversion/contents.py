"""What a model folder holds, and what is wrong with it: Hugging Face or torch_dist."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

import torch

from slime_ppo.config.hf_folder import read_tensor_entries
from slime_ppo.conversion.check import DTYPES, hf_problems, torch_dist_problems
from slime_ppo.conversion.convert import table_of_hf_folder, table_of_torch_dist
from slime_ppo.conversion.hf_io import HfWeights
from slime_ppo.conversion.table import ConversionTable
from slime_ppo.conversion.torch_dist_folder import find_torch_dist, is_torch_dist, is_weight
from slime_ppo.conversion.torch_dist_read import TorchDistReader
from slime_ppo.conversion.tree import TreeEntry

_DIGEST_CHARS = 16


@dataclass(frozen=True)
class Contents:
    """`weights` are those of the model, `states` what else training has saved (optimizer, random states), `num_extra_states` counts
    modules' extra states. `table` None: no config.json says what the model is, so `problems` is empty for want of a measure."""

    folder: Path
    kind: str
    table: ConversionTable | None
    weights: tuple[TreeEntry, ...]
    states: tuple[TreeEntry, ...]
    num_extra_states: int
    problems: tuple[str, ...]
    read: Callable[[str], torch.Tensor]

    def with_digests(self, progress: Callable[[int], None]) -> "Contents":
        """With the sha256 of the bytes of every tensor; `progress` is told the bytes of each."""

        def hashed(entries: tuple[TreeEntry, ...]) -> tuple[TreeEntry, ...]:
            return tuple(self._hashed(entry, progress) for entry in entries)

        return replace(self, weights=hashed(self.weights), states=hashed(self.states))

    def _hashed(self, entry: TreeEntry, progress: Callable[[int], None]) -> TreeEntry:
        if entry.shape is None:
            return entry
        content = self.read(entry.name).contiguous().view(-1).view(torch.uint8).numpy()
        progress(entry.num_bytes)
        return replace(entry, digest=sha256(content.data).hexdigest()[:_DIGEST_CHARS])


def read_contents(path: Path, config_folder: Path | None) -> Contents:
    """Of the folder `path`, by headers alone. Raises CheckpointError when its files are not whole."""
    if path.is_dir() and not is_torch_dist(path) and (path / "config.json").is_file():
        return _hf_contents(path)
    found = find_torch_dist(path)
    reader = TorchDistReader(found.weights)
    reader.check_whole()
    return _torch_dist_contents(reader, config_folder or found.companion)


def _hf_contents(folder: Path) -> Contents:
    table, found = table_of_hf_folder(folder), read_tensor_entries(folder)
    entries = tuple(TreeEntry(name, one.dtype, one.shape, one.num_bytes) for name, one in found.items())
    problems = tuple(hf_problems(table, found))
    return Contents(folder, "Hugging Face", table, entries, (), 0, problems, HfWeights(folder).__getitem__)


def _torch_dist_contents(reader: TorchDistReader, config_folder: Path | None) -> Contents:
    names = {dtype: name for name, dtype in DTYPES.items()}
    tensors = [
        TreeEntry(
            key,
            names.get(one.properties.dtype, str(one.properties.dtype)),
            tuple(one.size),
            one.size.numel() * one.properties.dtype.itemsize,
        )
        for key, one in reader.tensors.items()
    ]
    objects = [TreeEntry(key, "object", None, reader.object_bytes(key)) for key in reader.objects]
    extra = [one for one in objects if "._extra_state" in one.name]
    table = None if config_folder is None else table_of_torch_dist(reader, config_folder)
    return Contents(
        folder=reader.folder,
        kind="torch_dist",
        table=table,
        weights=tuple(one for one in tensors if is_weight(one.name)),
        states=tuple(one for one in (*tensors, *objects) if not is_weight(one.name) and one not in extra),
        num_extra_states=len(extra),
        problems=() if table is None else tuple(torch_dist_problems(table, reader)),
        read=reader.read_whole,
    )
