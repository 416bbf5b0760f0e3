"""Small reductions over the data-parallel ranks of a role."""

from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state

Shared = TypeVar("Shared")


def data_parallel_group() -> dist.ProcessGroup | None:
    """Ranks that hold different samples (and, under context parallelism, different tokens); None when there is one."""
    group: dist.ProcessGroup = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return group if group.size() > 1 else None


def tensor_parallel_group() -> dist.ProcessGroup | None:
    """Ranks that hold shards of the same vocabulary; None when there is one."""
    group: dist.ProcessGroup = parallel_state.get_tensor_model_parallel_group()
    return group if group.size() > 1 else None


def gather_over_data_parallel(value: Shared) -> list[Shared]:
    """The small object of every data-parallel rank, in rank order. Collective."""
    group = data_parallel_group()
    if group is None:
        return [value]
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def sum_over_data_parallel(values: list[float], device: torch.device) -> list[float]:
    """Element-wise float64 sums. Collective."""
    group = data_parallel_group()
    if group is None:
        return values
    total = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(total, group=group)
    summed: list[float] = total.tolist()
    return summed
