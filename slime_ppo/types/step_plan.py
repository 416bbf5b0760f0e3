"""Which samples each optimizer step of a rollout trains on. Both roles follow the same plan (SEMANTICS 11)."""

from dataclasses import dataclass, replace

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

    def renumbered(self, rows: np.ndarray) -> "StepPlan":
        """The same plan for samples that stand at `rows` of a larger batch: row i becomes rows[i]."""
        return replace(self, steps=tuple(replace(step, rows=rows[step.rows]) for step in self.steps))
