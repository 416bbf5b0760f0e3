"""What one forward pass of a rank works on: some samples of a rollout, packed without padding between them (THD)."""

from dataclasses import dataclass

import numpy as np
import torch

from slime_ppo.ppo_utils.cp_ops import ContextShard
from slime_ppo.types.rollout_batch import COLUMNS, RolloutBatch, filled


@dataclass(frozen=True)
class MicroBatch:
    """n samples, T packed tokens (prompt and response of each in turn), N response tokens.

    Response token i of a sample is predicted at sequence position P + i - 1 (SEMANTICS 1): `positions` int64 [N] holds
    those places in the pack. `batch` keeps the samples' columns on the host; `column` moves one of them to the device.

    Under context parallelism T and N count what this rank holds and owns of these samples (parallel/cp_map.py), and `context`
    knows its share; without, `context` is None. `cu_seqlens` and `max_seqlen` are always those of the whole padded sequences.
    `last_positions` are the places of the last positions of the samples `last_rows` (int64, all n of them without context).

    An empty micro-batch (n = 0) has a few dummy tokens and no positions: ranks with nothing to do still take part in
    every collective.
    """

    rows: np.ndarray
    batch: RolloutBatch
    tokens: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int
    positions: torch.Tensor
    last_positions: torch.Tensor
    last_rows: torch.Tensor
    context: ContextShard | None = None

    @property
    def device(self) -> torch.device:
        return self.tokens.device

    @property
    def lens(self) -> torch.Tensor:
        """How many of the N response tokens are of each sample, int64 [n]; 0 where another rank owns them all."""
        return self._whole(self.batch.response_lens) if self.context is None else self.context.lens

    def column(self, name: str) -> torch.Tensor:
        """A column of these samples, or `kept_mask`, as a tensor on the device, flat in sample order. It must have been
        filled in. Per-token columns hold the N response tokens of this rank alone, and `support_ids` the rows of those."""
        array = getattr(self.batch, name)
        if array is None:
            raise ValueError(f"column {name} of rollout {self.batch.rollout_id} has not been computed yet (needs {COLUMNS[name]})")
        if self.context is None:
            return self._whole(array)
        per = "response_token" if name == "kept_mask" else COLUMNS[name].per
        if per == "response_token":
            return self.context.take(self._whole(array))
        return self._whole(array[self._support_index(self.context)] if per == "support_id" else array)

    def at_last_positions(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [T] after the last token of each sample, [n]; 0 for samples whose last position another rank holds."""
        return x.new_zeros(len(self.rows)).index_copy(0, self.last_rows, x.index_select(0, self.last_positions))

    def _support_index(self, context: ContextShard) -> np.ndarray:
        """Positions in the flat support_ids of the ids of this rank's tokens."""
        counts = filled(self.batch.support_counts).astype(np.int64)
        own = np.zeros(len(counts), np.bool_)
        own[context.index.cpu().numpy()] = True
        return np.flatnonzero(np.repeat(own, counts))

    def _whole(self, array: np.ndarray) -> torch.Tensor:
        return torch.tensor(array, device=self.device)  # a copy: arrays from the object store are read-only views
