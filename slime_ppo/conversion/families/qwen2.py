"""Qwen2 and Qwen2.5: biases on queries, keys and values, always; small models tie their embeddings."""

from slime_ppo.conversion.families._decoder import DECODER, OUTPUT_LAYER, QKV_BIAS, VALUE_HEAD
from slime_ppo.conversion.mapping import ModelFamily, WindowKey

FAMILY = ModelFamily(
    model_type="qwen2",
    rules=DECODER + QKV_BIAS,
    output_layer=OUTPUT_LAYER,
    value_head=VALUE_HEAD,
    value_architecture="Qwen2ForSequenceClassification",
    window_key=WindowKey.SWITCH,
    required_keys=("num_key_value_heads",),
)
