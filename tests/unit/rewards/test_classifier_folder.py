"""Folders of classifiers as files: made by transformers, read back by transformers and safetensors."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, LlamaConfig, LlamaForSequenceClassification

from slime_ppo.config.hf_folder import check_weight_files
from slime_ppo.errors import CheckpointError
from slime_ppo.rewards.classifier_folder import check_one_label, lacks_score_bias, link_with_zero_bias, read_classifier_config
from tests.helpers.tiny_classifier import make_tiny_classifier


def test_classifier_without_bias_is_found_for_the_architectures_that_sglang_gives_one(tmp_path: Path) -> None:
    assert lacks_score_bias(make_tiny_classifier(tmp_path / "qwen2"))
    assert lacks_score_bias(make_tiny_classifier(tmp_path / "qwen3", family="qwen3"))
    llama = LlamaConfig(
        vocab_size=20, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_labels=1
    )
    LlamaForSequenceClassification(llama).save_pretrained(tmp_path / "llama")
    assert not lacks_score_bias(tmp_path / "llama")
    check_one_label(tmp_path / "llama")


@pytest.mark.parametrize("max_shard_size", ["5GB", "20KB"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_classifier_linked_with_zero_bias_is_the_same_model(tmp_path: Path, max_shard_size: str, dtype: torch.dtype) -> None:
    folder, target = make_tiny_classifier(tmp_path / "rm", dtype=dtype, max_shard_size=max_shard_size), tmp_path / "linked"
    target.mkdir()
    link_with_zero_bias(folder, target)
    assert not lacks_score_bias(target)
    check_weight_files(target)
    before, after = ({name: t for f in path.glob("*.safetensors") for name, t in load_file(f).items()} for path in (folder, target))
    bias = after.pop("score.bias")
    assert (bias.tolist(), bias.dtype) == ([0.0], dtype)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    index = json.loads((target / "model.safetensors.index.json").read_text(encoding="utf-8"))["weight_map"]
    assert set(index) == {*before, "score.bias"}
    assert all((target / name).is_symlink() for name in ("config.json", "tokenizer.json"))
    ids = torch.tensor([[5, 6, 7]])
    one, other = (
        AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)(ids).logits for path in (folder, target)
    )
    assert torch.equal(one, other)


def test_classifier_with_more_labels_or_another_architecture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has 3 labels, expected one \\(num_labels 1\\)"):
        check_one_label(make_tiny_classifier(tmp_path / "three", num_labels=3))
    folder = make_tiny_classifier(tmp_path / "lm")
    (folder / "config.json").write_text('{"architectures": ["Qwen2ForCausalLM"]}', encoding="utf-8")
    with pytest.raises(CheckpointError, match="is a Qwen2ForCausalLM, expected ...ForSequenceClassification"):
        check_one_label(folder)


def test_classifier_whose_head_was_not_saved_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_classifier(tmp_path / "rm")
    tensors = load_file(folder / "model.safetensors")
    del tensors["score.weight"]
    save_file(tensors, folder / "model.safetensors")
    (tmp_path / "linked").mkdir()
    for check in (check_one_label, lambda path: link_with_zero_bias(path, tmp_path / "linked")):
        with pytest.raises(CheckpointError, match=r"holds no score.weight: its classification head was not saved"):
            check(folder)


def test_classifier_config_tells_sizes_and_refuses_a_folder_without(tmp_path: Path) -> None:
    config = read_classifier_config(make_tiny_classifier(tmp_path / "rm"))
    assert (config.architecture, config.vocab_size, config.max_positions) == ("Qwen2ForSequenceClassification", 100, 128)
    with pytest.raises(CheckpointError, match="has no config.json that names an architecture"):
        read_classifier_config(tmp_path)
