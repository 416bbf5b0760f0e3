"""A Megatron GPT model from a HF model shape: the actor with its output layer, or the critic with a value head."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.moe.router_replay import RouterReplay
from megatron.core.transformer.transformer_config import TransformerConfig

from slime_ppo.backends.megatron.fusions import fusions_of
from slime_ppo.backends.megatron.rope import llama3_frequencies
from slime_ppo.backends.megatron.spec import transformer_block_spec
from slime_ppo.config.model_shape import ModelShape, MoeShape, padded_vocab_size
from slime_ppo.conversion.check import require_tied
from slime_ppo.conversion.mapping import Rule, Split
from slime_ppo.conversion.shard import shard, unshard
from slime_ppo.conversion.table import ConversionTable, Head
from slime_ppo.errors import ConversionError
from slime_ppo.parallel.layout import ParallelLayout
from slime_ppo.parallel.worker_settings import ExecutionSettings, TransformerImpl


def transformer_config(
    shape: ModelShape,
    layout: ParallelLayout,
    dtype: torch.dtype,
    impl: TransformerImpl,
    execution: ExecutionSettings,
    *,
    moe_aux_loss_coeff: float = 0.0,
) -> TransformerConfig:
    """Megatron's config of the model. No dropout: old, current and reference log-probs must be comparable."""
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_query_groups,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn_hidden_size,
        layernorm_epsilon=shape.rms_norm_eps,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_layernorm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        tensor_model_parallel_size=layout.tp_size,
        pipeline_model_parallel_size=layout.pp_size,
        virtual_pipeline_model_parallel_size=layout.vpp_size if layout.vpp_size > 1 else None,
        # both neighbours of a stage may be one rank: messages sent as a batch would be mixed up there, and the run would hang
        overlap_p2p_comm=layout.vpp_size > 1,
        batch_p2p_comm=layout.vpp_size == 1,
        context_parallel_size=layout.cp_size,
        expert_model_parallel_size=layout.ep_size,
        expert_tensor_parallel_size=layout.etp_size,
        sequence_parallel=layout.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=True,
        persist_layer_norm=False,
        masked_softmax_fusion=False,
        recompute_granularity=execution.recompute_granularity,
        recompute_method=execution.recompute_method,
        recompute_num_layers=execution.recompute_num_layers,
        recompute_modules=list(execution.recompute_modules),
        transformer_impl=impl,
        **asdict(fusions_of(impl, execution.gradient_accumulation_fusion)),
        # losses are sums divided by our own denominator: the only form that is the same in every layout
        calculate_per_token_loss=True,
        variable_seq_lengths=True,
        # the default, allgather, refuses variable sequence lengths even for dense models
        moe_token_dispatcher_type="alltoall",
        **({} if shape.moe is None else _moe_config(shape.moe, moe_aux_loss_coeff)),
    )


def _moe_config(moe: MoeShape, aux_loss_coeff: float) -> dict[str, Any]:
    """The router computes in float32: in bfloat16 the same token may go to other experts in training than in the engine."""
    return {
        "num_moe_experts": moe.num_experts,
        "moe_ffn_hidden_size": moe.ffn_hidden_size,
        "moe_router_topk": moe.top_k,
        # weights are probabilities among all experts: the softmax comes before the choice
        "moe_router_pre_softmax": not moe.norm_topk_prob,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "aux_loss" if aux_loss_coeff > 0 else "none",
        "moe_aux_loss_coeff": aux_loss_coeff,
        "moe_enable_routing_replay": True,  # gives each router a seat for expert ids; without any it routes as ever
    }


