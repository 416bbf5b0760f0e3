"""The lm-head cut into blocks: a block of logits is made, used and dropped, forward and again backward.

Shapes: N states, H hidden size, v rows of the weight on this rank, n x c one block of logits, B blocks of the vocabulary.

    x = h W^T,   d loss / d h = g W,   d loss / d W = g^T h,   g = d loss / d x

Each of the three is one matmul unit, 2 N H v operations. A block of x is made from some rows of h and of W; vocab_rows.py says
what is computed from it. Products of blocks and their sums are kept in float32 (float64 for float64 states) and rounded once,
so that they are no worse than one long matmul. Autocast has no say here: it would make the logits of the forward pass, but
not those that the backward pass makes again, in a dtype other than the plan's. Nothing here talks to other ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from slime_ppo.ppo_utils.vocab_parallel import EntropyMode, VocabShard, arithmetic_dtype, row_statistics

# Made of a block of logits [n, c], which it may overwrite, of the states in the slice and the vocabulary of the shard.
BlockFunction = Callable[[Tensor, slice, VocabShard], Tensor]

# Stands for log 0 where it is multiplied by a probability of 0: -inf * 0 is NaN.
_LOG_ZERO = -1e30


@dataclass(frozen=True)
class VocabBlock:
    """Some columns of the vocabulary: where they lie in this rank's weight, and the shard they are by themselves."""

    columns: slice
    shard: VocabShard


@dataclass(frozen=True)
class BlockPlan:
    """Logits exist `rows` x `columns` at a time, or `held_rows` x v where they wait for the gradient of their row; matmuls
    are done in `dtype`."""

    rows: int
    columns: int
    held_rows: int
    dtype: torch.dtype

    @staticmethod
    def of(hidden: Tensor) -> "BlockPlan":
        """What suits the device: on a CPU, blocks that stay in its last cache; else blocks that fill the device.

        A CPU without instructions for bfloat16 multiplies it a hundred times slower than float32 of twice the size; there
        the operands are converted, block by block, which makes the result more exact as well.
        """
        if hidden.device.type != "cpu":
            return BlockPlan(rows=2048, columns=8192, held_rows=1024, dtype=hidden.dtype)
        dtype = hidden.dtype if _multiplies(hidden.dtype) else torch.float32
        return BlockPlan(rows=256, columns=4096, held_rows=128, dtype=dtype)

    def row_blocks(self, num_rows: int) -> list[slice]:
        """Slices of the states; one that is empty when there are none."""
        return _slices(num_rows, self.rows)

    def held_row_blocks(self, num_rows: int) -> list[slice]:
        """The same, of the rows whose logits are held."""
        return _slices(num_rows, self.held_rows)

    def vocab_blocks(self, shard: VocabShard) -> list[VocabBlock]:
        """The real columns of this rank, cut; when it holds padding only, one column of that (see `weight_block`)."""
        if shard.num_real == 0:
            return [VocabBlock(slice(0, 1), shard)]
        blocks = []
        for start in range(0, shard.num_real, self.columns):
            stop = min(start + self.columns, shard.num_real)
            blocks.append(VocabBlock(slice(start, stop), VocabShard(shard.start + start, stop - start, None)))
        return blocks

    def weight_block(self, weight: Tensor, block: VocabBlock) -> Tensor:
        """Rows of the weight [v, H] that make the block's logits; for padding zeros, which weigh nothing whatever it holds."""
        rows = weight[block.columns].to(self.dtype)
        return rows if block.shard.num_real else torch.zeros_like(rows)


def _slices(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, max(length, 1), size)]


def _multiplies(dtype: torch.dtype) -> bool:
    """Whether this CPU has instructions to multiply matrices of `dtype`."""
    if dtype == torch.bfloat16:
        capabilities = torch.cpu.get_capabilities()
        return any(name in capabilities and bool(capabilities[name]) for name in ("avx512_bf16", "amx_bf16"))
    return dtype != torch.float16


@dataclass(frozen=True)
class BlockSoftmax:
    """What every pass over the logits of one call shares; `labels` [N]."""

    labels: Tensor
    shard: VocabShard
    plan: BlockPlan
    temperature: float
    entropy: EntropyMode

    def statistics(self, x: Tensor, rows: slice, shard: VocabShard) -> Tensor:
        """(m, s, t, x_y) [n, 4] of a block of logits (vocab_rows.py)."""
        with_entropy = self.entropy != "none"
        return row_statistics(x, self.labels[rows], shard, temperature=self.temperature, with_entropy=with_entropy)


