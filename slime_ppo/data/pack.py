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


@dataclass(frozen=True)
class ContextRank:
    """Which of the `size` context-parallel ranks this is; `group` (None in tests of one process) are all of them."""

    size: int
    rank: int
    group: dist.ProcessGroup | None = None


def pack_micro_batch(
    batch: RolloutBatch, rows: np.ndarray, *, multiple: int, device: torch.device, context: ContextRank | None
) -> MicroBatch:
    """Pack the samples at `rows` (may be empty); with a context the rank's share of them, split by the zigzag of CpMap.

    Under context parallelism each sample is padded at its end to whole chunks. The pack, or share, divides by `multiple`
    (sequence parallelism needs the tensor-parallel size): where the samples' tokens do not, a sequence of padding follows them,
    because padding within a sample would move its chunks. No collective.
    """
    chosen = batch.select(rows)
    size, rank = (1, 0) if context is None else (context.size, context.rank)
    cp_map = CpMap(size, chosen.prompt_lens, chosen.response_lens)
    padding = _padding_sequence(cp_map, multiple)
    tokens = np.concatenate((_padded(chosen, cp_map)[cp_map.token_index(rank)], np.zeros(padding // size, np.int64)))
    lens = np.append(cp_map.padded_lens, padding) if padding else cp_map.padded_lens
    last = cp_map.last_positions(rank)
    return MicroBatch(
        rows=np.asarray(rows, np.int64),
        batch=chosen,
        tokens=torch.as_tensor(tokens, dtype=torch.long, device=device),
        cu_seqlens=torch.as_tensor(np.concatenate(([0], np.cumsum(lens))), dtype=torch.int32, device=device),
        max_seqlen=int(lens.max()),
        positions=torch.as_tensor(cp_map.local_positions(rank), device=device),
        last_positions=torch.as_tensor(last.places, device=device),
        last_rows=torch.as_tensor(last.rows, device=device),
        context=None if context is None else ContextShard.of_rank(cp_map, rank, group=context.group, device=device),
    )


def _padding_sequence(cp_map: CpMap, multiple: int) -> int:
    """Length of the sequence of padding behind the samples, over all ranks; where there is no sample, of a chunk or more each.

    A rank holds `per_rank` chunks of every sequence, so that its share grows by so many tokens at a time.
    """
    per_rank = cp_map.num_chunks // cp_map.cp_size
    rounds = int(cp_map.padded_lens.sum()) // cp_map.num_chunks
    unit = multiple // math.gcd(multiple, per_rank)
    return cp_map.num_chunks * (-rounds % unit if rounds else unit)


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
