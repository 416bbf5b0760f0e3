"""Which flags of SGLang a user can't pass on, and why: those that we set ourselves, and those that break training."""

from collections.abc import Mapping

OURS: Mapping[str, str] = {
    "model_path": "it is --hf-checkpoint",
    "tokenizer_path": "it is --hf-checkpoint",
    "dtype": "it follows the actor's precision, since both must compute the same log-probs",
    "context_length": "it follows max_position_embeddings of the model",
    "device": "it follows --device",
    "tp_size": "its own option decides how many ranks a server has, since weights are pushed to each",
    "host": "its own option checks that another host than loopback has an API key",
    "port": "each server takes a free port",
    "api_key": "its own option reads it from a file, so that it does not show in a list of processes",
    "admin_api_key": "one key is used for all calls",
    "random_seed": "it follows --seed",
    "enable_deterministic_inference": "it has an option of its own",
    "enable_fp32_lm_head": "it follows the actor's output layer",
    "trust_remote_code": "it follows --trust-remote-code",
    "is_embedding": "reward models are served by the reward options",
    "grammar_backend": "the trainer has no grammar, so it can't recompute the log-probs of constrained tokens",
    "sampling_defaults": "every request carries its sampler in full",
    "weight_version": "pushes count the versions",
    "sleep_on_idle": "it is always on: without it a paused server burns a core",
    "skip_server_warmup": "it is always on: we wait for a first token ourselves, and a warm-up would collide with a pause",
    "enable_memory_saver": "it is always on where there is a GPU, for turns on shared devices",
}

_SAMPLER = "it changes what is sampled in a way that the trainer can't reproduce"
_DRAFT = "drafted tokens come without the sampler's record that the trainer needs"
_PRECISION = "the trainer can't reproduce quantised numbers, so the log-probs of both would differ"
_LORA = "pushes carry whole weights, no adapters"
_LAYOUT = "pushed weights and their checksums are laid out for servers that only have tensor parallel ranks; use more engines"
_ONE_NODE = "a server is one process group on one node; use more engines"
_CACHE = "prefixes that old weights computed would outlive the flush after a push"
_PLACE = "pushes write to the server's tensors on its device, and would miss weights that are kept elsewhere"
_HTTP = "our calls need one HTTP process that speaks plain HTTP/1.1"
_SPLIT = "each server both reads prompts and writes responses"

REFUSED: Mapping[str, str] = {
    "preferred_sampling_params": _SAMPLER,
    "enable_custom_logit_processor": _SAMPLER + ", and runs code that comes with a request",
    "enable_watermark": _SAMPLER,
    "dllm_algorithm": _SAMPLER,
    "uno_lora_path": _DRAFT,
    "enable_multi_layer_eagle": _DRAFT,
    "quantization": _PRECISION,
    "quantization_param_path": _PRECISION,
    "quantize_and_serve": _PRECISION,
    "rl_quant_profile": _PRECISION,
    "kv_cache_dtype": _PRECISION,
    "enable_quant_communications": _PRECISION,
    "enable_lora": _LORA,
    "json_model_override_args": "the actor would be another model than the served one; change config.json of --hf-checkpoint",
    "allow_auto_truncate": "prompts would be cut without a word; longer ones are refused",
    "delete_ckpt_after_loading": "it deletes --hf-checkpoint",
    "checkpoint_engine_wait_weights_before_ready": "the first push comes when the server is ready, so both would wait for ever",
    "debug_tensor_dump_input_file": "it ends the server",
    "config": "flags in a file would pass by these checks; give them one by one",
    "pp_size": _LAYOUT,
    "dp_size": _LAYOUT,
    "dcp_size": _LAYOUT,
    "attn_dp_size": _LAYOUT,
    "attn_cp_size": _LAYOUT,
    "moe_dp_size": _LAYOUT,
    "dwdp_size": _LAYOUT,
    "ep_size": _LAYOUT,
    "enable_dp_attention": _LAYOUT,
    "enable_eplb": _LAYOUT,
    "ep_num_redundant_experts": _LAYOUT,
    "init_expert_location": _LAYOUT,
    "nnodes": _ONE_NODE,
    "node_rank": _ONE_NODE,
    "dist_init_addr": _ONE_NODE,
    "use_ray": _ONE_NODE,
    "enable_hierarchical_cache": _CACHE,
    "enable_lmcache": _CACHE,
    "enable_flexkv": _CACHE,
    "enable_unified_cache_external_linker": _CACHE,
    "enable_session_radix_cache": _CACHE,
    "enable_streaming_session": _CACHE,
    "radix_cache_backend": _CACHE,
    "cpu_offload_gb": _PLACE,
    "weight_cache_mode": _PLACE,
    "enable_paged_experts": _PLACE,
    "tokenizer_worker_num": _HTTP,
    "enable_http_worker_reuseport": _HTTP,
    "enable_http2": _HTTP,
    "enable_ssl_refresh": _HTTP,
    "fastapi_root_path": _HTTP,
    "grpc_mode": _HTTP,
    "smg_grpc_mode": _HTTP,
    "language_only": _SPLIT,
    "language_model_only": _SPLIT,
}

REFUSED_PREFIXES: Mapping[str, str] = {
    "watermark_": _SAMPLER,
    "speculative_": _DRAFT,
    "decoupled_spec_": _DRAFT,
    "modelopt_": _PRECISION,
    "lora_": _LORA,
    "hicache_": _CACHE,
    "offload_": _PLACE,
    "kt_": _PLACE,
    "ssl_": _HTTP,
    "disaggregation_": _SPLIT,
    "encoder_": _SPLIT,
}


def refusal(field: str) -> str | None:
    """Why a field of ServerArgs can't be passed on, None where it can."""
    if field in OURS:
        return f"it is set by slime_ppo: {OURS[field]}"
    if field in REFUSED:
        return REFUSED[field]
    return next((reason for prefix, reason in REFUSED_PREFIXES.items() if field.startswith(prefix)), None)
