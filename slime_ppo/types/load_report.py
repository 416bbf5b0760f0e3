"""What came out of a checkpoint when a role loaded it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LoadReport:
    """`with_optimizer`: Adam's state came with the weights. `restored_rng`: so did the random states of the ranks, which only a
    checkpoint of the same layout on the same kind of device has; otherwise the ranks keep the seeds they started with."""

    with_optimizer: bool
    restored_rng: bool
