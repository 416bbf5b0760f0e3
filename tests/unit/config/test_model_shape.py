"""Model shapes from config.json: both spellings of RoPE, defaults of transformers, and broken folders."""

import json
from pathlib import Path

import pytest

from slime_ppo.config.model_shape import Llama3Scaling, ModelShape, MoeShape, padded_vocab_size
from slime_ppo.errors import CheckpointError
from tests.helpers.configs import write_model_folder

MOE: dict[str, object] = {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "norm_topk_prob": True,
}
LLAMA3: dict[str, object] = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_from_hf_folder_reads_the_quickstart_shape(tmp_path: Path) -> None:
    assert ModelShape.from_hf_folder(write_model_folder(tmp_path)) == ModelShape(
        model_type="llama",
        num_layers=4,
        hidden_size=128,
        num_attention_heads=4,
        num_query_groups=2,
        head_dim=32,
        ffn_hidden_size=352,
        vocab_size=1024,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        rope_theta=10000.0,
        rope_scaling=None,
        attention_window=None,
        qkv_bias=False,
        qk_layernorm=False,
        rms_norm_eps=1e-5,
        eos_token_ids=(3,),
    )


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_from_hf_folder_of_a_mixture_reads_its_experts_in_both_spellings(tmp_path: Path, key: str) -> None:
    shape = ModelShape.from_hf_folder(
        write_model_folder(tmp_path, **(MOE | {"num_experts": None, key: 8, "mlp_only_layers": [], "decoder_sparse_step": 1}))
    )
    assert shape.moe == MoeShape(num_experts=8, top_k=2, ffn_hidden_size=96, norm_topk_prob=True)
    assert (shape.num_experts, shape.ffn_hidden_size, shape.qk_layernorm) == (8, 352, True)


def test_from_hf_folder_of_transformers_4_reads_rope_theta_and_defaults(tmp_path: Path) -> None:
    folder = write_model_folder(
        tmp_path,
        rope_parameters=None,
        rope_theta=5e5,
        num_key_value_heads=None,
        head_dim=None,
        tie_word_embeddings=None,
        eos_token_id=None,
    )
    shape = ModelShape.from_hf_folder(folder)
    assert (shape.rope_theta, shape.num_query_groups, shape.head_dim) == (5e5, 4, 32)
    assert (shape.tie_word_embeddings, shape.eos_token_ids) == (False, ())


