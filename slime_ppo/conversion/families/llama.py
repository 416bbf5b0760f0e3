"""Llama: RMSNorm, rotary embeddings, grouped queries, SwiGLU; no biases."""

from slime_ppo.conversion.mapping import ModelFamily, Rule, Split

_MEGATRON = "decoder.layers.{layer}."
_HF = "model.layers.{layer}."

LLAMA = ModelFamily(
    model_type="llama",
    rules=(
        Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), Split.VOCAB),
        Rule(_MEGATRON + "input_layernorm.weight", (_HF + "input_layernorm.weight",), Split.REPLICATED),
        Rule(
            _MEGATRON + "self_attention.linear_qkv.weight",
            (_HF + "self_attn.q_proj.weight", _HF + "self_attn.k_proj.weight", _HF + "self_attn.v_proj.weight"),
            Split.QKV,
        ),
        Rule(_MEGATRON + "self_attention.linear_proj.weight", (_HF + "self_attn.o_proj.weight",), Split.ROW),
        Rule(_MEGATRON + "pre_mlp_layernorm.weight", (_HF + "post_attention_layernorm.weight",), Split.REPLICATED),
        Rule(
            _MEGATRON + "mlp.linear_fc1.weight",
            (_HF + "mlp.gate_proj.weight", _HF + "mlp.up_proj.weight"),
            Split.GATE_UP,
        ),
        Rule(_MEGATRON + "mlp.linear_fc2.weight", (_HF + "mlp.down_proj.weight",), Split.ROW),
        Rule("decoder.final_layernorm.weight", ("model.norm.weight",), Split.REPLICATED),
    ),
    output_layer=Rule("output_layer.weight", ("lm_head.weight",), Split.VOCAB),
    value_head=Rule("output_layer.weight", ("score.weight",), Split.REPLICATED),
    value_architecture="LlamaForSequenceClassification",
)
