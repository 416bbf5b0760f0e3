"""Hidden states for a language-model head whose vocabulary is split over ranks, and the way back of their gradient.

Shapes: T states of the pack, N scored ones, H hidden size, W ranks of the group.

Every rank multiplies all T states by its own rows of the weight, so that the gradient of a state is a sum over the ranks.
Two layouts (Korthikanti et al., "Reducing activation recomputation in large transformer models" (2022), section 4.2.2):

    states          held by           forward       backward
    [T, H]          every rank        nothing       all-reduce
    [T / W, H]      rank r, slice r   all-gather    reduce-scatter      (sequence parallelism)
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _SameStates(torch.autograd.Function):
    """Identity; the gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        # autograd may hold the same tensor elsewhere, and the reduction is in place
        total = grad.clone(memory_format=torch.contiguous_format)
        if total.numel():
            dist.all_reduce(total, group=ctx.group)
        return total, None


class _GatheredStates(torch.autograd.Function):
    """The slices of all ranks in rank order; each rank gets back the sum over the ranks of its slice's gradient."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        whole = hidden.new_empty((dist.get_world_size(group) * hidden.shape[0], *hidden.shape[1:]))
        if whole.numel():
            dist.all_gather_into_tensor(whole, hidden.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        own = grad.new_empty((grad.shape[0] // dist.get_world_size(ctx.group), *grad.shape[1:]))
        if own.numel():
            dist.reduce_scatter_tensor(own, grad.contiguous(), group=ctx.group)
        return own, None


def scored_states(hidden: Tensor, positions: Tensor | None, *, group: dist.ProcessGroup | None, sequence_parallel: bool) -> Tensor:
    """The states [N, H] at `positions` int64 [N] of the whole pack (None: all T), the same on every rank of `group`.

    `hidden` is [T, H] on every rank, or with `sequence_parallel` this rank's [T / W, H], equally many on each. Collectives as
    in the table above: one forward with sequence parallelism, else none; one backward, where the gradient is summed in
    the dtype of the states. None of both without a group. All ranks call it, with the same positions, and `hidden` requires
    grad on all of them or on none: a rank without would leave the others waiting in the backward pass.
    """
    if group is None:
        states = hidden
    elif sequence_parallel:
        states = _GatheredStates.apply(hidden, group)  # type: ignore[no-untyped-call]
    elif positions is not None:  # what is not scored has no gradient to sum
        return _SameStates.apply(hidden.index_select(0, positions), group)  # type: ignore[no-untyped-call, no-any-return]
    else:
        states = _SameStates.apply(hidden, group)  # type: ignore[no-untyped-call]
    return states if positions is None else states.index_select(0, positions)
