"""Process groups, parallel state, seeds and threads of one rank."""

import datetime
import os

import torch
import torch.distributed as dist

from slime_ppo.backends.megatron.device import collective_backend, prepare_megatron
from slime_ppo.parallel.layout import ParallelLayout
from slime_ppo.parallel.worker_settings import RankSettings


def init_rank(settings: RankSettings, layout: ParallelLayout) -> torch.device:
    """Join the role's process group and build Megatron's parallel state. Every rank of the role calls it once."""
    prepare_megatron(settings.device)
    torch.set_num_threads(settings.num_threads)
    if settings.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS refuses deterministic mode without it
        torch.use_deterministic_algorithms(True)
    if settings.device == "cuda":
        torch.cuda.set_device(0)  # the launcher leaves one visible device to each rank
    os.environ.update(RANK=str(settings.rank), WORLD_SIZE=str(layout.num_ranks), LOCAL_RANK="0")  # read by megatron-core
    dist.init_process_group(
        collective_backend(settings.device),
        init_method=settings.init_method,
        rank=settings.rank,
        world_size=layout.num_ranks,
        timeout=datetime.timedelta(seconds=settings.collective_timeout_s),
    )
    init_parallel_state(layout, settings.seed)
    return torch.device(settings.device)


def init_parallel_state(layout: ParallelLayout, seed: int) -> None:
    """Megatron's groups for `layout` within the process group that stands, and its random streams."""
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=layout.tp_size, create_gloo_process_groups=False)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    torch.manual_seed(seed)
