"""A random Qwen2 or Qwen3 classifier in a Hugging Face folder, with the tokenizer of the tiny Llama, as transformers saves it."""

from pathlib import Path
from typing import Literal

import torch
from transformers import Qwen2Config, Qwen2ForSequenceClassification, Qwen3Config, Qwen3ForSequenceClassification

from tests.helpers.tiny_llama import PAD_ID, make_tiny_llama

VOCAB_SIZE, MAX_POSITION = 100, 128
_FAMILIES = {
    "qwen2": (Qwen2Config, Qwen2ForSequenceClassification),
    "qwen3": (Qwen3Config, Qwen3ForSequenceClassification),
}


def make_tiny_classifier(
    folder: Path,
    *,
    family: Literal["qwen2", "qwen3"] = "qwen2",
    num_labels: int = 1,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    seed: int = 0,
) -> Path:
    """Write the model into `folder` and return it. Scores of different texts differ by about 1."""
    make_tiny_llama(folder, vocab_size=VOCAB_SIZE, max_position=MAX_POSITION)  # for its tokenizer
    (folder / "model.safetensors").unlink()
    config_class, model_class = _FAMILIES[family]
    config = config_class(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITION,
        initializer_range=0.2,
        num_labels=num_labels,
        pad_token_id=PAD_ID,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder
