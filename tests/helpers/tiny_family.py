"""Random models of every family in Hugging Face folders, made by transformers' own classes: no name is written twice."""

from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

# four layers, so that a pipeline can split them; experts smaller than the MLP that config.json names beside them
MOE: Mapping[str, object] = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
# per family: model_type, and what its config has beyond COMMON; a new family adds a line
TINY_FAMILIES: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "llama": ("llama", {}),
    # periods of 6 to 6283 tokens: the first stays, the second and third are blended, the others are stretched fourfold
    "llama3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 32}),  # 4 heads of 32: wider than the hidden size
    "qwen3_moe": ("qwen3_moe", dict(MOE)),
    # weights of the chosen experts are probabilities among all
    "qwen3_moe_raw": ("qwen3_moe", dict(MOE) | {"norm_topk_prob": False}),
    "mistral": ("mistral", {"sliding_window": None}),
    # as long as the longest sample of the tests, so that it hides nothing from any token
    "mistral_window": ("mistral", {"sliding_window": 11, "num_key_value_heads": 4}),
}
COMMON: Mapping[str, object] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "pad_token_id": 0,
}


def make_tiny_family(folder: Path, family: str, *, tie: bool, seed: int) -> Path:
    """Write config.json and float32 model.safetensors into `folder` and return it. No tensor is constant, so that one that is
    lost, swapped or left out of the forward shows."""
    model_type, changes = TINY_FAMILIES[family]
    config = AutoConfig.for_model(model_type, **(dict(COMMON) | dict(changes)), tie_word_embeddings=tie)
    model = AutoModelForCausalLM.from_config(config)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=random)
            if name.endswith("norm.weight"):
                parameter.copy_(1.0 + 0.2 * noise)
            elif name.endswith(".bias") or name in ("model.embed_tokens.weight", "lm_head.weight"):
                parameter.copy_(0.2 * noise)
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    return folder
