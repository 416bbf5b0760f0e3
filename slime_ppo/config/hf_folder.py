"""Hugging Face folders seen as files, without torch: which files an export holds, and whether weights are whole."""

import json
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_ppo.errors import CheckpointError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
# what a folder needs besides weights to be loaded again
COMPANION_FILES = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja", "vocab.json", "merges.txt", "tokenizer.model",
)  # fmt: skip
_EXPORTED = ("config.json", INDEX_FILE, SINGLE_FILE, *COMPANION_FILES)
_NUMBERED_FILE = re.compile(r"model-\d{5}\.safetensors")
_LENGTH_BYTES = 8
_AGAIN = "download or convert the model again"


def part_file(number: int) -> str:
    """Name of the number-th weights file of an export of several."""
    return f"model-{number:05d}.safetensors"


def staging_folders(target: Path) -> tuple[Path, Path]:
    """Beside `target`: where an export is written, and where the folder that it replaces waits for its removal."""
    return target.with_name(target.name + ".partial"), target.with_name(target.name + ".old")


def check_replaceable(folder: Path) -> None:
    """Return if `folder` may be removed to make room for an export: it is not there, or holds nothing but an export's files.

    Raises CheckpointError naming what else it holds: whatever a user names as an output must survive.
    """
    if not folder.exists():
        return
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is a file, expected a folder to save weights in. Save elsewhere")
    foreign = sorted(entry.name for entry in os.scandir(folder) if not _is_exported(entry))
    if foreign:
        raise CheckpointError(
            f"{folder} holds {', '.join(foreign[:5])}{', ...' if foreign[5:] else ''}: it is not an earlier export, so it is not "
            "replaced. Save to a new or empty folder, or move these files away"
        )


def _is_exported(entry: os.DirEntry[str]) -> bool:
    known = entry.name in _EXPORTED or _NUMBERED_FILE.fullmatch(entry.name) is not None
    return known and entry.is_file(follow_symlinks=False)


def find_weights_index(folder: Path) -> Path | None:
    """The index of the weights files of `folder`; None where all weights are in the one file that needs none.

    Raises CheckpointError where there is neither, and where there are both but the index knows nothing of the file: transformers
    would take the file, others the index.
    """
    index, single = folder / INDEX_FILE, folder / SINGLE_FILE
    if not index.is_file():
        if single.is_file():
            return None
        others = sorted(path.name for path in folder.glob("pytorch_model*") if path.suffix in (".bin", ".json"))
        found = f" ({', '.join(others[:3])} is not read: save it again with safetensors, by transformers' save_pretrained)"
        raise CheckpointError(f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}{found if others else ''}: {_AGAIN}")
    if single.is_file() and SINGLE_FILE not in read_weight_map(index).values():
        raise CheckpointError(f"{folder} holds {SINGLE_FILE}, and a {INDEX_FILE} of other files: remove what is not the model")
    return index


def check_weight_files(folder: Path) -> None:
    """Every weights file of `folder` is there and as long as its header says. Headers only are read.

    Raises CheckpointError naming the file.
    """
    index = find_weights_index(folder)
    if index is None:
        _read_header(folder / SINGLE_FILE)
        return
    weight_map = read_weight_map(index)
    for file in sorted(set(weight_map.values())):
        header = _read_header(folder / file)
        absent = [name for name, home in weight_map.items() if home == file and name not in header]
        if absent:
            raise CheckpointError(f"{index} says that {file} holds {absent[0]}, which it does not: download the model again")


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a folder as its file's header says; `dtype` in safetensors' words, as in "BF16"."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


def read_tensor_entries(folder: Path) -> dict[str, TensorEntry]:
    """Every tensor of `folder` by name. Headers only are read. Raises CheckpointError as `check_weight_files` does."""
    check_weight_files(folder)
    index = find_weights_index(folder)
    homes = dict.fromkeys(_read_header(folder / SINGLE_FILE), SINGLE_FILE) if index is None else read_weight_map(index)
    headers = {file: _read_header(folder / file) for file in set(homes.values())}
    found = {name: (file, headers[file][name]) for name, file in homes.items() if name != "__metadata__"}
    return {
        name: TensorEntry(file, entry["dtype"], tuple(entry["shape"]), entry["data_offsets"][1] - entry["data_offsets"][0])
        for name, (file, entry) in found.items()
    }


def read_weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> file name, as the index says; every file is there. Raises CheckpointError."""
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = sorted({str(file) for file in weight_map.values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} has no readable weight_map ({type(error).__name__}: {error}): {_AGAIN}") from error
    absent = [file for file in files if not (index.parent / file).is_file()]
    if absent:
        verb = "is" if len(absent) == 1 else "are"
        raise CheckpointError(f"{index} names {', '.join(absent)}, which {verb} not in {index.parent}: {_AGAIN}")
    return {str(name): str(file) for name, file in weight_map.items()}


def _read_header(path: Path) -> dict[str, Any]:
    """The header of a safetensors file: 8 bytes of little-endian length, then JSON, then the tensors' bytes, which it counts."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(_LENGTH_BYTES)
            (length,) = struct.unpack("<Q", prefix) if len(prefix) == _LENGTH_BYTES else (size,)
            if _LENGTH_BYTES + length > size:
                raise CheckpointError(f"{path} ends inside its header ({size} bytes): {_AGAIN}")
            header: dict[str, Any] = json.loads(file.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        expected = _LENGTH_BYTES + length + max(ends, default=0)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{path} has no readable safetensors header ({error}): {_AGAIN}") from error
    if size != expected:
        raise CheckpointError(f"{path} has {size} bytes, but its header counts {expected}: {_AGAIN}")
    return header
