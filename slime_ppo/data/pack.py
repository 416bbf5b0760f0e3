"""RolloutBatch rows -> MicroBatch: packing on the rank that trains them."""

import numpy as np
import torch

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
    )


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
