"""Process groups, parallel state, seeds and threads of one rank."""

import datetime
import os

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from slime_ppo.backends.megatron.device import collective_backend, prepare_megatron
from slime_ppo.errors import ParallelError
from slime_ppo.parallel.layout import ParallelLayout
from slime_ppo.parallel.worker_settings import STANDING_GROUP, DeviceKind, RankSettings

_STORE_SCHEME = "store://"


def init_rank(settings: RankSettings, layout: ParallelLayout) -> torch.device:
    """Join the role's process group and build Megatron's parallel state. Every rank of the role calls it once."""
    prepare_megatron(settings.device)
    torch.set_num_threads(settings.num_threads)
    if settings.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS refuses deterministic mode without it
        torch.use_deterministic_algorithms(True)
    if settings.device == "cuda":
        _take_only_device(settings.rank)
    os.environ.update(RANK=str(settings.rank), WORLD_SIZE=str(layout.num_ranks), LOCAL_RANK="0")  # read by megatron-core
    if settings.init_method != STANDING_GROUP:
        _join(settings, layout.num_ranks)
    init_parallel_state(layout, settings.seed, timeout_s=settings.collective_timeout_s)
    return torch.device(settings.device)


def _take_only_device(rank: int) -> None:
    """The launcher leaves one visible GPU to each rank. Raises ParallelError when there was none to leave."""
    if torch.cuda.device_count() == 0:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
        raise ParallelError(
            f"rank {rank} computes on a GPU and sees none (CUDA_VISIBLE_DEVICES is {visible}): its node has fewer GPUs "
            "than ranks, or this torch has no CUDA. Start one rank per GPU, or use --device cpu"
        )
    torch.cuda.set_device(0)


def join_process_group(store: Store, *, rank: int, num_ranks: int, device: DeviceKind, timeout_s: float) -> None:
    """Join the process group that all roles of this process will share (STANDING_GROUP). Every rank calls it once."""
    timeout = datetime.timedelta(seconds=timeout_s)
    dist.init_process_group(collective_backend(device), store=store, rank=rank, world_size=num_ranks, timeout=timeout)


def serve_store(host: str) -> tuple[TCPStore, str]:
    """A store on a free port of this node, and the init_method by which the ranks of a role meet there.

    The port is held from the moment it is chosen: a port that is only looked up can be taken before the ranks are up.
    Keep the store as long as the process group lives.
    """
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
    return store, f"{_STORE_SCHEME}{host}:{store.port}"


def _join(settings: RankSettings, world_size: int) -> None:
    timeout = datetime.timedelta(seconds=settings.collective_timeout_s)
    backend = collective_backend(settings.device)
    if not settings.init_method.startswith(_STORE_SCHEME):
        dist.init_process_group(
            backend, init_method=settings.init_method, rank=settings.rank, world_size=world_size, timeout=timeout
        )
        return
    host, port = settings.init_method.removeprefix(_STORE_SCHEME).rsplit(":", 1)
    store = TCPStore(host, int(port), world_size, is_master=False, timeout=timeout)
    dist.init_process_group(backend, store=store, rank=settings.rank, world_size=world_size, timeout=timeout)


def init_parallel_state(layout: ParallelLayout, seed: int, *, timeout_s: float) -> None:
    """Megatron's groups for `layout` within the process group that stands, with a timeout of their own, and its random streams.

    A second role of the same process shares the groups of the first. Raises ParallelError when it has another layout.
    """
    from megatron.core import parallel_state, tensor_parallel

    if parallel_state.model_parallel_is_initialized():
        _check_shared(layout)
    else:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp_size,
            pipeline_model_parallel_size=layout.pp_size,
            virtual_pipeline_model_parallel_size=layout.vpp_size if layout.vpp_size > 1 else None,
            context_parallel_size=layout.cp_size,
            expert_model_parallel_size=layout.ep_size,
            expert_tensor_parallel_size=layout.etp_size,
            create_gloo_process_groups=False,
            distributed_timeout_minutes=timeout_s / 60,
        )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    torch.manual_seed(seed)


def _check_shared(layout: ParallelLayout) -> None:
    from megatron.core import parallel_state

    for what, found, asked in (
        ("ranks", dist.get_world_size(), layout.num_ranks),
        ("ranks per tensor-parallel group", parallel_state.get_tensor_model_parallel_world_size(), layout.tp_size),
        ("ranks per context-parallel group", parallel_state.get_context_parallel_world_size(), layout.cp_size),
        ("pipeline stages", parallel_state.get_pipeline_model_parallel_world_size(), layout.pp_size),
        ("virtual stages per rank", parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1, layout.vpp_size),
        ("ranks per expert-parallel group", parallel_state.get_expert_model_parallel_world_size(), layout.ep_size),
        ("ranks per expert", parallel_state.get_expert_tensor_parallel_world_size(), layout.etp_size),
    ):
        if found != asked:
            raise ParallelError(
                f"a role asks for {asked} {what}, the process it shares with another role has {found}: roles of one process must "
                "have equal layouts"
            )
