"""Scaled RoPE against transformers."""

import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from slime_ppo.backends.megatron.rope import llama3_frequencies
from slime_ppo.config.model_shape import Llama3Scaling


def test_llama3_frequencies_equal_transformers_in_all_three_bands() -> None:
    scaling = Llama3Scaling(factor=8.0, low_freq_factor=1.5, high_freq_factor=5.0, original_max_position_embeddings=2048)
    parameters = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.5,
        "high_freq_factor": 5.0,
        "original_max_position_embeddings": 2048,
    }
    config = LlamaConfig(hidden_size=256, num_attention_heads=2, rope_parameters=parameters)
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config)
    base = 1.0 / (5e5 ** (torch.arange(0, 128, 2, dtype=torch.float32) / 128))
    found = llama3_frequencies(base, scaling)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert bool((found == base).any()) and bool((found / base < 0.1251).any())
    assert bool(((found / base > 0.13) & (found / base < 0.99)).any())
