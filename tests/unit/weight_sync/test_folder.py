"""What a served folder needs, and what an exported one must hold; made with transformers' own classes."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from slime_ppo.errors import ConfigError, WeightSyncError
from slime_ppo.weight_sync.folder import check_folder, served_tensors
from tests.helpers.tiny_family import make_tiny_family
from tests.helpers.tiny_llama import make_tiny_llama


def add_tensors(folder: Path, **tensors: np.ndarray) -> None:
    file = folder / "model.safetensors"
    save_file(load_file(file) | {name.replace("__", "."): tensor for name, tensor in tensors.items()}, file)


@pytest.mark.parametrize("tie", [True, False])
def test_served_tensors_are_those_of_the_folder_in_the_servers_dtype_with_tied_embeddings_once(tmp_path: Path, tie: bool) -> None:
    folder = make_tiny_llama(tmp_path, tie=tie)
    held = load_file(folder / "model.safetensors")
    found = served_tensors(folder, "bfloat16")
    assert found == {name: (tensor.shape, "bfloat16") for name, tensor in held.items()}
    assert ("lm_head.weight" in found) is not tie
    add_tensors(folder, lm_head__weight=held["model.embed_tokens.weight"])
    add_tensors(folder, **{"model__layers__0__self_attn__rotary_emb__inv_freq": np.zeros(8, np.float32)})
    again = served_tensors(folder, "bfloat16")
    assert set(again) == set(found)


def test_served_tensors_of_a_tied_mixture_are_refused_because_sglang_leaves_its_head_random(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"qwen3_moe an output layer of its own although tie_word_embeddings is true.*Untie"):
        served_tensors(make_tiny_family(tmp_path / "tied", "qwen3_moe", tie=True, seed=0), "float32")
    assert "lm_head.weight" in served_tensors(make_tiny_family(tmp_path / "untied", "qwen3_moe", tie=False, seed=0), "float32")


def test_check_folder_lists_all_differences_of_a_folder_in_several_files(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path)
    expected = served_tensors(folder, "float32")
    check_folder(folder, expected)
    add_tensors(folder, lm_head__weight=np.zeros((100, 64), np.float32))  # tied: no server reads it
    check_folder(folder, expected)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    del tensors["model.norm.weight"], tensors["lm_head.weight"]
    parts = {"model-00001.safetensors": {"extra": np.zeros(1, np.float32)}, "model-00002.safetensors": tensors}
    tensors["model.embed_tokens.weight"] = np.zeros((99, 64), np.float32)
    for file, content in parts.items():
        save_file(content, folder / file)
    index = {"weight_map": {name: file for file, content in parts.items() for name in content}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(WeightSyncError) as failure:
        check_folder(folder, expected)
    assert str(failure.value).splitlines()[1:] == [
        "  missing: model.norm.weight",
        "  unexpected: extra",
        "  model.embed_tokens.weight is [99, 64], the engine expects [100, 64]",
    ]
