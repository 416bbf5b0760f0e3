"""Which samples each optimizer step of a rollout trains on. Both roles follow the same plan (SEMANTICS 11)."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Step:
    """One optimizer step: `rows` int64 are positions in the RolloutBatch, over all data-parallel ranks."""

    pass_index: int
    step_index: int
    rows: np.ndarray


@dataclass(frozen=True)
class StepPlan:
    """The steps of one rollout in order; `num_dropped` samples are left out by `--partial-step drop`."""

    rollout_id: int
    steps: tuple[Step, ...]
    num_dropped: int = 0
