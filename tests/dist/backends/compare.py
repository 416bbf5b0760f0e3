"""How results of two runs are compared."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.dist.backends.cases import RESPONSE_LENS, Case

if TYPE_CHECKING:
    from tests.dist.backends.ranks import Report

# of the three steps: the first starts from equal weights, the others from weights that differ by what Adam makes of rounding
STEP_TOLERANCES = (1e-5, 5e-5, 5e-5)


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    """Largest absolute error over the largest absolute value."""
    if found.shape != expected.shape:
        return float("inf")
    return float(np.abs(found - expected).max() / max(np.abs(expected).max(), 1e-12))


def gradient_error(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> float:
    """Worst over the tensors of L2 error / max(norm, 1e-3 of the global norm) (SEMANTICS 9)."""
    if found.keys() != expected.keys():
        return float("inf")
    norms = {name: float(np.linalg.norm(tensor.astype(np.float64))) for name, tensor in expected.items()}
    floor = max(1e-3 * float(np.linalg.norm(list(norms.values()))), 1e-12)
    return max(
        float(np.linalg.norm((found[name] - tensor).astype(np.float64))) / max(norms[name], floor)
        for name, tensor in expected.items()
    )


def assert_reports_equal(report: "Report", expected: "Report", case: Case) -> None:
    """Columns, statistics, gradients and weights of one iteration in two layouts, within what float32 leaves of equality."""
    assert report.columns.keys() == expected.columns.keys()
    for column, values in expected.columns.items():
        assert relative(report.columns[column], values) <= 1e-5, column
    for own, other in (
        (report.log_prob_stats, expected.log_prob_stats),
        (report.advantage_stats, expected.advantage_stats),
    ):
        assert own.keys() == other.keys()
        for name, value in other.items():
            # a sum over the tokens of a trajectory, which here nearly cancels
            absolute = 1e-6 * max(RESPONSE_LENS) if name == "kl_trajectory" else 1e-6
            assert own[name] == pytest.approx(value, rel=1e-5, abs=absolute), name
    for role in ("actor", "critic") if case.ppo.needs_critic else ("actor",):
        own, other = getattr(report, role), getattr(expected, role)
        _assert_steps_equal(own.steps, other.steps)
        assert len(own.gradients) == len(other.gradients)
        for step, tolerance in enumerate(STEP_TOLERANCES[: len(other.gradients)]):
            assert gradient_error(own.gradients[step], other.gradients[step]) <= tolerance, f"{role} step {step}"
        for tensor, weights in other.weights.items():
            error = np.abs(own.weights[tensor] - weights).max()
            assert error <= 1e-2 * case.lr * len(other.steps), f"{role} {tensor}"
        assert own.replicas_equal


def _assert_steps_equal(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    for step, (own, other) in enumerate(zip(found, expected, strict=True)):
        assert own.keys() == other.keys()
        for name, value in other.items():
            # sums of terms of either sign, which nearly cancel
            absolute = 0.1 * STEP_TOLERANCES[step] if name in ("pg_loss", "loss") else 1e-9
            assert own[name] == pytest.approx(value, rel=STEP_TOLERANCES[step], abs=absolute), f"{name} of step {step}"
