"""A policy's Hugging Face folder made into that of a reward model of the same family."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from slime_ppo.conversion.families import FAMILIES


def make_reward_model(policy: Path, folder: Path, *, seed: int) -> Path:
    """Write `folder`: the policy without its output layer, with a random head of one label."""
    folder.mkdir(parents=True)
    config = json.loads((policy / "config.json").read_text())
    family = FAMILIES[config["model_type"]]
    config |= {"architectures": [family.value_architecture], "num_labels": 1}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(policy / "model.safetensors")
    tensors.pop("lm_head.weight", None)
    embedding = tensors["model.embed_tokens.weight"]
    head = 0.1 * torch.randn(1, embedding.shape[1], generator=torch.Generator().manual_seed(seed))
    save_file(tensors | {"score.weight": head.to(embedding.dtype)}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
