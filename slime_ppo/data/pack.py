"""RolloutBatch rows -> MicroBatch: packing on the rank that trains them."""

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from slime_ppo.parallel.cp_map import CpMap
from slime_ppo.ppo_utils.cp_ops import ContextShard
from slime_ppo.types.micro_batch import MicroBatch
from slime_ppo.types.rollout_batch import RolloutBatch


def pack_micro_batch(batch: RolloutBatch, rows: np.ndarray, *, multiple: int, device: torch.device) -> MicroBatch:
    """Pack the samples at `rows` (may be empty), padded at the very end to a multiple of `multiple` tokens.

    Sequence parallelism needs T to divide by the tensor-parallel size; the padding extends the last sequence, behind
    whose tokens a causal mask hides it.
    """
    chosen = batch.select(rows)
    lens = chosen.total_lens if len(rows) else np.zeros(1, np.int64)
    padding = -int(lens.sum()) % multiple if lens.sum() else multiple
    tokens = np.concatenate((_interleave(chosen), np.zeros(padding, np.int64)))
    lens = np.concatenate((lens[:-1], lens[-1:] + padding))
    starts = np.concatenate(([0], np.cumsum(lens)))
    first = starts[: len(rows)] + chosen.prompt_lens - 1
    return MicroBatch(
        rows=np.asarray(rows, np.int64),
        batch=chosen,
        tokens=torch.as_tensor(tokens, dtype=torch.long, device=device),
        cu_seqlens=torch.as_tensor(starts, dtype=torch.int32, device=device),
        max_seqlen=int(lens.max()),
        positions=torch.as_tensor(_ranges(first, chosen.response_lens), device=device),
        last_positions=torch.as_tensor(first + chosen.response_lens, device=device),
        last_rows=torch.arange(len(rows), device=device),
    )


@dataclass(frozen=True)
class ContextRank:
    """Which of the `size` context-parallel ranks this is; `group` (None in tests of one process) are all of them."""

    size: int
    rank: int
    group: dist.ProcessGroup | None = None


def pack_context_share(
    batch: RolloutBatch, rows: np.ndarray, *, multiple: int, device: torch.device, context: ContextRank
) -> MicroBatch:
    """This context-parallel rank's share of the samples at `rows` (may be empty), split by the zigzag of CpMap.

    Each sample is padded at its end to a multiple of twice `context.size`. The share divides by `multiple`: where the samples'
    does not, a sequence of padding follows them, because padding within a sample would move its chunks. No collective.
    """
    chosen = batch.select(rows)
    cp_map = CpMap(context.size, chosen.prompt_lens, chosen.response_lens)
    padding = _padding_sequence(cp_map, multiple)
    tokens = np.concatenate(
        (_padded(chosen, cp_map)[cp_map.token_index(context.rank)], np.zeros(padding // context.size, np.int64))
    )
    lens = np.append(cp_map.padded_lens, padding) if padding else cp_map.padded_lens
    last = cp_map.last_positions(context.rank)
    return MicroBatch(
        rows=np.asarray(rows, np.int64),
        batch=chosen,
        tokens=torch.as_tensor(tokens, dtype=torch.long, device=device),
        cu_seqlens=torch.as_tensor(np.concatenate(([0], np.cumsum(lens))), dtype=torch.int32, device=device),
        max_seqlen=int(lens.max()),
        positions=torch.as_tensor(cp_map.local_positions(context.rank), device=device),
        last_positions=torch.as_tensor(last.places, device=device),
        last_rows=torch.as_tensor(last.rows, device=device),
        context=ContextShard.of_rank(cp_map, context.rank, group=context.group, device=device),
    )


def _padding_sequence(cp_map: CpMap, multiple: int) -> int:
    """Length of the sequence of padding behind the samples, over all ranks; at least one chunk each where there is no sample.

    Shares are even, as a rank holds two chunks of every sequence, so that two more tokens at a time reach any multiple.
    """
    pairs = int(cp_map.padded_lens.sum()) // (2 * cp_map.cp_size)
    unit = multiple // math.gcd(multiple, 2)
    missing = -pairs % unit if pairs else unit
    return missing * 2 * cp_map.cp_size


def _padded(batch: RolloutBatch, cp_map: CpMap) -> np.ndarray:
    """Prompt, response and zeros of each sample in turn, int64 [sum of padded_lens]."""
    first = np.cumsum(cp_map.padded_lens) - cp_map.padded_lens
    tokens = np.zeros(int(cp_map.padded_lens.sum()), np.int64)
    tokens[_ranges(first, batch.total_lens)] = _interleave(batch)
    return tokens


def _interleave(batch: RolloutBatch) -> np.ndarray:
    """Prompt and response of each sample in turn."""
    prompt_at, response_at = batch.offsets("prompt_token"), batch.offsets("response_token")
    pieces: list[np.ndarray] = [np.zeros(0, np.int64)]
    for i in range(batch.num_samples):
        pieces.append(batch.prompt_ids[prompt_at[i] : prompt_at[i + 1]])
        pieces.append(batch.response_ids[response_at[i] : response_at[i + 1]])
    return np.concatenate(pieces)


def _ranges(starts: np.ndarray, lens: np.ndarray) -> np.ndarray:
    """[starts[0], ..., starts[0] + lens[0] - 1, starts[1], ...]."""
    before = np.cumsum(lens) - lens
    return np.repeat(starts - before, lens) + np.arange(int(lens.sum()))
