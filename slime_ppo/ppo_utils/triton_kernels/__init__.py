"""CUDA kernels, in Triton, of the row loops of ppo_utils: one read of the logits forward, one read and one write backward.

Nobody calls them directly: the functions of ppo_utils take them by device and fall back to plain torch, which defines the
result. Triton comes with torch for CUDA; importing this package needs neither.
"""

from importlib.util import find_spec

import torch
from torch import Tensor


def has_kernels(logits: Tensor) -> bool:
    """Whether the kernels take these logits: on a CUDA device, Triton there, and not float64 (Triton's temperature is float32)."""
    return logits.is_cuda and logits.dtype != torch.float64 and find_spec("triton") is not None
