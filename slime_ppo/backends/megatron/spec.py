"""The layer spec, for whatever modules the layers are made of."""

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from slime_ppo.backends.megatron.layer_modules import LOCAL, LayerModules
from slime_ppo.backends.megatron.mixture import Router
from slime_ppo.parallel.worker_settings import TransformerImpl


def layer_modules(impl: TransformerImpl) -> LayerModules:
    """Those of --transformer-impl. transformer-engine is imported only when it is asked for."""
    if impl == "local":
        return LOCAL
    from slime_ppo.backends.megatron.spec_te import TRANSFORMER_ENGINE

    return TRANSFORMER_ENGINE


def transformer_block_spec(config: TransformerConfig, *, vp_stage: int | None, pp_rank: int) -> TransformerBlockSubmodules:
    """The layers of one pipeline stage, with our own choice of final norm (Megatron's refuses sequence parallelism where
    transformer-engine is missing)."""
    modules = layer_modules(config.transformer_impl)
    num_layers = get_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=pp_rank)
    return TransformerBlockSubmodules(layer_specs=[_layer_spec(config, modules)] * num_layers, layer_norm=modules.norm)


def _layer_spec(config: TransformerConfig, modules: LayerModules) -> ModuleSpec:
    head_norm = modules.norm if config.qk_layernorm else IdentityOp
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=modules.input_linear,
            core_attention=modules.attention,
            linear_proj=modules.output_linear,
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=modules.input_norm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            # a fused norm is that of the MLP's first linear; a router has none
            pre_mlp_layernorm=modules.input_norm if config.num_moe_experts is None else modules.norm,
            mlp=_mlp_spec(config, modules),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _mlp_spec(config: TransformerConfig, modules: LayerModules) -> ModuleSpec:
    """The MLP, or a router and this rank's experts, each an MLP of Megatron's own linears that runs after the other."""
    if config.num_moe_experts is None:
        linears = MLPSubmodules(linear_fc1=modules.input_linear, linear_fc2=modules.output_linear)
        return ModuleSpec(module=MLP, submodules=linears)
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    experts = ModuleSpec(module=SequentialMLP, submodules=linears)
    return ModuleSpec(module=MoELayer, submodules=MoESubmodules(experts=experts, router=Router))
