"""Llama 2 and 3: no biases; RoPE may be scaled."""

from slime_ppo.conversion.families._decoder import DECODER, OUTPUT_LAYER, ROPE_FREQUENCIES, VALUE_HEAD
from slime_ppo.conversion.mapping import ModelFamily

FAMILY = ModelFamily(
    model_type="llama",
    rules=DECODER,
    output_layer=OUTPUT_LAYER,
    value_head=VALUE_HEAD,
    value_architecture="LlamaForSequenceClassification",
    derived=ROPE_FREQUENCIES,
    refused_flags=("attention_bias", "mlp_bias"),
)
