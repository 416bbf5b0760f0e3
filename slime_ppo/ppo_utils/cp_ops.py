"""Per-token columns that are split over context-parallel ranks: whole again, cut again, summed per sample.

Shapes: S samples, N response tokens of all of them, n of them on this rank, W ranks of the group. Which token is whose is
asked of the map (parallel/cp_map.py), never worked out from a rank number.
"""

from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from slime_ppo.errors import ParallelError
from slime_ppo.parallel.cp_map import CpMap
from slime_ppo.ppo_utils.packed import segment_sum


@dataclass(frozen=True, eq=False)
class ContextShard:
    """This rank's share of the response tokens of a batch.

    `index` int64 [n]: its tokens among the N; `lens` int64 [S]: how many of each sample; `last_rows` int64: the samples whose
    last position it holds; `width`: the largest share of any rank; `source` int64 [N]: where a token stands when the
    shares of all ranks, each filled up to `width`, are laid one after the other.
    """

    index: Tensor
    lens: Tensor
    last_rows: Tensor
    width: int
    source: Tensor
    group: dist.ProcessGroup | None

    @staticmethod
    def of(cp_map: CpMap, group: dist.ProcessGroup | None, *, device: torch.device | str = "cpu") -> "ContextShard":
        """The share of this rank of `group` (None: the only rank). No collective.

        Raises ParallelError when the group has another size than the map.
        """
        rank, world = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        if world != cp_map.cp_size:
            raise ParallelError(
                f"the context-parallel group has {world} ranks, but the map splits over {cp_map.cp_size}; "
                "make the map with the size of the group"
            )
        return ContextShard.of_rank(cp_map, rank, group=group, device=device)

    @staticmethod
    def of_rank(cp_map: CpMap, rank: int, *, group: dist.ProcessGroup | None, device: torch.device | str = "cpu") -> "ContextShard":
        """The share of `rank`; without a group, what needs no other rank can be asked of any of them."""
        shares = [cp_map.response_index(other) for other in range(cp_map.cp_size)]
        width = max(len(share) for share in shares)
        source = np.empty(cp_map.num_response_tokens, np.int64)
        for other, share in enumerate(shares):
            source[share] = other * width + np.arange(len(share))
        index, lens, last_rows, source_of = (
            torch.tensor(x, dtype=torch.int64, device=device)
            for x in (shares[rank], cp_map.local_lens(rank), cp_map.last_positions(rank).rows, source)
        )
        return ContextShard(index=index, lens=lens, last_rows=last_rows, width=width, source=source_of, group=group)

    @torch.no_grad()
    def gather(self, *columns: Tensor) -> list[Tensor]:
        """Each column [n] of this rank as [N], the same on every rank, without gradient.

        One all-gather for the whole batch and all columns, which every rank of the group calls, one with no token too; none
        when the batch has no token. Columns are floating point. Raises ParallelError on another length.
        """
        for column in columns:
            if column.shape != self.index.shape or not column.is_floating_point():
                raise ParallelError(
                    f"a column to gather has shape {tuple(column.shape)} and type {column.dtype}; expected floating-point numbers "
                    f"of the {len(self.index)} response tokens that this context-parallel rank owns"
                )
        if self.group is None or self.width == 0:
            return [column.detach()[self.source] for column in columns]
        dtype = reduce(torch.promote_types, (column.dtype for column in columns))
        part = torch.zeros((len(columns), self.width), dtype=dtype, device=self.index.device)
        for row, column in zip(part, columns, strict=True):
            row[: len(column)] = column
        world = dist.get_world_size(self.group)
        whole = part.new_empty((world * len(columns), self.width))
        dist.all_gather_into_tensor(whole, part, group=self.group)
        by_column = whole.view(world, len(columns), self.width).transpose(0, 1).reshape(len(columns), -1)
        return [row[self.source].to(column.dtype) for row, column in zip(by_column, columns, strict=True)]

    def take(self, x: Tensor) -> Tensor:
        """The entries [n] of `x` [N] that belong to this rank. Raises ParallelError on another length."""
        if x.shape != self.source.shape:
            raise ParallelError(
                f"a column to take from has shape {tuple(x.shape)}; expected one entry for each of the {len(self.source)} "
                "response tokens of the batch, over all context-parallel ranks"
            )
        return x[self.index]

    @torch.no_grad()
    def share_last(self, x: Tensor) -> Tensor:
        """`x` [S] of a sample as its owner has it, the same on every rank; entries of other samples are not looked at.

        For what is read at the last position of a sample, as the value that bootstraps. One all-reduce of S numbers.
        """
        own = torch.zeros_like(x)
        own[self.last_rows] = x.detach()[self.last_rows]
        return _summed(own, self.group)


def sample_sums(x: Tensor, lens: Tensor, cp_group: dist.ProcessGroup | None) -> Tensor:
    """Sum of each sample's entries [S] over all ranks of `cp_group`, from `x` [n] and `lens` [S] of this rank. Differentiable.

    Accumulated in float64, given back in the dtype of `x`. A sample's sum enters the loss of every rank that holds one of its
    tokens, so the gradient of `x` is the sum of the upstream gradients of all ranks: one all-reduce of S numbers forward and
    one backward. Every rank of the group runs both, one that holds no token too. None = plain sums, no collective.
    """
    sums = segment_sum(x.double(), lens)
    if cp_group is not None:
        sums = _AllReducedSum.apply(sums, cp_group)  # type: ignore[no-untyped-call]
    return sums.to(x.dtype)


class _AllReducedSum(torch.autograd.Function):
    """y = sum over ranks of x; with L = sum over ranks of their losses, dL/dx = sum over ranks of dL/dy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _summed(x.clone(), group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _summed(gradients[0].clone(memory_format=torch.contiguous_format), ctx.group), None


def _summed(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """`x` summed over the group, in place. An empty one, which is empty on every rank, is not sent."""
    if group is not None and x.numel() > 0:
        dist.all_reduce(x, group=group)
    return x
