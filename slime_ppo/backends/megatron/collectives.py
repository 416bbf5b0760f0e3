"""The groups of a role's ranks, and small reductions over them.

A pass without gradients ends with whole samples: what is made of its columns is shared out over the data-parallel ranks, and the
same on all context-parallel ranks. A training step sees tokens: each is on one rank of data x context parallel. Only the last
stage of a pipeline sees the model's output; what the other stages need of it comes from there.
"""

from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state

Shared = TypeVar("Shared")


def data_parallel_group() -> dist.ProcessGroup | None:
    """Ranks that hold different samples; None when there is one."""
    return _unless_alone(parallel_state.get_data_parallel_group())


def token_parallel_group() -> dist.ProcessGroup | None:
    """Ranks that hold different tokens, data x context parallel; None when there is one."""
    return _unless_alone(parallel_state.get_data_parallel_group(with_context_parallel=True))


def context_parallel_group() -> dist.ProcessGroup | None:
    """Ranks that hold different tokens of the same samples; None when there is one."""
    return _unless_alone(parallel_state.get_context_parallel_group())


def tensor_parallel_group() -> dist.ProcessGroup | None:
    """Ranks that hold shards of the same vocabulary; None when there is one."""
    return _unless_alone(parallel_state.get_tensor_model_parallel_group())


def from_last_stage(value: Shared) -> Shared:
    """The small object of the last pipeline stage, on every stage. Collective over the stages."""
    group = _unless_alone(parallel_state.get_pipeline_model_parallel_group())
    if group is None:
        return value
    values: list[Any] = [value]
    dist.broadcast_object_list(values, group=group, group_src=group.size() - 1)
    shared: Shared = values[0]
    return shared


def _unless_alone(group: dist.ProcessGroup) -> dist.ProcessGroup | None:
    return group if group.size() > 1 else None


def gather_objects(value: Shared, group: dist.ProcessGroup | None) -> list[Shared]:
    """The small object of every rank of the group, in rank order. Collective."""
    if group is None:
        return [value]
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def sum_numbers(values: list[float], device: torch.device, group: dist.ProcessGroup | None) -> list[float]:
    """Element-wise float64 sums over the group. Collective."""
    if group is None:
        return values
    total = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(total, group=group)
    summed: list[float] = total.tolist()
    return summed
