"""Rotary frequencies of scaled RoPE."""

import math

import torch

from slime_ppo.config.model_shape import Llama3Scaling


def llama3_frequencies(base: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Inverse frequencies [d/2] of Llama 3.1's RoPE from the unscaled ones, as transformers makes them.

    Megatron's own scaling fixes every number but the factor at those of Llama 3.1 8B.
    """
    original = scaling.original_max_position_embeddings
    turns = original * base / (2 * math.pi)  # rotations within the original positions
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return kept * base + (1 - kept) * base / scaling.factor
