"""The layouts of the matrix, what is compared in each, and the table of it that `make layouts` prints."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from slime_ppo.config.ppo import PpoConfig
from slime_ppo.parallel.layout import ParallelLayout
from slime_ppo.parallel.worker_settings import BatchSettings
from tests.dist.backends.cases import make_plan
from tests.dist.backends.compare import gradient_error

if TYPE_CHECKING:
    from tests.dist.backends.ranks import MatrixRun

NUM_ROLLOUTS = 3
PPO = PpoConfig(kl_coef=0.1, entropy_coef=0.01, value_clip=0.25, lambd_critic=0.9)
ONE, TWO, SEVEN = BatchSettings(1, None), BatchSettings(2, None), BatchSettings(7, None)
TOKENS, FEW_TOKENS = BatchSettings(None, 20), BatchSettings(None, 10)

# every layout cuts its samples in its own way, so that the memory knobs are compared as well
DENSE: Mapping[str, tuple[ParallelLayout, BatchSettings]] = {
    "1 rank": (ParallelLayout(1), ONE),
    "1 rank, micro-batches of 2": (ParallelLayout(1), TWO),
    "1 rank, micro-batches of 7": (ParallelLayout(1), SEVEN),
    "1 rank, 20 tokens": (ParallelLayout(1), TOKENS),
    "DP2": (ParallelLayout(2), ONE),
    "DP4": (ParallelLayout(4), TWO),
    "DP8": (ParallelLayout(8), ONE),
    "TP2": (ParallelLayout(2, tp_size=2), SEVEN),
    "TP2 DP2": (ParallelLayout(4, tp_size=2), TOKENS),
    "CP2": (ParallelLayout(2, cp_size=2), TWO),
    "CP4": (ParallelLayout(4, cp_size=4), ONE),
    "CP2 DP2": (ParallelLayout(4, cp_size=2), FEW_TOKENS),
    "PP2": (ParallelLayout(2, pp_size=2), TWO),
    "PP4": (ParallelLayout(4, pp_size=4), ONE),
    "PP2 VPP2": (ParallelLayout(2, pp_size=2, vpp_size=2), TWO),
    "PP2 VPP2 DP2": (ParallelLayout(4, pp_size=2, vpp_size=2), TOKENS),
    "PP2 DP2": (ParallelLayout(4, pp_size=2), ONE),
    "TP2 PP2": (ParallelLayout(4, tp_size=2, pp_size=2), TOKENS),
    "TP2 CP2": (ParallelLayout(4, tp_size=2, cp_size=2), SEVEN),
    "PP2 CP2": (ParallelLayout(4, pp_size=2, cp_size=2), FEW_TOKENS),
    "TP2 PP2 DP2": (ParallelLayout(8, tp_size=2, pp_size=2), ONE),
    "TP2 PP2 CP2": (ParallelLayout(8, tp_size=2, pp_size=2, cp_size=2), TWO),
}
MIXTURE: Mapping[str, tuple[ParallelLayout, BatchSettings]] = {
    "MoE, 1 rank": (ParallelLayout(1), ONE),
    "MoE, EP2": (ParallelLayout(2, ep_size=2), TWO),
    "MoE, EP4": (ParallelLayout(4, ep_size=4), ONE),
    "MoE, EP2, expert DP2": (ParallelLayout(4, ep_size=2), TOKENS),
    "MoE, TP2 ETP2": (ParallelLayout(2, tp_size=2, etp_size=2), SEVEN),
    "MoE, TP2 EP2": (ParallelLayout(2, tp_size=2, ep_size=2), TWO),
    "MoE, TP2 EP2 ETP2": (ParallelLayout(4, tp_size=2, ep_size=2, etp_size=2), TOKENS),
    "MoE, PP2 EP2": (ParallelLayout(4, pp_size=2, ep_size=2), ONE),
    "MoE, PP2 VPP2 EP2": (ParallelLayout(4, pp_size=2, vpp_size=2, ep_size=2), TWO),
    "MoE, CP2 EP2": (ParallelLayout(2, cp_size=2, ep_size=2), FEW_TOKENS),
    "MoE, TP2 PP2 CP2 EP4": (ParallelLayout(8, tp_size=2, pp_size=2, cp_size=2, ep_size=4), TWO),
}


@dataclass(frozen=True)
class Comparison:
    """A layout against one rank. Errors of the first rollout's passes and first step are `losses` (largest absolute error of value
    loss, policy loss, KL and entropy) and `metrics` (largest error of any metric relative to max(|metric|, 0.1)); `gradients` is
    that of SEMANTICS 9 on the worst tensor; `weights` after each rollout, largest absolute error in units of the learning rate.
    """

    losses: float
    metrics: float
    gradients: float
    weights: tuple[float, ...]
    replicas_equal: bool
    seconds_per_step: float


def compare(run: "MatrixRun", one_rank: "MatrixRun", lr: float) -> Comparison:
    """Raises KeyError when a metric is reported in one of the two alone."""
    first = len(run.metrics[0]) // 2 - 1  # steps of each role
    passes_and_first_steps = (0, 1, 2, 2 + first)
    pairs = [(run.metrics[0][index], one_rank.metrics[0][index]) for index in passes_and_first_steps]
    for own, other in pairs:
        if own.keys() != other.keys():
            raise KeyError(f"metrics in one of two layouts only: {sorted(own.keys() ^ other.keys())}")
    absolute = [
        abs(own[name] - other[name])
        for own, other in pairs
        for name in ("value_loss", "pg_loss", "kl", "entropy", "entropy_loss")
        if name in other
    ]
    relative = [abs(own[name] - other[name]) / max(abs(other[name]), 0.1) for own, other in pairs for name in other]
    return Comparison(
        losses=max(absolute),
        metrics=max(relative),
        gradients=gradient_error(run.gradients, one_rank.gradients),
        weights=tuple(_furthest(own, other) / lr for own, other in zip(run.weights, one_rank.weights, strict=True)),
        replicas_equal=run.replicas_equal,
        seconds_per_step=run.seconds_per_step,
    )


def _furthest(own: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> float:
    if own.keys() != other.keys():
        return float("inf")
    return max(float(np.abs(own[name] - weights).max()) for name, weights in other.items())


def table(rows: Mapping[str, tuple[ParallelLayout, Comparison]]) -> str:
    """Markdown: a line per layout."""
    updates = [f"weights / lr after {len(make_plan().steps) * (index + 1)} updates" for index in range(NUM_ROLLOUTS)]
    head = ["layout", "ranks", "losses", "metrics", "gradients", *updates, "replicas", "seconds per step"]
    lines = [_line(head), _line(["---"] * len(head))]
    for name, (layout, found) in rows.items():
        errors = [found.losses, found.metrics, found.gradients, *found.weights]
        replicas = "equal" if found.replicas_equal else "differ"
        lines.append(_line([name, str(layout.num_ranks), *map(_error, errors), replicas, f"{found.seconds_per_step:.2f}"]))
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _error(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"
