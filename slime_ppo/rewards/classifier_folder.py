"""Model folders of classifiers, made whole for SGLang.

SGLang 0.5.23 builds the `score` of these architectures with a bias, which transformers does not have and so does not save: it stays
at its random start, and every reward is off by one number that is another at each start of the server. A zero bias in the folder
is what the model means. To be removed when sglang.srt.models.{qwen2,qwen3}_classification say `bias=False`.
"""

import json
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path

from slime_ppo.config.hf_folder import INDEX_FILE, TensorEntry, read_tensor_entries
from slime_ppo.errors import CheckpointError

_BIASED_IN_SGLANG = ("Qwen2ForSequenceClassification", "Qwen3ForSequenceClassification")
_WEIGHT, _BIAS = "score.weight", "score.bias"
_BIAS_FILE = "score_bias.safetensors"
_BYTES_OF = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class ClassifierConfig:
    """What config.json of a classifier says; None where it says nothing."""

    architecture: str
    vocab_size: int | None
    max_positions: int | None


def read_classifier_config(folder: Path) -> ClassifierConfig:
    """Raises CheckpointError when there is no config.json with an architecture."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        architecture = str(config["architectures"][0])
        sizes = [config.get(key) for key in ("vocab_size", "max_position_embeddings")]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise CheckpointError(
            f"{folder} has no config.json that names an architecture ({type(error).__name__}: {error}); expected the folder of a "
            "classification model"
        ) from error
    return ClassifierConfig(architecture, *sizes)


def check_one_label(folder: Path) -> None:
    """Raises CheckpointError unless `folder` is a model for sequence classification whose saved head gives one number."""
    architecture = read_classifier_config(folder).architecture
    if not architecture.endswith("ForSequenceClassification"):
        raise CheckpointError(f"{folder} is a {architecture}, expected ...ForSequenceClassification: a model that scores a text")
    weight = _score_weight(folder)
    if weight.shape[0] != 1:
        raise CheckpointError(f"{folder} has {weight.shape[0]} labels, expected one (num_labels 1): a reward is one number")


def saved_dtype(folder: Path) -> str:
    """The type in which the head was saved, in torch's words. Raises CheckpointError for one that SGLang cannot serve."""
    dtype = _score_weight(folder).dtype
    if dtype not in _DTYPES:
        raise CheckpointError(f"{folder} is saved as {dtype}, expected one of {', '.join(_DTYPES)}. Convert it")
    return _DTYPES[dtype]


def lacks_score_bias(folder: Path) -> bool:
    """True when SGLang would serve `folder` with a random bias of its score. Raises CheckpointError when it cannot be told."""
    return read_classifier_config(folder).architecture in _BIASED_IN_SGLANG and _BIAS not in read_tensor_entries(folder)


def _score_weight(folder: Path) -> TensorEntry:
    entries = read_tensor_entries(folder)
    if _WEIGHT not in entries:
        raise CheckpointError(f"{folder} holds no {_WEIGHT}: its classification head was not saved. Train or convert it again")
    return entries[_WEIGHT]


def link_with_zero_bias(folder: Path, target: Path) -> None:
    """Make `target`, an empty folder, the same model with a zero `score.bias`: links to the files of `folder`, the bias in a file
    of its own, and an index that names both.

    Raises CheckpointError when `folder` holds no whole safetensors weights with a `score.weight`.
    """
    weight, entries = _score_weight(folder), read_tensor_entries(folder)
    for file in sorted(folder.iterdir()):
        if file.name not in (INDEX_FILE, _BIAS_FILE):
            (target / file.name).symlink_to(file.resolve())
    _write_zeros(target / _BIAS_FILE, weight)
    homes = {name: entry.file for name, entry in entries.items()} | {_BIAS: _BIAS_FILE}
    total = sum(prod(entry.shape) * _BYTES_OF[entry.dtype] for entry in entries.values() if entry.dtype in _BYTES_OF)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(homes.items()))}
    (target / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_zeros(path: Path, weight: TensorEntry) -> None:
    """A safetensors file with `score.bias` = 0 for each label, in the type of the weight [labels, hidden]."""
    if weight.dtype not in _BYTES_OF:
        raise CheckpointError(f"{_WEIGHT} has the type {weight.dtype}, expected one of {', '.join(_BYTES_OF)}")
    size = weight.shape[0] * _BYTES_OF[weight.dtype]
    header = json.dumps({_BIAS: {"dtype": weight.dtype, "shape": [weight.shape[0]], "data_offsets": [0, size]}}).encode()
    header += b" " * (-len(header) % 8)
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(size))
