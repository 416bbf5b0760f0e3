"""How results of two runs are compared."""

from collections.abc import Mapping

import numpy as np


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
