import numpy as np
import pytest

from slime_ppo.config.model_shape import ModelShape
from slime_ppo.data.cost import flop_costs

SHAPE = ModelShape(
    model_type="llama",
    num_layers=3,
    hidden_size=8,
    num_attention_heads=4,
    num_query_groups=2,
    head_dim=6,
    ffn_hidden_size=20,
    vocab_size=100,
    max_position_embeddings=64,
    tie_word_embeddings=True,
    rope_theta=1e4,
    rope_scaling=None,
    attention_window=None,
    qkv_bias=False,
    qk_layernorm=False,
    rms_norm_eps=1e-6,
    eos_token_ids=(),
)


def counted(length: int, num_outputs: int) -> int:
    """Operations of a forward pass, matrix by matrix and pair by pair."""
    matrices = [(24, 8), (12, 8), (12, 8), (8, 24)]  # query, key, value, output
    matrices += [(20, 8), (20, 8), (8, 20)]  # gate, up, down
    linear = sum(2 * rows * columns for rows, columns in matrices) * 3 + 2 * num_outputs * 8
    pairs = sum(1 for query in range(length) for key in range(query + 1))
    return linear * length + pairs * 3 * 4 * 2 * (6 + 6)


@pytest.mark.parametrize("num_outputs", [100, 1])
def test_flop_costs_are_the_counted_operations_in_their_unit(num_outputs: int) -> None:
    lens = [0, 1, 2, 17, 60]
    unit = 2 * 3 * 4 * 6
    costs = flop_costs(SHAPE, np.array(lens), num_outputs=num_outputs)
    assert costs.dtype == np.int64
    for length, cost in zip(lens, costs.tolist(), strict=True):
        # the weights per token are rounded to a whole unit
        assert abs(cost - counted(length, num_outputs) / unit) <= length / 2


def test_flop_costs_of_very_many_long_samples_do_not_overflow() -> None:
    costs = flop_costs(SHAPE, np.full(65_536, 131_072), num_outputs=151_936)
    assert costs.min() > 0 and int(costs.sum()) == 65_536 * int(costs[0])
