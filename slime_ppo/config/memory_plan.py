"""An estimate of each rank's memory from the model's shape. Arithmetic only; activations are rough.

Symbols: h hidden size, f FFN size, q = heads x head_dim, k = key-value heads x head_dim, V padded vocabulary, L layers.
"""

from dataclasses import dataclass

from slime_ppo.config.model_shape import ModelShape, padded_vocab_size
from slime_ppo.config.roles import RoleName, RoleSettings
from slime_ppo.config.root import Config

_BYTES = {"float32": 4, "bfloat16": 2}
_FP32 = 4


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one rank. `host` is beside the device's total: copies that wait in host memory."""

    params: int
    grads: int
    optimizer: int
    activations: int
    logits: int
    host: int

    @property
    def total(self) -> int:
        """Bytes on the device while the role is awake and training."""
        return self.params + self.grads + self.optimizer + self.activations + self.logits


def num_params(shape: ModelShape, *, tp_size: int, divisible_by: int, value_head: bool) -> int:
    """Parameters of one tensor-parallel rank: matrices and their biases are split, norms are not. A value head takes the place
    of the lm head."""
    q, k = shape.num_attention_heads * shape.head_dim, shape.num_query_groups * shape.head_dim
    matrices = shape.hidden_size * (2 * q + 2 * k + 3 * shape.ffn_hidden_size)
    biases = q + 2 * k if shape.qkv_bias else 0
    head_norms = 2 * shape.head_dim if shape.qk_layernorm else 0
    embedding = padded_vocab_size(shape.vocab_size, tp_size=tp_size, divisible_by=divisible_by) * shape.hidden_size
    embeddings = embedding if value_head or shape.tie_word_embeddings else 2 * embedding
    split = (shape.num_layers * (matrices + biases) + embeddings) // tp_size
    norms = (2 * shape.num_layers + 1) * shape.hidden_size + shape.num_layers * head_norms
    return split + norms + (shape.hidden_size + 1 if value_head else 0)


def micro_batch_tokens(config: Config, role: RoleName) -> tuple[int, int]:
    """Tokens and response tokens of the largest micro-batch of a rank, all samples at their longest.

    Under context parallelism a rank holds two of 2 cp chunks of each sample, and at most as many response tokens.
    """
    settings = config.role(role)
    longest = config.max_sample_tokens if settings.cp_size == 1 else 2 * -(-config.max_sample_tokens // (2 * settings.cp_size))
    response = min(config.rollout.rollout_max_response_len, longest)
    per_rank = config.batch.global_batch_size // settings.dp_size
    if config.batch.use_dynamic_batch_size and config.batch.max_tokens_per_gpu is not None:
        samples = min(max(config.batch.max_tokens_per_gpu // longest, 1), per_rank)
    else:
        samples = min(config.batch.micro_batch_size, per_rank)
    return samples * longest, samples * response


def role_memory(config: Config, shape: ModelShape, role: RoleName) -> MemoryEstimate:
    """The estimate of one rank of a role.

    Gradients are float32. The distributed optimizer splits two moments (and float32 main parameters beside bfloat16 ones)
    over data- and context-parallel ranks. Logits are made at response positions only, with their gradient; a fused head holds
    blocks of them, which are not counted. On the host: with a KL to the
    reference its weights and room for the actor's own while they are swapped (actor), and with offload whatever the role
    keeps while asleep.
    """
    settings, value_head = config.role(role), role == "critic"
    count = num_params(
        shape, tp_size=settings.tp_size, divisible_by=config.model.make_vocab_size_divisible_by, value_head=value_head
    )
    width = _BYTES[config.model.dtype]
    optimizer = count * (2 * _FP32 + (0 if width == _FP32 else _FP32)) // (settings.dp_size * settings.cp_size)
    tokens, response_tokens = micro_batch_tokens(config, role)
    vocab = padded_vocab_size(shape.vocab_size, tp_size=settings.tp_size, divisible_by=config.model.make_vocab_size_divisible_by)
    reference = 2 * count * width if config.ppo.needs_reference and not value_head else 0
    asleep = count * width + optimizer if config.offloads else 0
    return MemoryEstimate(
        params=count * width,
        grads=count * _FP32,
        optimizer=optimizer,
        activations=_activations(shape, settings, tokens) * width,
        logits=0 if value_head or config.model.fuse_lm_head else 2 * response_tokens * vocab // settings.tp_size * _FP32,
        host=reference + asleep,
    )


def engine_memory(config: Config, shape: ModelShape) -> tuple[int, int]:
    """Bytes of the rollout engine: weights, and the KV cache of all samples of a rollout at their longest."""
    width = _BYTES[config.model.dtype]
    weights = num_params(shape, tp_size=1, divisible_by=1, value_head=False) * width
    per_token = 2 * shape.num_layers * shape.num_query_groups * shape.head_dim * width
    return weights, config.samples_per_rollout * config.max_sample_tokens * per_token


def _activations(shape: ModelShape, settings: RoleSettings, tokens: int) -> int:
    """Numbers kept for the backward pass: per layer 6h around the norms and residuals, q + 2k + q of attention, 4f of the MLP."""
    q, k = shape.num_attention_heads * shape.head_dim, shape.num_query_groups * shape.head_dim
    per_layer = 6 * shape.hidden_size + 2 * q + 2 * k + 4 * shape.ffn_hidden_size
    # tensor parallelism comes with sequence parallelism, so that all of it is split
    return tokens * shape.num_layers * per_layer // settings.tp_size
