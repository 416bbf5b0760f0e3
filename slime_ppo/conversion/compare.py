"""Two folders of one model, tensor by tensor: Hugging Face or torch_dist, in Hugging Face names."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from slime_ppo.config.hf_folder import read_tensor_entries
from slime_ppo.conversion.check import hf_problems, require_none, torch_dist_problems
from slime_ppo.conversion.convert import open_torch_dist, table_of_hf_folder, table_of_torch_dist
from slime_ppo.conversion.hf_io import HfWeights
from slime_ppo.conversion.shapes import by_layer
from slime_ppo.conversion.table import ConversionTable
from slime_ppo.conversion.torch_dist_folder import is_torch_dist, stored_rules
from slime_ppo.conversion.torch_dist_read import TorchDistWeights

_BLOCK = 1 << 22  # numbers that are compared at once


@dataclass(frozen=True)
class OpenedModel:
    """A model on disk that is whole: `names` of its tensors in the order of the model, `config_folder` with its config.json."""

    folder: Path
    table: ConversionTable
    weights: Mapping[str, torch.Tensor]
    names: tuple[str, ...]
    config_folder: Path
    is_torch_dist: bool


@dataclass(frozen=True)
class TensorDifference:
    """Of one tensor: largest absolute difference and largest absolute value, nan where a number is not finite in one of the two.
    `equal`: bit for bit, once the wider type is rounded to the narrower."""

    name: str
    dtypes: tuple[torch.dtype, torch.dtype]
    numel: int
    equal: bool
    largest: float
    scale: float


def open_model(path: Path, config_folder: Path | None) -> OpenedModel:
    """The model in a HF folder or a torch_dist folder. `config_folder`: for weights that bring no config.json.

    Raises CheckpointError for files that are not whole, and ConversionError that lists every tensor that does not fit.
    """
    if path.is_dir() and not is_torch_dist(path) and (path / "config.json").is_file():
        table, entries = table_of_hf_folder(path), read_tensor_entries(path)
        require_none(hf_problems(table, entries), table, str(path))
        return OpenedModel(path, table, HfWeights(path), _names(table), path, is_torch_dist=False)
    reader, companion = open_torch_dist(path, config_folder)
    table = table_of_torch_dist(reader, companion)
    require_none(torch_dist_problems(table, reader), table, str(reader.folder))
    weights = TorchDistWeights(reader, table)
    return OpenedModel(reader.folder, table, weights, _names(table), companion, is_torch_dist=True)


def _names(table: ConversionTable) -> tuple[str, ...]:
    return tuple(name for rule in stored_rules(table) for name in rule.hf)


def differences(first: OpenedModel, second: OpenedModel) -> Iterator[TensorDifference]:
    """Of every tensor that both have, in the order of the model; two tensors are in memory at a time."""
    for name in first.names:
        if name in second.weights and name in second.names:
            yield _difference(name, first.weights[name], second.weights[name])


def _difference(name: str, one: torch.Tensor, other: torch.Tensor) -> TensorDifference:
    dtypes = (one.dtype, other.dtype)
    if one.shape != other.shape:
        return TensorDifference(name, dtypes, one.numel(), False, float("nan"), float("nan"))
    narrow = min(dtypes, key=lambda dtype: dtype.itemsize)
    equal, largest, scale = True, torch.zeros(()), torch.zeros(())
    flat, other_flat = one.reshape(-1), other.reshape(-1)
    for start in range(0, len(flat), _BLOCK):
        left, right = flat[start : start + _BLOCK].to(narrow), other_flat[start : start + _BLOCK].to(narrow)
        equal &= torch.equal(left.view(torch.uint8), right.view(torch.uint8))
        # maximum passes nan on, and python's max does not
        largest = torch.maximum(largest, (left.float() - right.float()).abs().max())
        scale = torch.maximum(scale, torch.maximum(left.float().abs().max(), right.float().abs().max()))
    return TensorDifference(name, dtypes, one.numel(), equal, float(largest), float(scale))


def layer_of(table: ConversionTable) -> dict[str, str]:
    """HF name -> the part of the model it belongs to, as in "layer 3"."""
    parts: dict[str, str] = {}
    for rule in by_layer(table.rules):
        layer = re.match(r"decoder\.layers\.(\d+)\.", rule.megatron)
        part = f"layer {layer[1]}" if layer else rule.megatron.removesuffix(".weight").split(".")[-1].replace("_", " ")
        for name in rule.hf:
            parts.setdefault(name, part)
    return parts
