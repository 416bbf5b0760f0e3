"""python tools/convert_glass_to_hf.py OUT: the English language model inside the `glassllm` package as a Hugging Face folder.

A Llama of 0.85 million parameters, exact: the same logits and the same tokens. Its feed-forward width of 341 is padded with
zeros to 352, which changes no logit and divides by tensor-parallel sizes. Needs no torch; takes a second.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

FFN_MULTIPLE = 32
SPECIAL_TOKENS = ("<pad>", "<unk>", "<bos>", "<eos>")
PAD_ID, BOS_ID, EOS_ID = 0, 2, 3
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
CHECK_TEXT = "Alice was beginning to get very tired of sitting by her sister on the bank"


class ConvertError(Exception):
    """What is wrong and what to do."""


@dataclass(frozen=True)
class GlassModel:
    """What is read from the package. `parameters` are float32 arrays in glassllm's names, weights stored [in, out]."""

    parameters: dict[str, np.ndarray]
    shape: Any  # glassllm.Config
    tokenizer: Any  # glassllm.Tokenizer
    forward: Callable[[Sequence[int]], np.ndarray]  # token ids -> logits [T, V]


def load_glass() -> GlassModel:
    """The package's English model. Raises ConvertError when the package is not installed."""
    try:
        from glassllm import load_pretrained, no_grad
    except ImportError as error:
        raise ConvertError(f"the package glassllm is missing ({error}); install it with: pip install glassllm==0.1.0") from error
    model, tokenizer = load_pretrained("en")

    def forward(ids: Sequence[int]) -> np.ndarray:
        with no_grad():
            logits: np.ndarray = model.forward(list(ids)).data[0]
        return logits

    parameters = {name: np.asarray(tensor.data, np.float32) for name, tensor in model.named_parameters().items()}
    return GlassModel(parameters, model.cfg, tokenizer, forward)


def llama_tensors(glass: GlassModel) -> dict[str, np.ndarray]:
    """Weights in Hugging Face names, float32, [out, in]; the output layer is tied to the embedding and not stored."""
    source, shape = glass.parameters, glass.shape
    tensors = {"model.embed_tokens.weight": source["E"], "model.norm.weight": source["norm_f.gamma"]}
    for layer in range(shape.n_layers):
        theirs, ours = f"blocks.{layer}.", f"model.layers.{layer}."
        tensors |= {
            ours + "input_layernorm.weight": source[theirs + "norm1.gamma"],
            ours + "post_attention_layernorm.weight": source[theirs + "norm2.gamma"],
            ours + "self_attn.q_proj.weight": _half_split(source[theirs + "attn.W_Q"].T, shape.n_heads),
            ours + "self_attn.k_proj.weight": _half_split(source[theirs + "attn.W_K"].T, shape.n_kv_heads),
            ours + "self_attn.v_proj.weight": source[theirs + "attn.W_V"].T,
            ours + "self_attn.o_proj.weight": source[theirs + "attn.W_O"].T,
            ours + "mlp.gate_proj.weight": _padded(source[theirs + "ffn.W1"]).T,
            ours + "mlp.up_proj.weight": _padded(source[theirs + "ffn.W3"]).T,
            ours + "mlp.down_proj.weight": _padded(source[theirs + "ffn.W2"].T),
        }
    return {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}


