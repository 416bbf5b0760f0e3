"""What the families' tables share: RMSNorm, rotary embeddings, grouped queries, SwiGLU."""

from slime_ppo.conversion.mapping import Rule, Split

_MEGATRON = "decoder.layers.{layer}."
_HF = "model.layers.{layer}."

_BEFORE_MLP = (
    Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), Split.VOCAB),
    Rule(_MEGATRON + "input_layernorm.weight", (_HF + "input_layernorm.weight",), Split.REPLICATED),
    Rule(
        _MEGATRON + "self_attention.linear_qkv.weight",
        (_HF + "self_attn.q_proj.weight", _HF + "self_attn.k_proj.weight", _HF + "self_attn.v_proj.weight"),
        Split.QKV,
    ),
    Rule(_MEGATRON + "self_attention.linear_proj.weight", (_HF + "self_attn.o_proj.weight",), Split.ROW),
    Rule(_MEGATRON + "pre_mlp_layernorm.weight", (_HF + "post_attention_layernorm.weight",), Split.REPLICATED),
)
_MLP = (
    Rule(
        _MEGATRON + "mlp.linear_fc1.weight",
        (_HF + "mlp.gate_proj.weight", _HF + "mlp.up_proj.weight"),
        Split.GATE_UP,
    ),
    Rule(_MEGATRON + "mlp.linear_fc2.weight", (_HF + "mlp.down_proj.weight",), Split.ROW),
)
_EXPERT = "mlp.experts.{expert}."
_MOE = (
    Rule(_MEGATRON + "mlp.router.weight", (_HF + "mlp.gate.weight",), Split.REPLICATED),
    Rule(
        _MEGATRON + "mlp.experts.local_experts.{expert}.linear_fc1.weight",
        (_HF + _EXPERT + "gate_proj.weight", _HF + _EXPERT + "up_proj.weight"),
        Split.GATE_UP,
        per_expert=True,
    ),
    Rule(
        _MEGATRON + "mlp.experts.local_experts.{expert}.linear_fc2.weight",
        (_HF + _EXPERT + "down_proj.weight",),
        Split.ROW,
        per_expert=True,
    ),
)
_AFTER_MLP = (Rule("decoder.final_layernorm.weight", ("model.norm.weight",), Split.REPLICATED),)
DECODER = _BEFORE_MLP + _MLP + _AFTER_MLP
MOE_DECODER = _BEFORE_MLP + _MOE + _AFTER_MLP
"""A router and experts in the place of every MLP."""
QKV_BIAS = (
    Rule(
        _MEGATRON + "self_attention.linear_qkv.bias",
        (_HF + "self_attn.q_proj.bias", _HF + "self_attn.k_proj.bias", _HF + "self_attn.v_proj.bias"),
        Split.QKV,
    ),
)
QK_NORMS = (
    Rule(_MEGATRON + "self_attention.q_layernorm.weight", (_HF + "self_attn.q_norm.weight",), Split.REPLICATED),
    Rule(_MEGATRON + "self_attention.k_layernorm.weight", (_HF + "self_attn.k_norm.weight",), Split.REPLICATED),
)
OUTPUT_LAYER = Rule("output_layer.weight", ("lm_head.weight",), Split.VOCAB)
VALUE_HEAD = Rule("output_layer.weight", ("score.weight",), Split.REPLICATED)
ROPE_FREQUENCIES = (_HF + "self_attn.rotary_emb.inv_freq",)
"""Stored by old versions of transformers; made from config.json."""
