"""What a sample costs to compute, in floating point operations. Numbers only: no torch."""

import numpy as np
import numpy.typing as npt

from slime_ppo.config.model_shape import ModelShape

Ints = npt.NDArray[np.int64]


def flop_costs(shape: ModelShape, lens: Ints, *, num_outputs: int) -> Ints:
    """Operations for each sample of `lens` int64 [S] tokens, int64 [S], in units of 2 N h d: N layers of h heads of d numbers.

    A sample of L tokens takes, forward (backward twice as many, recomputing once more: the same shares),

        2 W L                     products with the W weights it meets, the head of `num_outputs` rows and, of a mixture, its own
                                  experts and the router among them
        2 N h d L (L + 1)         attention: L (L + 1) / 2 pairs under the causal mask, 2 d for the score and 2 d for the sum

    that is 2 N h d times L (L + 1 + W / (N h d)), the quotient rounded. Attention is half of it at L = W / (N h d) tokens, which
    is some ten times the hidden size. Norms, rotary embedding and softmax are left out, they are below a hundredth.
    """
    width = shape.num_attention_heads * shape.head_dim
    projections = shape.hidden_size * shape.head_dim * 2 * (shape.num_attention_heads + shape.num_query_groups)
    feed_forward = 3 * shape.hidden_size * shape.ffn_size_per_token + shape.hidden_size * shape.num_experts
    weights = shape.num_layers * (projections + feed_forward) + shape.hidden_size * num_outputs
    per_token = round(weights / (shape.num_layers * width))
    lens = np.asarray(lens, np.int64)
    return lens * (lens + 1 + per_token)