def _half_split(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """glassllm rotates neighbours (0, 1), (2, 3), ...; Llama rotates halves (0, d/2), (1, d/2 + 1), ...: reorder each head."""
    heads = weight.reshape(num_heads, -1, weight.shape[1])
    return np.concatenate([heads[:, 0::2], heads[:, 1::2]], axis=1).reshape(weight.shape)


def _ffn_size(glass: GlassModel) -> int:
    width = glass.parameters["blocks.0.ffn.W1"].shape[1]
    return -(-width // FFN_MULTIPLE) * FFN_MULTIPLE


def _padded(weight: np.ndarray) -> np.ndarray:
    """Zero columns up to a multiple: silu(0) * 0 = 0 goes into rows of the next matrix that are zero as well."""
    return np.pad(weight, ((0, 0), (0, -weight.shape[1] % FFN_MULTIPLE)))


def llama_config(glass: GlassModel) -> dict[str, object]:
    shape = glass.shape
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.d_model,
        "num_hidden_layers": shape.n_layers,
        "num_attention_heads": shape.n_heads,
        "num_key_value_heads": shape.n_kv_heads,
        "head_dim": shape.d_model // shape.n_heads,
        "intermediate_size": _ffn_size(glass),
        "hidden_act": "silu",
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.rope_base,
        "max_position_embeddings": shape.max_len,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "pad_token_id": PAD_ID,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
    }


def fast_tokenizer(glass: GlassModel) -> Tokenizer:
    """The same byte-pair encoding: NFC, spaces as markers, merges within chunks that keep leading markers and newlines."""
    theirs = glass.tokenizer
    tokenizer = Tokenizer(models.BPE(vocab=theirs.token_to_id, merges=theirs.merges, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n|▁*[^▁\n]+|▁+"), "isolated")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return tokenizer


def tokenizer_config(glass: GlassModel) -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": glass.shape.max_len,
    }


def write_folder(glass: GlassModel, folder: Path) -> None:
    """Write the five files into an empty folder."""
    save_file(llama_tensors(glass), folder / "model.safetensors", metadata={"format": "pt"})
    fast_tokenizer(glass).save(str(folder / "tokenizer.json"))
    texts = {
        "config.json": llama_config(glass),
        "generation_config.json": {"pad_token_id": PAD_ID, "bos_token_id": BOS_ID, "eos_token_id": EOS_ID},
        "tokenizer_config.json": tokenizer_config(glass),
    }
    for name, content in texts.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def convert(out: Path, *, force: bool) -> GlassModel:
    """Write the model to `out`, all of it or nothing: into a folder beside it that is renamed at the end.

    Raises ConvertError when `out` holds anything, unless `force` is set and it holds nothing but an earlier conversion.
    """
    if out.exists() and not out.is_dir():
        raise ConvertError(f"{out} is a file; expected a folder to write, or a name that does not exist yet")
    present = sorted(entry.name for entry in out.iterdir()) if out.exists() else []
    if present and not force:
        raise ConvertError(f"{out} is not empty (it holds {present[0]}); choose another folder, or replace it with --force")
    foreign = [name for name in present if name not in FILES]
    if foreign:
        raise ConvertError(f"{out} holds {foreign[0]}, which this tool did not write, and is left as it is; choose another folder")
    glass = load_glass()
    out.parent.mkdir(parents=True, exist_ok=True)
    beside = out.with_name(f".{out.name}.{os.getpid()}.partial")
    replaced = out.with_name(f".{out.name}.{os.getpid()}.replaced")
    beside.mkdir()
    try:
        write_folder(glass, beside)
        if out.exists():
            out.rename(replaced)
        beside.rename(out)
    finally:
        for leftover in (beside, replaced):
            shutil.rmtree(leftover, ignore_errors=True)
    return glass


def largest_difference(glass: GlassModel, folder: Path) -> float:
    """Largest |logit| difference between transformers reading `folder` and glassllm itself, on the same text."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    expected_ids = glass.tokenizer.encode(CHECK_TEXT)
    ids = AutoTokenizer.from_pretrained(folder)(CHECK_TEXT, add_special_tokens=False).input_ids
    if ids != expected_ids:
        raise ConvertError(f"the tokenizers disagree on {CHECK_TEXT!r}: {ids} in {folder}, {expected_ids} in glassllm")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].numpy()
    return float(np.abs(logits - glass.forward(ids)).max())


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--force", action="store_true", help="replace an earlier conversion in OUT")
    parser.add_argument("--check", action="store_true", help="compare with glassllm's own logits (needs torch and transformers)")
    args = parser.parse_args(argv)
    try:
        glass = convert(args.out, force=args.force)
        checked = ""
        if args.check:
            difference = largest_difference(glass, args.out)
            checked = f"; largest logit difference to glassllm {difference:.1e}"
            if difference > 1e-4:
                raise ConvertError(f"{args.out} is not the model of glassllm{checked}, expected at most 1e-4")
    except ConvertError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    num_parameters = sum(parameter.size for parameter in glass.parameters.values())
    print(f"{args.out}: English model of glassllm as a Llama folder, {num_parameters:,} parameters, float32{checked}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