def merge_statistics(parts: Tensor, *, temperature: float) -> Tensor:
    """Statistics (m, s, t, x_y) [N, 4] of rows from those of the blocks [B, N, 4] their columns lie in (vocab_rows.py)."""
    tops, sums, weighted, labels = parts.unbind(-1)
    top = tops.amax(0)
    # -inf - -inf of a row without weight would be NaN
    shift = ((tops - torch.where(top == float("-inf"), 0.0, top)) / temperature).clamp(min=_LOG_ZERO)
    scale = shift.exp()
    return torch.stack([top, (sums * scale).sum(0), ((weighted + sums * shift) * scale).sum(0), labels.amax(0)], -1)


def block_statistics(hidden: Tensor, weight: Tensor, shard: VocabShard, plan: BlockPlan, statistics: BlockFunction) -> Tensor:
    """What `statistics` makes of each block of logits, [n, k], as [B, N, k]. 1 matmul unit; one block exists at a time."""
    states, row_blocks = hidden.to(plan.dtype), plan.row_blocks(len(hidden))
    parts = []
    with without_autocast(hidden):
        for block in plan.vocab_blocks(shard):
            part = plan.weight_block(weight, block)
            parts.append(torch.cat([statistics(states[rows] @ part.t(), rows, block.shard) for rows in row_blocks]))
    return torch.stack(parts)


def block_gradients(
    hidden: Tensor, weight: Tensor, shard: VocabShard, plan: BlockPlan, gradient: BlockFunction, *, needed: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of the states [N, H] and of this rank's weight [v, H], each None unless `needed`; padding rows get 0.

    `gradient` gives that of each block of logits. 3 matmul units, the first to make the logits again; one block of them
    exists at a time, and one block of the weight's rows in the dtype of the sum.
    """
    states, dtype = hidden.to(plan.dtype), arithmetic_dtype(hidden)
    d_hidden = torch.zeros_like(hidden, dtype=dtype) if needed[0] else None
    d_weight = torch.empty_like(weight) if needed[1] else None
    for block in plan.vocab_blocks(shard):
        part = plan.weight_block(weight, block)
        total = None if d_weight is None else d_weight[block.columns].to(dtype)
        for rows in plan.row_blocks(len(hidden)):
            with without_autocast(hidden):
                grad = gradient(states[rows] @ part.t(), rows, block.shard)
            if d_hidden is not None:
                add_product(d_hidden[rows], grad, part)
            if total is not None:
                add_product(total, grad.t(), states[rows], first=rows.start == 0)
        if d_weight is not None and total is not None and total.dtype != weight.dtype:
            d_weight[block.columns] = total
    if d_weight is not None:
        d_weight[shard.num_real :] = 0
    return None if d_hidden is None else d_hidden.to(hidden.dtype), d_weight


def add_product(total: Tensor, left: Tensor, right: Tensor, *, first: bool = False) -> None:
    """total += left @ right, in place, the product rounded to the dtype of `total` only; the `first` replaces what is there."""
    with without_autocast(total):
        if total.dtype == left.dtype:
            total.addmm_(left, right, beta=0 if first else 1)
        elif torch.promote_types(total.dtype, left.dtype) == left.dtype:  # a narrow total: multiplied and added wide, rounded once
            total.copy_(left @ right if first else total.to(left.dtype).addmm_(left, right))
        elif total.is_cuda:
            product = torch.mm(left, right, out_dtype=total.dtype)
            total.copy_(product) if first else total.add_(product)
        else:
            total.addmm_(left.to(total.dtype), right.to(total.dtype), beta=0 if first else 1)


def without_autocast(on: Tensor) -> torch.autocast:
    """A context in which matmuls on the tensor's device are done in the dtype of their operands."""
    return torch.autocast(on.device.type, enabled=False)


def without_unused(states: Tensor, *grads: Tensor | None) -> Tensor:
    """`states` [N, H], 0 where no gradient [N] from upstream uses them: a NaN there would reach the weight's as 0 * NaN."""
    used = torch.zeros(len(states), dtype=torch.bool, device=states.device)
    for grad in grads:
        used = used if grad is None else used | (grad != 0)
    return torch.where(used[:, None], states, 0.0)
