"""Qwen3-MoE: Qwen3's attention, and a mixture of experts in every layer; no shared experts."""

from slime_ppo.conversion.families._decoder import MOE_DECODER, OUTPUT_LAYER, QK_NORMS, VALUE_HEAD
from slime_ppo.conversion.mapping import ModelFamily, MoeKeys, WindowKey

FAMILY = ModelFamily(
    model_type="qwen3_moe",
    rules=MOE_DECODER + QK_NORMS,
    output_layer=OUTPUT_LAYER,
    value_head=VALUE_HEAD,
    value_architecture="Qwen3MoeForSequenceClassification",
    window_key=WindowKey.SWITCH,
    refused_flags=("attention_bias",),
    required_keys=("head_dim", "num_key_value_heads", "norm_topk_prob"),
    # layers without experts, and experts that every token visits
    fixed_values=(("decoder_sparse_step", 1), ("mlp_only_layers", []), ("shared_expert_intermediate_size", 0)),
    moe_keys=MoeKeys(
        num_experts=("num_experts", "num_local_experts"),
        top_k="num_experts_per_tok",
        ffn_hidden_size="moe_intermediate_size",
        norm_topk_prob="norm_topk_prob",
    ),
)
