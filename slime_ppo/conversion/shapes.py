"""Whole shapes of a model's parameters, in Megatron's names and in those of the Hugging Face folder. No torch."""

import re

from slime_ppo.config.model_shape import ModelShape
from slime_ppo.conversion.mapping import Rule, Split
from slime_ppo.errors import ConversionError


def megatron_shape(rule: Rule, shape: ModelShape, *, vocab_rows: int) -> tuple[int, ...]:
    """Shape of the rule's parameter as one tensor-parallel rank would hold it. `vocab_rows`: with the padding.

    Raises ConversionError for a parameter whose size is not known here.
    """
    hidden, ffn = shape.hidden_size, shape.expert_ffn_size if rule.per_expert else shape.ffn_hidden_size
    queries, keys = shape.num_attention_heads * shape.head_dim, shape.num_query_groups * shape.head_dim
    shapes = {
        "word_embeddings.weight": (vocab_rows, hidden),
        "output_layer.weight": (vocab_rows if rule.split is Split.VOCAB else 1, hidden),
        "linear_qkv.weight": (queries + 2 * keys, hidden),
        "linear_qkv.bias": (queries + 2 * keys,),
        "linear_proj.weight": (hidden, queries),
        "linear_fc1.weight": (2 * ffn, hidden),
        "linear_fc2.weight": (hidden, ffn),
        "router.weight": (shape.num_experts, hidden),
        "q_layernorm.weight": (shape.head_dim,),
        "k_layernorm.weight": (shape.head_dim,),
        "input_layernorm.weight": (hidden,),
        "pre_mlp_layernorm.weight": (hidden,),
        "final_layernorm.weight": (hidden,),
    }
    name = ".".join(rule.megatron.split(".")[-2:])
    if name not in shapes:
        raise ConversionError(f"the size of the Megatron parameter {rule.megatron} is not known to slime_ppo/conversion/shapes.py")
    return shapes[name]


def hf_shapes(rule: Rule, shape: ModelShape) -> tuple[tuple[int, ...], ...]:
    """Shapes of the HF tensors that the rule's parameter is fused from, in the order of `rule.hf`."""
    rows, *columns = megatron_shape(rule, shape, vocab_rows=shape.vocab_size)
    if rule.split is Split.GATE_UP:
        return (rows // 2, *columns), (rows // 2, *columns)
    if rule.split is Split.QKV:
        keys = shape.num_query_groups * shape.head_dim
        return (rows - 2 * keys, *columns), (keys, *columns), (keys, *columns)
    return ((rows, *columns),)


def by_layer(rules: dict[str, Rule]) -> list[Rule]:
    """The rules in the order in which a token passes: embedding, layer after layer, final norm, output layer."""
    return sorted(rules.values(), key=_position)


def _position(rule: Rule) -> tuple[int, int]:
    layer = re.match(r"decoder\.layers\.(\d+)\.", rule.megatron)
    return (1, int(layer[1])) if layer else (0 if rule.megatron.startswith("embedding.") else 2, 0)