def test_from_hf_folder_prefers_the_end_tokens_of_generation_config(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}), encoding="utf-8")
    assert ModelShape.from_hf_folder(folder).eos_token_ids == (7, 8)
    (folder / "generation_config.json").write_text("{}", encoding="utf-8")
    assert ModelShape.from_hf_folder(folder).eos_token_ids == (3,)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"hidden_size": None}, "has no 'hidden_size'"),
        ({"hidden_size": "128"}, "hidden_size is '128', expected a whole number above 0"),
        ({"vocab_size": 0}, "vocab_size is 0, expected a whole number above 0"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small', expected a number above 0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes', expected true or false"),
        ({"model_type": 3}, "model_type is 3, expected a string"),
        ({"model_type": "qwen9"}, "model_type 'qwen9' is not in this version; known: llama, mistral, qwen2, qwen3, qwen3_moe"),
        ({"attention_bias": True}, "attention_bias true is not in this version"),
        ({"mlp_bias": True}, "mlp_bias true is not in this version"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not in this version, expected 'silu'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "RoPE of type 'yarn' is not in this version"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "has no 'factor'"),
        ({"rope_parameters": LLAMA3 | {"high_freq_factor": 1}}, "RoPE's high_freq_factor is 1, expected more than its low_freq"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor 0.5 is not in this version",
        ),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor 0.25 is not in this version, expected 1"),
        ({"model_type": "qwen3", "attention_bias": True}, "attention_bias true is not in this version"),
        ({"model_type": "qwen3", "head_dim": None}, "has no 'head_dim', which the shape of a qwen3 model needs"),
        ({"model_type": "qwen2", "num_key_value_heads": None}, "has no 'num_key_value_heads', which the shape of a qwen2"),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 0}, "sliding_window is 0, expected a whole number"),
        (MOE | {"norm_topk_prob": None}, "has no 'norm_topk_prob', which the shape of a qwen3_moe"),
        (MOE | {"num_experts": None}, "has no 'num_experts'"),
        (MOE | {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, more than the 8 experts of a layer"),
        (MOE | {"moe_intermediate_size": 0}, "moe_intermediate_size is 0, expected a whole number above 0"),
        (MOE | {"decoder_sparse_step": 2}, "decoder_sparse_step is 2, only 1 is in this version"),
        (MOE | {"mlp_only_layers": [0]}, "mlp_only_layers is [0], only [] is in this version"),
        (MOE | {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size is 64, only 0 is in this version"),
        ({"model_type": "mistral"}, "has no 'sliding_window', which the shape of a mistral model needs"),
        ({"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": {"type": "linear"}}, "RoPE of type 'linear'"),
        ({"rope_parameters": None}, "has no 'rope_theta'"),
        ({"rope_parameters": [1]}, "rope_parameters is [1], expected an object"),
        ({"eos_token_id": ["x"]}, "eos_token_id is ['x'], expected a token id"),
    ],
)
def test_from_hf_folder_with_a_bad_key_names_file_and_key(tmp_path: Path, changes: dict[str, object], part: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        ModelShape.from_hf_folder(write_model_folder(tmp_path, **changes))
    assert str(caught.value).startswith(f"{tmp_path}/config.json: {part}")


@pytest.mark.parametrize(
    ("model_type", "qkv_bias", "qk_layernorm"),
    [("llama", False, False), ("qwen2", True, False), ("qwen3", False, True), ("mistral", False, False)],
)
def test_from_hf_folder_of_a_family_has_the_biases_and_norms_of_its_table(
    tmp_path: Path, *, model_type: str, qkv_bias: bool, qk_layernorm: bool
) -> None:
    shape = ModelShape.from_hf_folder(write_model_folder(tmp_path, model_type=model_type, sliding_window=64))
    assert (shape.model_type, shape.qkv_bias, shape.qk_layernorm) == (model_type, qkv_bias, qk_layernorm)


def test_from_hf_folder_reads_llama3_scaling_in_both_spellings(tmp_path: Path) -> None:
    expected = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
    new = ModelShape.from_hf_folder(write_model_folder(tmp_path / "new", rope_parameters=LLAMA3))
    scaling = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    old = ModelShape.from_hf_folder(
        write_model_folder(tmp_path / "old", rope_parameters=None, rope_theta=5e5, rope_scaling=scaling)
    )
    assert new.rope_scaling == old.rope_scaling == expected
    assert new.rope_theta == old.rope_theta == 5e5


@pytest.mark.parametrize(
    ("model_type", "keys", "window"),
    [
        ("mistral", {"sliding_window": 64}, 64),
        ("qwen2", {"sliding_window": 64}, None),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": True}, 64),
        ("qwen3", {"use_sliding_window": True}, None),
        ("llama", {"sliding_window": 64}, None),
    ],
)
def test_from_hf_folder_has_a_window_where_transformers_uses_it(
    tmp_path: Path, *, model_type: str, keys: dict[str, object], window: int | None
) -> None:
    assert ModelShape.from_hf_folder(write_model_folder(tmp_path, model_type=model_type, **keys)).attention_window == window


def test_from_hf_folder_of_mistral_with_a_null_window_has_none(tmp_path: Path) -> None:
    config = write_model_folder(tmp_path, model_type="mistral", sliding_window=64) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"sliding_window": None}), encoding="utf-8")
    assert ModelShape.from_hf_folder(tmp_path).attention_window is None


def test_from_hf_folder_that_is_missing_names_the_path(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere: no such folder"):
        ModelShape.from_hf_folder(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"config.json: no such file; expected a complete Hugging Face folder"):
        ModelShape.from_hf_folder(tmp_path)


@pytest.mark.parametrize(("content", "part"), [("{", "cannot be read as JSON"), ("[1]", "holds a list, expected a JSON object")])
def test_from_hf_folder_with_a_broken_file_says_what_it_holds(tmp_path: Path, content: str, part: str) -> None:
    (tmp_path / "config.json").write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError) as caught:
        ModelShape.from_hf_folder(tmp_path)
    assert part in str(caught.value)


def test_padded_vocab_size_is_the_smallest_multiple_of_both() -> None:
    assert padded_vocab_size(1024, divisible_by=128, tp_size=2) == 1024
    assert padded_vocab_size(1025, divisible_by=128, tp_size=2) == 1280
