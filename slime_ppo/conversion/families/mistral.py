"""Mistral: Llama's tensors; the first releases attend to a sliding window."""

from slime_ppo.conversion.families._decoder import DECODER, OUTPUT_LAYER, ROPE_FREQUENCIES, VALUE_HEAD
from slime_ppo.conversion.mapping import ModelFamily, WindowKey

FAMILY = ModelFamily(
    model_type="mistral",
    rules=DECODER,
    output_layer=OUTPUT_LAYER,
    value_head=VALUE_HEAD,
    value_architecture="MistralForSequenceClassification",
    derived=ROPE_FREQUENCIES,
    window_key=WindowKey.WINDOW,
    required_keys=("num_key_value_heads", "sliding_window"),
)
