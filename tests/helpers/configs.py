"""Configs and model folders for tests, without torch."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path

from slime_ppo.config.cli import merge_settings
from slime_ppo.config.fields import Value
from slime_ppo.config.root import OPTION_BY_KEY, Config
from slime_ppo.config.yaml_file import Setting

GLASS_SHAPE: Mapping[str, object] = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 352,
    "vocab_size": 1024,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "eos_token_id": 3,
}


def make_config(**values: Value) -> Config:
    """A config of defaults but for `section__field=value`; unchecked."""
    given: dict[str, Value] = {"model.hf_checkpoint": "model", "data.prompt_data": "prompts.jsonl"}
    given |= {key.replace("__", "."): value for key, value in values.items()}
    config, _ = merge_settings(Setting(OPTION_BY_KEY[key], value, "test") for key, value in given.items())
    return config


def write_model_folder(folder: Path, **changes: object) -> Path:
    """A folder with a config.json of the quickstart model's shape and weights without tensors; a change of None drops the key."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = {key: value for key, value in (dict(GLASS_SHAPE) | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(entries), encoding="utf-8")
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    return folder
