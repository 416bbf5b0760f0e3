"""DDP, the distributed optimizer, and one optimizer step with our rules for skipping."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from slime_ppo.parallel.worker_settings import ExecutionSettings, OptimizerSettings


@dataclass(frozen=True)
class StepOutcome:
    """`grad_norm` is the norm before clipping; `stepped` is False when it was not finite and nothing was changed."""

    grad_norm: float
    stepped: bool


def wrap_chunks(
    models: Sequence[GPTModel], config: TransformerConfig, execution: ExecutionSettings
) -> list[DistributedDataParallel]:
    """Float16Module where the parameters are bf16, then DDP whose gradients are sums over data- and context-parallel ranks."""
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=execution.overlap_grad_reduce,
        overlap_param_gather=execution.overlap_param_gather,
    )
    chunks = [DistributedDataParallel(config, ddp_config, _in_its_dtype(model, config)) for model in models]

    def finalize(chunk_list: list[torch.nn.Module], num_tokens: torch.Tensor | None = None, **kwargs: object) -> None:
        # the loss is already divided by the step's denominator: Megatron must not divide by its token count
        finalize_model_grads(chunk_list, None, **kwargs)

    config.finalize_model_grads_func = finalize
    if execution.overlap_grad_reduce:  # or the gradients of a step's first micro-batch would be sent, and the others missed
        no_sync = [chunk.no_sync for chunk in chunks]
        config.no_sync_func = no_sync if len(chunks) > 1 else no_sync[0]
    return chunks


def _in_its_dtype(model: GPTModel, config: TransformerConfig) -> torch.nn.Module:
    """Float16Module casts all it finds; what was built in float32 (a value head, a wide output layer) keeps its numbers."""
    wide = [(parameter, parameter.data) for parameter in model.parameters() if parameter.dtype == torch.float32]
    module: torch.nn.Module = Float16Module(config, model) if config.bf16 else model
    for parameter, values in wide:
        parameter.data = values
    return module


def build_optimizer(
    chunks: Sequence[DistributedDataParallel], settings: OptimizerSettings, *, bf16: bool, overlap_param_gather: bool = False
) -> ChainedOptimizer:
    """Adam with state sharded over the data- and context-parallel ranks. Weight decay leaves out vectors (norm weights), which is
    Megatron's rule."""
    config = OptimizerConfig(
        optimizer="adam",
        lr=0.0,
        min_lr=0.0,
        weight_decay=settings.weight_decay,
        clip_grad=settings.clip_grad,
        adam_beta1=settings.adam_beta1,
        adam_beta2=settings.adam_beta2,
        adam_eps=settings.adam_eps,
        use_distributed_optimizer=True,
        bf16=bf16,
        overlap_param_gather=overlap_param_gather,
    )
    optimizer = get_megatron_optimizer(config, list(chunks), use_gloo_process_groups=False)
    for group in optimizer.param_groups:
        # Megatron leaves this product to its own LR scheduler, which we do not use
        group["weight_decay"] = settings.weight_decay * group["wd_mult"]
    return optimizer


def zero_gradients(chunks: Sequence[DistributedDataParallel], optimizer: ChainedOptimizer) -> None:
    """Clear the gradient buffers and what the optimizer keeps of them (Megatron adds to both)."""
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()


@torch.no_grad()
def apply_gradients(optimizer: ChainedOptimizer, *, lr: float, clip_grad: float) -> StepOutcome:
    """Clip by the global norm and update, unless the norm is not finite; all ranks of the role decide alike.

    `clip_grad` 0 turns clipping off.
    """
    found_inf = optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    if found_inf or not math.isfinite(norm):
        return StepOutcome(norm, stepped=False)
    for part in optimizer.chained_optimizers:
        parameters = part.get_parameters()
        if clip_grad > 0 and parameters:
            clip_grad_by_total_norm_fp32(parameters, max_norm=clip_grad, total_norm=norm)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step_with_ready_grads()
    return StepOutcome(norm, stepped=True)


def complete_parameters(chunks: Sequence[DistributedDataParallel]) -> None:
    """Gather what the other ranks have updated, where that is left to the next forward pass (overlap_param_gather). Collective.

    Until then a rank has new values in its own shard alone: nothing but a step may read, copy or replace the parameters.
    """
    for chunk in chunks:
        if chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)
