"""The modules of transformer-engine for spec.py. Imported on GPUs only, and only where they are asked for.

A linear that follows a norm is one module with it, so that parameters have other names (conversion/table.py). Packed sequences
need nothing more than what forward.py passes to Megatron: under context parallelism transformer-engine splits each sequence in
the zigzag of parallel/cp_map.py, and sends keys and values around the ring (cp_comm_type p2p, its default).
"""

from megatron.core.extensions.transformer_engine import (
    HAVE_TE,
    TEDotProductAttention,
    TELayerNormColumnParallelLinear,
    TENorm,
    TERowParallelLinear,
)
from megatron.core.transformer.identity_op import IdentityOp

from slime_ppo.backends.megatron.layer_modules import LayerModules
from slime_ppo.errors import ConfigError

if not HAVE_TE:  # Megatron keeps the reason to itself, and makes the classes all the same
    raise ConfigError(
        "--transformer-impl transformer_engine: megatron-core could not import transformer_engine on this rank. Look whether "
        "`import transformer_engine.pytorch` works here and fits this torch, or use --transformer-impl local"
    )

TRANSFORMER_ENGINE = LayerModules(
    norm=TENorm,
    input_norm=IdentityOp,
    input_linear=TELayerNormColumnParallelLinear,
    output_linear=TERowParallelLinear,
    attention=TEDotProductAttention,
)
