"""Which of Megatron's fused kernels a run uses."""

import importlib.util
from dataclasses import dataclass

from slime_ppo.parallel.worker_settings import TransformerImpl


@dataclass(frozen=True)
class Fusions:
    """Fields of Megatron's TransformerConfig, all off: plain operations, the same ones on every device."""

    apply_rope_fusion: bool = False
    bias_activation_fusion: bool = False
    bias_dropout_fusion: bool = False
    gradient_accumulation_fusion: bool = False


def fusions_of(impl: TransformerImpl) -> Fusions:
    """None for local layers; for those of transformer-engine all that this environment has kernels for."""
    if impl == "local":
        return Fusions()
    return Fusions(
        apply_rope_fusion=True,
        bias_activation_fusion=True,
        bias_dropout_fusion=True,
        # the output layer is Megatron's own linear, which refuses it without this extension of apex
        gradient_accumulation_fusion=importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None,
    )
