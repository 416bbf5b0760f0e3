"""Config -> what the processes of a role are started with. No torch."""

import os
from pathlib import Path

from slime_ppo.config.critic_start import CriticStart
from slime_ppo.config.roles import RoleName
from slime_ppo.config.root import Config
from slime_ppo.config.transformer_impl import chosen_transformer_impl
from slime_ppo.parallel.worker_settings import (
    BatchSettings,
    DeviceKind,
    ExecutionSettings,
    ModelSettings,
    OptimizerSettings,
    RankSettings,
    WorkerSettings,
)


def worker_settings(config: Config, role: RoleName, *, init_method: str, device: DeviceKind) -> list[WorkerSettings]:
    """One entry per rank of the role."""
    one = config.role(role)
    start = CriticStart.of(one.hf_folder) if role == "critic" else CriticStart(Path(one.hf_folder), None)
    keeps_reference = role == "actor" and config.ppo.needs_reference
    model = ModelSettings(
        # a rank's current directory is another one than the driver's on a joined cluster
        hf_folder=os.path.abspath(start.hf_folder),
        checkpoint_folder=None if start.checkpoint is None else os.path.abspath(start.checkpoint),
        init_value_head=config.critic.init_value_head,
        init_value_head_std=config.critic.init_value_head_std,
        ref_folder=os.path.abspath(config.model.ref_folder) if keeps_reference else None,
        dtype=config.model.dtype,
        make_vocab_size_divisible_by=config.model.make_vocab_size_divisible_by,
        fuse_lm_head=config.model.fuse_lm_head,
        fp32_lm_head=config.model.fp32_lm_head,
        transformer_impl=chosen_transformer_impl(config.model, device),
        moe_aux_loss_coeff=config.model.moe_aux_loss_coeff,
    )
    optimizer = OptimizerSettings(
        clip_grad=one.clip_grad,
        weight_decay=one.weight_decay,
        adam_beta1=one.adam_betas[0],
        adam_beta2=one.adam_betas[1],
        adam_eps=one.adam_eps,
    )
    by_tokens = config.batch.use_dynamic_batch_size
    batch = BatchSettings(
        micro_batch_size=None if by_tokens else config.batch.micro_batch_size,
        max_tokens=config.batch.max_tokens_per_gpu if by_tokens else None,
        balance_by=config.batch.balance_by,
    )
    ranks = [
        RankSettings(
            rank=rank,
            init_method=init_method,
            device=device,
            seed=config.run.seed,
            num_threads=config.cluster.num_threads_per_rank,
            deterministic=config.run.deterministic,
            collective_timeout_s=config.cluster.call_timeout_s,
        )
        for rank in range(one.num_ranks)
    ]
    return [
        WorkerSettings(
            rank=rank,
            layout=one.layout,
            model=model,
            optimizer=optimizer,
            batch=batch,
            starts_offloaded=config.offloads,
            execution=_execution(config),
        )
        for rank in ranks
    ]


def _execution(config: Config) -> ExecutionSettings:
    """The same for both roles."""
    recompute, parallel = config.recompute, config.parallel
    return ExecutionSettings(
        recompute_granularity=recompute.recompute_granularity,
        recompute_method=recompute.recompute_method,
        recompute_num_layers=recompute.recompute_num_layers,
        recompute_modules=recompute.modules,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
        gradient_accumulation_fusion=parallel.gradient_accumulation_fusion,
    )
