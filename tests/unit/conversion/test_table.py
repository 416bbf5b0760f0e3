"""The families' tables on a shape of two layers: names both ways, and errors that list everything."""

from pathlib import Path

import pytest
from safetensors import safe_open

from slime_ppo.config.model_shape import ModelShape
from slime_ppo.conversion.families import FAMILIES
from slime_ppo.conversion.mapping import Split
from slime_ppo.conversion.table import ConversionTable, Head
from slime_ppo.errors import ConversionError
from tests.helpers.tiny_family import TINY_FAMILIES, make_tiny_family
from tests.helpers.tiny_llama import make_tiny_llama


def _names(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", framework="np") as file:
        return set(file.keys())


@pytest.mark.parametrize("tie", [True, False])
def test_table_names_exactly_the_tensors_of_a_folder_each_once(tmp_path: Path, *, tie: bool) -> None:
    folder = make_tiny_llama(tmp_path, tie=tie)
    table = ConversionTable(ModelShape.from_hf_folder(folder), "language_model")
    used = [name for megatron, rule in table.rules.items() for name in rule.hf if not (tie and megatron == "output_layer.weight")]
    assert sorted(used) == sorted(_names(folder))
    table.check_hf_names(_names(folder), source="here")


@pytest.mark.parametrize(
    ("head", "tie", "hf", "split"),
    [
        ("language_model", False, ("lm_head.weight",), Split.VOCAB),
        # of a pipeline's last stage
        ("language_model", True, ("model.embed_tokens.weight",), Split.VOCAB),
        ("value", True, ("score.weight",), Split.REPLICATED),
    ],
)
def test_rule_output_layer_depends_on_the_head(tmp_path: Path, *, head: Head, tie: bool, hf: tuple[str, ...], split: Split) -> None:
    table = ConversionTable(ModelShape.from_hf_folder(make_tiny_llama(tmp_path, tie=tie)), head)
    rule = table.rule("output_layer.weight", 0)
    assert (rule.hf, rule.split) == (hf, split)


def test_rule_local_layer_number_is_counted_from_the_chunks_first_layer(tmp_path: Path) -> None:
    table = ConversionTable(ModelShape.from_hf_folder(make_tiny_llama(tmp_path, layers=3)), "language_model")
    rule = table.rule("decoder.layers.0.mlp.linear_fc2.weight", 2)
    assert rule.hf == ("model.layers.2.mlp.down_proj.weight",) and rule.split is Split.ROW


def test_rule_local_expert_number_is_counted_from_the_ranks_first_expert(tmp_path: Path) -> None:
    table = ConversionTable(ModelShape.from_hf_folder(make_tiny_family(tmp_path, "qwen3_moe", tie=False, seed=0)), "language_model")
    rule = table.rule("decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight", 2, 4)
    assert rule.hf == tuple(f"model.layers.3.mlp.experts.7.{half}_proj.weight" for half in ("gate", "up"))
    assert rule.per_expert and not table.rule("decoder.layers.1.mlp.router.weight", 2, 4).per_expert


@pytest.mark.parametrize(
    "name", ["output_layer.bias", "decoder.layers.2.mlp.linear_fc2.weight", "decoder.layers.0.mlp.router.weight"]
)
def test_rule_parameter_without_one_is_an_error_with_its_name(tmp_path: Path, name: str) -> None:
    table = ConversionTable(ModelShape.from_hf_folder(make_tiny_llama(tmp_path, tie=True)), "language_model")
    with pytest.raises(ConversionError, match=name):
        table.rule(name, 0)


def test_check_hf_names_lists_all_missing_and_all_unused_at_once(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path, tie=True)
    table = ConversionTable(ModelShape.from_hf_folder(folder), "language_model")
    present = _names(folder) - {"model.norm.weight", "model.embed_tokens.weight"} | {"b.bias", "a.bias", "lm_head.weight"}
    with pytest.raises(ConversionError) as caught:
        table.check_hf_names(present, source="/models/x", optional=frozenset({"lm_head.weight"}))
    assert str(caught.value) == (
        "/models/x does not fit the llama table: missing: model.embed_tokens.weight, model.norm.weight; not used: a.bias, b.bias"
    )


def test_check_hf_names_passes_over_frequencies_that_old_folders_store(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path, layers=2)
    table = ConversionTable(ModelShape.from_hf_folder(folder), "language_model")
    stored = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in (0, 1)}
    table.check_hf_names(_names(folder) | stored, source="here")
    with pytest.raises(ConversionError, match=r"not used: model.layers.2.self_attn.rotary_emb.inv_freq$"):
        table.check_hf_names(_names(folder) | {"model.layers.2.self_attn.rotary_emb.inv_freq"}, source="here")


@pytest.mark.parametrize("head", ["language_model", "value"])
@pytest.mark.parametrize("family", list(TINY_FAMILIES))
def test_table_of_every_family_names_exactly_the_tensors_of_transformers(tmp_path: Path, *, family: str, head: Head) -> None:
    folder = make_tiny_family(tmp_path, family, tie=False, seed=0)
    table = ConversionTable(ModelShape.from_hf_folder(folder), head)
    used = sorted(name for rule in table.rules.values() for name in rule.hf)
    assert used == sorted(_names(folder) if head == "language_model" else _names(folder) - {"lm_head.weight"} | {"score.weight"})


@pytest.mark.parametrize("first_layer", [0, 1])
@pytest.mark.parametrize("family", list(TINY_FAMILIES))
def test_rule_of_a_norm_that_is_one_module_with_the_linear_after_it_is_that_of_the_norm(
    tmp_path: Path, *, family: str, first_layer: int
) -> None:
    """transformer-engine's names, written out here once more. Every other parameter has the same name in both."""
    table = ConversionTable(ModelShape.from_hf_folder(make_tiny_family(tmp_path, family, tie=False, seed=0)), "language_model")
    layer = f"model.layers.{first_layer}."
    for fused, apart, hf in (
        ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight", "input_layernorm.weight"),
        ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
    ):
        rule = table.rule(f"decoder.layers.0.{fused}", first_layer)
        assert rule == table.rule(f"decoder.layers.0.{apart}", first_layer)
        assert (rule.hf, rule.split) == ((layer + hf,), Split.REPLICATED)
    with pytest.raises(ConversionError, match=r"decoder\.layers\.0\.mlp\.linear_fc2\.layer_norm_weight"):
        table.rule("decoder.layers.0.mlp.linear_fc2.layer_norm_weight", 0)


def test_families_are_found_by_their_files() -> None:
    assert list(FAMILIES) == ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe"]
    assert {family.model_type for family in FAMILIES.values()} == {model_type for model_type, _ in TINY_FAMILIES.values()}
