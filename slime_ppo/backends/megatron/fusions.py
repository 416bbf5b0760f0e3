"""Which of Megatron's fused kernels a run uses."""

import importlib.util
from dataclasses import dataclass, replace

from slime_ppo.parallel.worker_settings import TransformerImpl


@dataclass(frozen=True)
class Fusions:
    """Fields of Megatron's TransformerConfig, all off: plain operations, the same ones on every device."""

    apply_rope_fusion: bool = False
    bias_activation_fusion: bool = False
    bias_dropout_fusion: bool = False
    gradient_accumulation_fusion: bool = False


def fusions_of(impl: TransformerImpl, gradient_accumulation: bool | None = None) -> Fusions:
    """None for local layers; for those of transformer-engine all that this environment has kernels for.

    `gradient_accumulation` True or False is what the user has said about that one kernel, for either kind of layers.
    """
    fusions = Fusions() if impl == "local" else _of_transformer_engine()
    if gradient_accumulation is None:
        return fusions
    return replace(fusions, gradient_accumulation_fusion=gradient_accumulation)


def _of_transformer_engine() -> Fusions:
    return Fusions(
        apply_rope_fusion=True,
        bias_activation_fusion=True,
        bias_dropout_fusion=True,
        # the output layer is Megatron's own linear, which refuses it without this extension of apex
        gradient_accumulation_fusion=importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None,
    )
