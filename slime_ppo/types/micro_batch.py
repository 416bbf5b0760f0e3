"""What one forward pass of a rank works on: some samples of a rollout, packed without padding between them (THD)."""

from dataclasses import dataclass

import numpy as np
import torch

from slime_ppo.types.rollout_batch import COLUMNS, RolloutBatch


@dataclass(frozen=True)
class MicroBatch:
    """n samples, T packed tokens (prompt and response of each in turn), N response tokens.

    Response token i of a sample is predicted at sequence position P + i - 1 (SEMANTICS 1): `positions` int64 [N] holds
    those places in the pack. `batch` keeps the samples' columns on the host; `column` moves one of them to the device.

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

    @property
    def device(self) -> torch.device:
        return self.tokens.device

    def column(self, name: str) -> torch.Tensor:
        """A column of these samples, or `kept_mask`, as a tensor on the device, flat in sample order. It must have been
        filled in."""
        array = getattr(self.batch, name)
        if array is None:
            raise ValueError(f"column {name} of rollout {self.batch.rollout_id} has not been computed yet (needs {COLUMNS[name]})")
        return torch.tensor(array, device=self.device)  # a copy: arrays from the object store are read-only views
