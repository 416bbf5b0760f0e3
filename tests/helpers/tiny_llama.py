"""A random Llama in a Hugging Face folder, small enough to build in milliseconds. Needs no torch.

The tokenizer has one token per character: ids 0-3 are <pad> <unk> <bos> <eos>, ids 4-99 are the printable ASCII
characters and the newline; larger vocabularies end in filler tokens that no text encodes to. A vocabulary below 100
drops characters from the end of `CHARACTERS`; those encode to <unk>.
"""

import json
import string
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

SPECIAL_TOKENS = ("<pad>", "<unk>", "<bos>", "<eos>")
PAD_ID, UNK_ID, BOS_ID, EOS_ID = range(4)
CHARACTERS = " " + string.ascii_lowercase + string.ascii_uppercase + string.digits + string.punctuation + "\n"


def make_tiny_llama(
    folder: str | Path,
    *,
    vocab_size: int = 100,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    intermediate: int = 128,
    max_position: int = 512,
    tie: bool = True,
    seed: int = 0,
) -> Path:
    """Write config.json, generation_config.json, model.safetensors and the tokenizer into `folder`, and return it.

    Weights are float32 and large enough that the next-token distribution is far from uniform, norm weights differ
    from 1, and tensors differ from each other, so that a tensor that is lost or swapped shows.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = _config(vocab_size, hidden, layers, heads, kv_heads)
    config |= {"intermediate_size": intermediate, "max_position_embeddings": max_position, "tie_word_embeddings": tie}
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID})
    rng = np.random.default_rng(seed)
    tensors = {name: _random_weight(rng, name, shape) for name, shape in _shapes(config).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(folder, vocab_size, max_position)
    return folder


def _config(vocab_size: int, hidden: int, layers: int, heads: int, kv_heads: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": "float32",
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
    }


def _shapes(config: dict[str, object]) -> dict[str, tuple[int, ...]]:
    hidden, ffn = int(str(config["hidden_size"])), int(str(config["intermediate_size"]))
    head_dim = int(str(config["head_dim"]))
    q, kv = head_dim * int(str(config["num_attention_heads"])), head_dim * int(str(config["num_key_value_heads"]))
    vocab = int(str(config["vocab_size"]))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    for layer in range(int(str(config["num_hidden_layers"]))):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "post_attention_layernorm.weight": (hidden,),
            prefix + "self_attn.q_proj.weight": (q, hidden),
            prefix + "self_attn.k_proj.weight": (kv, hidden),
            prefix + "self_attn.v_proj.weight": (kv, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, q),
            prefix + "mlp.gate_proj.weight": (ffn, hidden),
            prefix + "mlp.up_proj.weight": (ffn, hidden),
            prefix + "mlp.down_proj.weight": (hidden, ffn),
        }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def _random_weight(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    noise = rng.standard_normal(shape, dtype=np.float32)
    if name.endswith("norm.weight"):
        return 1.0 + 0.1 * noise
    if name in ("model.embed_tokens.weight", "lm_head.weight"):
        return 0.2 * noise
    return noise / np.float32(np.sqrt(shape[-1]))


def _write_tokenizer(folder: Path, vocab_size: int, max_position: int) -> None:
    words = [*SPECIAL_TOKENS, *CHARACTERS]
    words += [f"<filler{index}>" for index in range(len(words), vocab_size)]
    added = [
        {"id": index, "content": word, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        for index, word in enumerate(SPECIAL_TOKENS)
    ]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "[\\s\\S]"}, "behavior": "Isolated", "invert": False},
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {
            "type": "WordLevel",
            "vocab": {word: index for index, word in enumerate(words[:vocab_size])},
            "unk_token": "<unk>",
        },
    }
    _write_json(folder / "tokenizer.json", tokenizer)
    names = {f"{role}_token": word for role, word in zip(("pad", "unk", "bos", "eos"), SPECIAL_TOKENS, strict=True)}
    special = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_position,
        "clean_up_tokenization_spaces": False,
    }
    _write_json(folder / "tokenizer_config.json", names | special)


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
