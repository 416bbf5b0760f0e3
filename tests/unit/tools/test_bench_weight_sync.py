"""The model that the tool makes is one that a server and our checks take; what it measures is seen when it runs."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from slime_ppo.config.model_shape import ModelShape
from slime_ppo.weight_sync.folder import served_tensors
from tools import bench_weight_sync as tool


def test_made_model_is_whole_and_its_parts_hold_every_tensor_once(tmp_path: Path) -> None:
    tensors = tool.make_model(tmp_path / "model", (2, 128, 64, 100), "bfloat16")
    shape = ModelShape.from_hf_folder(tmp_path / "model")
    assert (shape.num_layers, shape.hidden_size, shape.num_attention_heads) == (2, 128, 2)
    expected = served_tensors(tmp_path / "model", "bfloat16")
    assert expected == {name: (tuple(tensor.shape), "bfloat16") for name, tensor in tensors.items()}
    trainer = tool.Trainer(tmp_path / "model", tensors, bucket_bytes=40_000)
    trainer.publish_hf(str(tmp_path / "published"))
    held: dict[str, torch.Tensor] = {}
    for file in sorted((tmp_path / "published").glob("*.safetensors")):
        held |= load_file(file)
    assert len(list((tmp_path / "published").glob("*.safetensors"))) > 2
    assert set(held) == set(tensors) and all(torch.equal(held[name], tensor) for name, tensor in tensors.items())
    assert trainer.sent_bytes > sum(tensor.nbytes for tensor in tensors.values())


def test_sizes_are_about_what_their_names_say() -> None:
    for name, (layers, hidden, ffn, vocab) in tool.SIZES.items():
        number = 2 * vocab * hidden + layers * (4 * hidden**2 + 3 * ffn * hidden + 2 * hidden) + hidden
        assert abs(number / 1e6 / float(name.removesuffix("M")) - 1) < 0.15, name
