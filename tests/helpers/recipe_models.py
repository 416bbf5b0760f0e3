"""Model folders of the shapes of public models: their config.json, weights files that hold headers and no bytes on disk, and a
tokenizer that knows their end tokens and no words."""

import json
import math
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from slime_ppo.config.hf_folder import SINGLE_FILE
from slime_ppo.config.model_shape import ModelShape
from slime_ppo.conversion.shapes import by_layer, hf_shapes
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
    _write_tokenizer(folder, np.atleast_1d(entries["eos_token_id"]).tolist())
    (folder / "config.json").write_text(json.dumps(entries), encoding="utf-8")
    shape = ModelShape.from_hf_folder(folder)
    head: Head = "value" if "architectures" in entries else "language_model"
    header, end = dict[str, object](), 0
    for tensor, sizes in _hf_tensors(shape, head).items():
        start, end = end, end + 2 * math.prod(sizes)
        header[tensor] = {"dtype": "BF16", "shape": sizes, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (folder / SINGLE_FILE).open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
    os.truncate(folder / SINGLE_FILE, 8 + len(text) + end)
    return folder


def _write_tokenizer(folder: Path, end_tokens: Sequence[int]) -> None:
    """Every text is one unknown token; the chat template is a question mark of its own."""
    ends = {f"<end-{number}>": number for number in end_tokens}
    Tokenizer(WordLevel({"<unk>": 0} | ends, unk_token="<unk>")).save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}{{ message.content }}{% endfor %}?"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}), encoding="utf-8")


def _hf_tensors(shape: ModelShape, head: Head) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors of the folder; tied ones are one."""
    rules = by_layer(ConversionTable(shape, head).rules)
    return {name: sizes for rule in rules for name, sizes in zip(rule.hf, hf_shapes(rule, shape), strict=True)}