class ValueHead(torch.nn.Module):
    """hidden -> one value per token, in float32, replicated over TP; stands in for GPTModel.output_layer.

    Under sequence parallelism each rank sees its slice of the tokens: the weight's gradient is partial (summed by name
    of its `sequence_parallel` mark) and the gathered values are the same on all ranks, so that their gradient is split,
    not summed; summing it would multiply the trunk's gradient by the TP size.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=torch.float32))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    @torch.no_grad()
    def start_normal(self, std: float, *, seed: int) -> None:
        """Draw the weight from a normal distribution, the same on every rank and in every layout."""
        drawn = torch.randn(self.weight.shape, generator=torch.Generator().manual_seed(seed))
        self.weight.copy_(std * drawn)

    def forward(
        self, hidden: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, None]:
        """hidden [t, 1, h] -> values [T, 1, 1] of the rank's whole pack; the second result stands for Megatron's bias."""
        values = torch.nn.functional.linear(hidden.float(), self.weight)
        if self.sequence_parallel:
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


def build_chunks(
    shape: ModelShape, config: TransformerConfig, layout: ParallelLayout, *, head: Head, make_vocab_size_divisible_by: int
) -> list[GPTModel]:
    """The stages of the model that lie on this rank, with random weights; `load_hf_weights` fills them."""
    vocab = padded_vocab_size(shape.vocab_size, divisible_by=make_vocab_size_divisible_by, tp_size=layout.tp_size)
    chunks = [_build_chunk(shape, config, stage, head=head, vocab_size=vocab) for stage in _stages(layout)]
    # Megatron lists the routers of all models of the process, and would keep models alive; ours are found in their layers
    RouterReplay.clear_global_router_replay_instances()
    return chunks


def start_value_head(models: Sequence[GPTModel], std: float, *, seed: int) -> None:
    """Draw the value head, where one of the stages has it, from a normal distribution."""
    for model in models:
        if model.post_process and isinstance(model.output_layer, ValueHead):
            model.output_layer.start_normal(std, seed=seed)


@dataclass(frozen=True)
class _Stage:
    """One stage of the pipeline: `vp_stage` is its number on the rank (None without virtual stages)."""

    pp_rank: int
    vp_stage: int | None
    is_first: bool
    is_last: bool


def _stages(layout: ParallelLayout) -> list[_Stage]:
    pp_rank = parallel_state.get_pipeline_model_parallel_rank()
    return [
        _Stage(
            pp_rank=pp_rank,
            vp_stage=vp_stage if layout.vpp_size > 1 else None,
            is_first=pp_rank == 0 and vp_stage == 0,
            is_last=pp_rank == layout.pp_size - 1 and vp_stage == layout.vpp_size - 1,
        )
        for vp_stage in range(layout.vpp_size)
    ]


def _build_chunk(shape: ModelShape, config: TransformerConfig, stage: _Stage, *, head: Head, vocab_size: int) -> GPTModel:
    model = GPTModel(
        config,
        transformer_block_spec(config, vp_stage=stage.vp_stage, pp_rank=stage.pp_rank),
        vocab_size=vocab_size,
        max_sequence_length=shape.max_position_embeddings,
        pre_process=stage.is_first,
        post_process=stage.is_last,
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,
        # a critic has no second use of its embedding
        share_embeddings_and_output_weights=shape.tie_word_embeddings and head == "language_model",
        vp_stage=stage.vp_stage,
    )
    if shape.rope_scaling is not None:  # before the first forward, whose result the module caches
        model.rotary_pos_emb.inv_freq = llama3_frequencies(model.rotary_pos_emb.inv_freq, shape.rope_scaling)
    if head == "value" and stage.is_last:
        model.output_layer = ValueHead(config)
    return model


def converted_parameters(
    models: Sequence[GPTModel], table: ConversionTable, layout: ParallelLayout
) -> list[tuple[Rule, torch.nn.Parameter]]:
    """Every parameter of this rank with its rule, whose Megatron name is that in the whole model."""
    own_experts = table.shape.num_experts // layout.ep_size
    first_expert = own_experts * parallel_state.get_expert_model_parallel_rank()
    return [
        (table.rule(name, _first_layer(model), first_expert), parameter)
        for model in models
        for name, parameter in model.named_parameters()
    ]


def _first_layer(model: GPTModel) -> int:
    """Global number of the model's layer 0."""
    return int(model.decoder.layers[0].layer_number) - 1


@torch.no_grad()
def load_hf_weights(
    models: Sequence[GPTModel],
    table: ConversionTable,
    weights: Mapping[str, torch.Tensor],
    *,
    layout: ParallelLayout,
    source: str,
    keeps_missing_head: bool = False,
) -> None:
    """Fill this rank's shards from the HF tensors. With `keeps_missing_head` a value head that they lack stays as it is.

    Raises ConversionError that lists every missing, unused or mis-shaped tensor, or says that a tied output layer is not.
    """
    is_critic = table.head == "value"
    output_names, head_names = table.family.output_layer.hf, table.family.value_head.hf
    optional: frozenset[str] = frozenset()
    if is_critic:  # its trunk may come from a policy's folder, or from one that brings a head
        optional = frozenset((*output_names, *head_names) if keeps_missing_head else output_names)
    elif table.shape.tie_word_embeddings:  # some folders store the tied output layer again
        optional = frozenset(output_names)
    table.check_hf_names(weights, source=source, optional=optional)
    if not is_critic and optional:
        require_tied(table, weights, source)
    wrong: list[str] = []
    for rule, parameter in converted_parameters(models, table, layout):
        if is_critic and rule.hf == head_names and not weights.keys() >= set(head_names):
            continue
        size, rank = split_place(rule)
        parts = [weights[hf] for hf in rule.hf]
        misshapen = _misshapen(rule, parts, parameter, table.shape, size)
        if misshapen:
            wrong += misshapen
            continue
        local = shard(
            rule.split,
            parts,
            num_query_groups=table.shape.num_query_groups,
            padded_vocab=parameter.shape[0] * size if rule.split is Split.VOCAB else 0,
            tp_size=size,
            tp_rank=rank,
        )
        parameter.copy_(local)
    if wrong:
        raise ConversionError(f"{source} does not have the shapes of its config.json: " + "; ".join(wrong))


def split_place(rule: Rule) -> tuple[int, int]:
    """(ranks that share the rule's parameter, this rank among them)."""
    if rule.per_expert:
        return (
            parallel_state.get_expert_tensor_parallel_world_size(),
            parallel_state.get_expert_tensor_parallel_rank(),
        )
    return parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()


def _misshapen(rule: Rule, parts: Sequence[torch.Tensor], parameter: torch.Tensor, shape: ModelShape, tp_size: int) -> list[str]:
    """HF tensors of the rule that are not as large as this rank's shard says the whole must be."""
    expected = unshard(
        rule.split,
        [torch.empty(parameter.shape, device="meta")] * tp_size,
        num_query_groups=shape.num_query_groups,
        num_heads=shape.num_attention_heads,
        vocab_size=shape.vocab_size,
    )
    return [
        f"{name} is {list(part.shape)}, expected {list(whole.shape)}"
        for name, part, whole in zip(rule.hf, parts, expected, strict=True)
        if part.shape != whole.shape
    ]
