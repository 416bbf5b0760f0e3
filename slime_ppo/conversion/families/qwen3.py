"""Qwen3: a norm on each query and key head, no biases; the head size is not hidden / heads."""

from slime_ppo.conversion.families._decoder import DECODER, OUTPUT_LAYER, QK_NORMS, VALUE_HEAD
from slime_ppo.conversion.mapping import ModelFamily, WindowKey

FAMILY = ModelFamily(
    model_type="qwen3",
    rules=DECODER + QK_NORMS,
    output_layer=OUTPUT_LAYER,
    value_head=VALUE_HEAD,
    value_architecture="Qwen3ForSequenceClassification",
    window_key=WindowKey.SWITCH,
    refused_flags=("attention_bias",),
    required_keys=("head_dim", "num_key_value_heads"),
)
