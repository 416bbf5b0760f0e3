"""What each rank runs to measure the memory of roles: it builds them, takes one optimizer step, and counts storages."""

from collections.abc import Mapping
from typing import Literal

import torch.distributed as dist

from slime_ppo.backends.megatron.device import prepare_megatron

prepare_megatron("cpu")

from slime_ppo.backends.megatron.role import MegatronRole  # noqa: E402
from slime_ppo.config.resident_memory import ResidentBytes  # noqa: E402
from slime_ppo.conversion.table import Head  # noqa: E402
from slime_ppo.parallel.layout import ParallelLayout  # noqa: E402
from slime_ppo.parallel.worker_settings import (  # noqa: E402
    STANDING_GROUP,
    BatchSettings,
    ModelSettings,
    OptimizerSettings,
    RankSettings,
    WorkerSettings,
)


def measure(
    layout: ParallelLayout,
    roles: Mapping[str, tuple[str, Head]],
    dtype: Literal["float32", "bfloat16"],
    divisible_by: int,
    *,
    fp32_lm_head: bool,
) -> dict[str, ResidentBytes]:
    """Bytes by part of each role after a step; `roles` are HF folders and heads by label. Collective over the layout's ranks."""
    measured = {}
    for label, (folder, head) in roles.items():
        settings = WorkerSettings(
            rank=RankSettings(
                rank=dist.get_rank(),
                init_method=STANDING_GROUP,
                device="cpu",
                seed=1,
                num_threads=1,
                deterministic=True,
                collective_timeout_s=60.0,
            ),
            layout=layout,
            model=ModelSettings(
                hf_folder=folder,
                ref_folder=None,
                dtype=dtype,
                make_vocab_size_divisible_by=divisible_by,
                fp32_lm_head=fp32_lm_head and head == "language_model",
                init_value_head="zeros",
            ),
            optimizer=OptimizerSettings(clip_grad=1.0, weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.95, adam_eps=1e-8),
            batch=BatchSettings(micro_batch_size=1, max_tokens=None),
        )
        role = MegatronRole(settings, head)
        for chunk in role.chunks:
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                buffer.grad_data.fill_(1e-3)
        if not role.apply(1e-4).stepped:
            raise RuntimeError(f"{label}: the optimizer skipped a step of finite gradients")
        measured[label] = role.memory.bytes_by_part()
    return measured
