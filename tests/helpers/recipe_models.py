"""Model folders of the shapes of public models: their config.json, and weights files that hold headers and no bytes on disk."""

import json
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

from slime_ppo.config.hf_folder import SINGLE_FILE
from slime_ppo.config.model_shape import ModelShape
from slime_ppo.conversion.mapping import Rule, Split
from slime_ppo.conversion.table import ConversionTable, Head

_QWEN: Mapping[str, object] = {
    "vocab_size": 151936, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "use_sliding_window": False, "hidden_act": "silu",
    "eos_token_id": 151645,
}  # fmt: skip
_LLAMA_8B: Mapping[str, object] = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 131072, "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5, "rope_theta": 5e5, "attention_bias": False, "mlp_bias": False, "eos_token_id": [128001, 128008, 128009],
    "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip
# config.json as the models' owners publish it, the keys that a shape is read from
PUBLIC_SHAPES: Mapping[str, Mapping[str, object]] = {
    "Qwen2.5-0.5B-Instruct": {
        **_QWEN, "model_type": "qwen2", "num_hidden_layers": 24, "hidden_size": 896, "num_attention_heads": 14,
        "num_key_value_heads": 2, "intermediate_size": 4864, "max_position_embeddings": 32768, "tie_word_embeddings": True,
        "sliding_window": 32768,
    },
    "Qwen3-4B": {
        **_QWEN, "model_type": "qwen3", "num_hidden_layers": 36, "hidden_size": 2560, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 9728, "max_position_embeddings": 40960,
        "tie_word_embeddings": True, "sliding_window": None, "attention_bias": False,
    },
    "Qwen3-30B-A3B": {
        **_QWEN, "model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "max_position_embeddings": 40960,
        "tie_word_embeddings": False, "sliding_window": None, "attention_bias": False, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True, "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "Llama-3.1-8B-Instruct": _LLAMA_8B,
    "Skywork-Reward-Llama-3.1-8B-v0.2": {
        **_LLAMA_8B, "architectures": ["LlamaForSequenceClassification"], "num_labels": 1, "id2label": {"0": "LABEL_0"},
    },
}  # fmt: skip


def make_public_model(folder: Path, name: str) -> Path:
    """The folder of model `name`: every tensor of its table in bfloat16, in one file that is a hole behind its header."""
    folder.mkdir(parents=True)
    entries = PUBLIC_SHAPES[name]
    (folder / "config.json").write_text(json.dumps(entries), encoding="utf-8")
    shape = ModelShape.from_hf_folder(folder)
    head: Head = "value" if "architectures" in entries else "language_model"
    header, end = dict[str, object](), 0
    for tensor, sizes in _hf_tensors(shape, head):
        start, end = end, end + 2 * _product(sizes)
        header[tensor] = {"dtype": "BF16", "shape": sizes, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (folder / SINGLE_FILE).open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
    os.truncate(folder / SINGLE_FILE, 8 + len(text) + end)
    return folder


def _product(sizes: tuple[int, ...]) -> int:
    return sizes[0] * (sizes[1] if len(sizes) > 1 else 1)


def _hf_tensors(shape: ModelShape, head: Head) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of all tensors of the folder, one each for tied ones."""
    seen: set[str] = set()
    for rule in ConversionTable(shape, head).rules.values():
        for name, sizes in zip(rule.hf, _hf_shapes(rule, shape), strict=True):
            if name not in seen:
                seen.add(name)
                yield name, sizes


def _hf_shapes(rule: Rule, shape: ModelShape) -> list[tuple[int, ...]]:
    h, f = shape.hidden_size, shape.expert_ffn_size if rule.per_expert else shape.ffn_hidden_size
    q, k = shape.num_attention_heads * shape.head_dim, shape.num_query_groups * shape.head_dim
    if rule.split is Split.VOCAB:
        return [(shape.vocab_size, h)]
    if rule.split is Split.QKV:
        return [(rows,) if rule.megatron.endswith("bias") else (rows, h) for rows in (q, k, k)]
    if rule.split is Split.GATE_UP:
        return [(f, h), (f, h)]
    if rule.split is Split.ROW:
        return [(h, q if "linear_proj" in rule.megatron else f)]
    if rule.megatron.endswith("router.weight"):
        return [(shape.num_experts, h)]
    if rule.megatron.endswith("output_layer.weight"):
        return [(1, h)]
    return [(shape.head_dim if rule.megatron.endswith(("q_layernorm.weight", "k_layernorm.weight")) else h,)]
