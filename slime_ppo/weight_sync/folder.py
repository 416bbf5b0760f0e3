"""What a Hugging Face folder says of its tensors, compared before an engine is made to read it. No torch."""

from collections.abc import Mapping
from pathlib import Path

from slime_ppo.config.hf_folder import read_tensor_entries
from slime_ppo.config.model_shape import ModelShape
from slime_ppo.conversion.families import FAMILIES
from slime_ppo.errors import ConfigError, WeightSyncError

Served = dict[str, tuple[tuple[int, ...], str]]

# has an output layer of its own also where config.json ties it to the embeddings, and leaves it random (SGLang 0.5.23)
_NEVER_TIED = ("qwen3_moe",)


def served_tensors(folder: str | Path, dtype: str) -> Served:
    """Name -> (shape, dtype) of what a push to a server of this folder must bring; the server holds all in `dtype`.

    Tied embeddings are one tensor, whether or not the folder holds `lm_head.weight` too. Raises ConfigError for a model that
    the servers would serve with weights that no push reaches.
    """
    shape = ModelShape.from_hf_folder(folder)
    tied = shape.tie_word_embeddings
    if tied and shape.model_type in _NEVER_TIED:
        raise ConfigError(
            f"{folder}: SGLang gives {shape.model_type} an output layer of its own although tie_word_embeddings is true, and "
            "would leave it random. Untie the model: add lm_head.weight to the folder and set tie_word_embeddings to false"
        )
    derived = FAMILIES[shape.model_type].derived
    left_out = {name.format(layer=layer) for name in derived for layer in range(shape.num_layers)}
    if tied:
        left_out.add("lm_head.weight")
    return {name: (entry.shape, dtype) for name, entry in read_tensor_entries(Path(folder)).items() if name not in left_out}


def check_folder(folder: str | Path, expected: Mapping[str, tuple[tuple[int, ...], str]]) -> None:
    """Compare the tensors that a server would take from a folder with the engine's: one WeightSyncError with all differences."""
    found = {name: shape for name, (shape, _) in served_tensors(folder, "any").items()}
    problems = [f"missing: {name}" for name in expected if name not in found]
    problems += [f"unexpected: {name}" for name in found if name not in expected]
    problems += [
        f"{name} is {list(found[name])}, the engine expects {list(shape)}"
        for name, (shape, _) in expected.items()
        if name in found and found[name] != shape
    ]
    if problems:
        raise WeightSyncError(
            f"{folder} does not hold the engine's {len(expected)} tensors; both must come from the same model folder "
            "(--hf-checkpoint):\n  " + "\n  ".join(problems)
        )
