"""What transformer layers are made of; LOCAL runs on any device, spec_te.py has the modules of transformer-engine."""

from dataclasses import dataclass

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig

from slime_ppo.backends.megatron.attention import PackedAttention


class RMSNorm(torch.nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight (Zhang & Sennrich 2019), in float32 inside, cast back before the weight as the
    Hugging Face models do. The weight is marked for sequence parallelism, so that its gradient is summed over TP."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


@dataclass(frozen=True)
class LayerModules:
    """`norm` is that of heads and of the last hidden states. `input_linear` follows attention's and the MLP's `input_norm`, or
    brings a norm of its own where that is IdentityOp."""

    norm: type
    input_norm: type
    input_linear: type
    output_linear: type
    attention: type


LOCAL = LayerModules(
    norm=RMSNorm,
    input_norm=RMSNorm,
    input_linear=ColumnParallelLinear,
    output_linear=RowParallelLinear,
    attention=PackedAttention,
)
