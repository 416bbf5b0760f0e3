"""Whether a folder holds what a model family's table needs: one complete list of what is missing, too much, or of another shape."""

from collections.abc import Iterable, Mapping

import torch

from slime_ppo.config.hf_folder import TensorEntry
from slime_ppo.conversion.mapping import Split
from slime_ppo.conversion.shapes import hf_shapes, megatron_shape
from slime_ppo.conversion.table import ConversionTable
from slime_ppo.conversion.torch_dist_folder import is_weight, places, stored_rules
from slime_ppo.conversion.torch_dist_read import TorchDistReader
from slime_ppo.errors import ConversionError

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Types of numbers that are weights, by their name in safetensors files."""


def hf_problems(table: ConversionTable, entries: Mapping[str, TensorEntry]) -> list[str]:
    """What keeps the tensors of a HF folder from being the model of the table; empty when nothing does."""
    rules = stored_rules(table)
    shapes = {name: one for rule in rules for name, one in zip(rule.hf, hf_shapes(rule, table.shape), strict=True)}
    optional: set[str] = set(table.derived)
    if table.shape.tie_word_embeddings or table.head == "value":  # stored again by some folders; without use in a critic
        optional |= set(table.family.output_layer.hf)
    found = [
        *(f"missing: {name}" for name in shapes if name not in entries),
        *(f"not used: {name}" for name in entries if name not in shapes and name not in optional),
    ]
    for name, expected in shapes.items():
        if name in entries:
            found += _misfits(name, entries[name].shape, expected, DTYPES.get(entries[name].dtype), entries[name].dtype)
    for rule in rules:
        types = {entries[name].dtype for name in rule.hf if name in entries}
        if len(types) > 1:
            found.append(f"{' and '.join(rule.hf)} are of different types: {', '.join(sorted(types))}")
    return found


def torch_dist_problems(table: ConversionTable, reader: TorchDistReader) -> list[str]:
    """What keeps a torch_dist folder from being the model of the table; empty when nothing does."""
    used: dict[str, None] = {}
    found = []
    for rule in stored_rules(table):
        candidates = places(rule, table)
        place = reader.find(candidates)
        if place is None:
            found.append(f"missing: {candidates[0].key}" + (f" (of expert {candidates[0].index[0]})" if rule.per_expert else ""))
            continue
        first, used[place.key] = place.key not in used, None
        if not first:  # of a stack of experts or layers, which has one shape
            continue
        shape, dtype = reader.shape(place), reader.dtype(place.key)
        if rule.split is Split.VOCAB and len(shape) == 2 and shape[0] >= table.shape.vocab_size:
            rows = shape[0]  # padded
        else:
            rows = table.shape.vocab_size
        expected = megatron_shape(rule, table.shape, vocab_rows=rows)
        found += _misfits(place.key, shape, expected, dtype if dtype in DTYPES.values() else None, str(dtype))
    found += [f"not used: {key}" for key in reader.tensors if is_weight(key) and key not in used]
    return found


def _misfits(name: str, shape: tuple[int, ...], expected: tuple[int, ...], dtype: torch.dtype | None, dtype_text: str) -> list[str]:
    found = [] if shape == expected else [f"{name} is {list(shape)}, expected {list(expected)}"]
    return found if dtype is not None else [*found, f"{name} is of type {dtype_text}, expected one of {', '.join(DTYPES)}"]


def require_none(problems: Iterable[str], table: ConversionTable, source: str) -> None:
    """Raise ConversionError with all of the problems, one on each line, unless there are none."""
    lines = [f"\n  {problem}" for problem in problems]
    if lines:
        kind = "critic or reward model" if table.head == "value" else "language model"
        raise ConversionError(
            f"{source} is not the {table.shape.model_type} {kind} that its config.json describes; {len(lines)} "
            f"tensor{'s' if len(lines) > 1 else ''}:{''.join(lines)}"
        )


def require_tied(table: ConversionTable, weights: Mapping[str, torch.Tensor], source: str) -> None:
    """An output layer that is stored beside the embedding it is tied to must equal it: transformers would untie the two."""
    (output,) = table.family.output_layer.hf
    (embedding,) = table.rule("embedding.word_embeddings.weight", 0).hf
    if output in weights and not torch.equal(weights[output], weights[embedding]):
        raise ConversionError(
            f"{source}: config.json has tie_word_embeddings true, but {output} differs from {embedding}. Set "
            "tie_word_embeddings to false, or save the model again"
        )
