"""An estimate of each rank's memory from the model's shape: what stays is exact, activations and logits are rough.

Symbols: h hidden size, f FFN size, q = heads x head_dim, k = key-value heads x head_dim, V padded vocabulary.
"""

from dataclasses import dataclass

from slime_ppo.config.model_shape import ModelShape, padded_vocab_size
from slime_ppo.config.recompute import RecomputeConfig
from slime_ppo.config.resident_memory import (
    DTYPE_BYTES,
    FP32_BYTES,
    ResidentBytes,
    TrainedModel,
    num_params,
    resident_bytes,
)
from slime_ppo.config.roles import RoleName
from slime_ppo.config.root import Config
from slime_ppo.parallel.layout import ParallelLayout


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one rank. `host` is beside the device's total: copies that wait in host memory."""

    resident: ResidentBytes
    activations: int
    logits: int
    host: int

    @property
    def total(self) -> int:
        """Bytes on the device while the role is awake and training."""
        return self.resident.total + self.activations + self.logits


@dataclass(frozen=True)
class MicroBatchShare:
    """What a rank has of the micro-batches of a step: how many, and tokens and response tokens of the largest one."""

    num: int
    tokens: int
    response_tokens: int


def micro_batch_share(config: Config, role: RoleName) -> MicroBatchShare:
    """All samples at their longest, and micro-batches under a token cap as full as shorter ones could make them. Under context
    parallelism a rank holds two of 2 cp chunks of each sample, and at most as many response tokens."""
    settings = config.role(role)
    longest = config.max_sample_tokens if settings.cp_size == 1 else 2 * -(-config.max_sample_tokens // (2 * settings.cp_size))
    response = min(config.rollout.rollout_max_response_len, longest)
    per_rank = -(-config.batch.global_batch_size // settings.dp_size)
    if config.batch.use_dynamic_batch_size and config.batch.max_tokens_per_gpu is not None:
        samples = min(max(config.batch.max_tokens_per_gpu // longest, 1), per_rank)
        tokens = min(max(config.batch.max_tokens_per_gpu, longest), per_rank * longest)
    else:
        samples = min(config.batch.micro_batch_size, per_rank)
        tokens = samples * longest
    return MicroBatchShare(-(-per_rank // samples), tokens, -(-tokens * response // longest))


def role_memory(config: Config, shape: ModelShape, role: RoleName) -> MemoryEstimate:
    """The estimate of the rank of a role that needs most on its device."""
    return max(stage_memory(config, shape, role), key=lambda stage: stage.total)


def stage_memory(config: Config, shape: ModelShape, role: RoleName) -> list[MemoryEstimate]:
    """The estimate of a rank by pipeline rank; the ranks of one are alike.

    Logits are made at response positions only, with their gradient; a fused head holds blocks of them, which are not counted.
    On the host: with a KL to the reference its weights and room for the actor's own while they are swapped (actor), and with
    offload whatever the role keeps while asleep.
    """
    layout, is_critic = config.role(role).layout, role == "critic"
    divisible_by = config.model.make_vocab_size_divisible_by
    model = TrainedModel(
        shape,
        config.model.dtype,
        value_head=is_critic,
        make_vocab_size_divisible_by=divisible_by,
        fp32_lm_head=config.model.fp32_lm_head and not is_critic,
    )
    vocab = padded_vocab_size(shape.vocab_size, tp_size=layout.tp_size, divisible_by=divisible_by) // layout.tp_size
    share = micro_batch_share(config, role)
    logits = 0 if is_critic or config.model.fuse_lm_head else 2 * share.response_tokens * vocab * FP32_BYTES
    stages = []
    for pp_rank in range(layout.pp_size):
        resident = resident_bytes(model, layout, pp_rank=pp_rank)
        activations = _activations(config.recompute, shape, layout, share, pp_rank=pp_rank)
        reference = 2 * resident.params if config.ppo.needs_reference and not is_critic else 0
        asleep = resident.total - resident.grads if config.offloads else 0
        stages.append(
            MemoryEstimate(
                resident=resident,
                activations=activations * DTYPE_BYTES[config.model.dtype],
                logits=logits if pp_rank == layout.pp_size - 1 else 0,
                host=reference + asleep,
            )
        )
    return stages


def engine_memory(config: Config, shape: ModelShape) -> tuple[int, int]:
    """Bytes of the rollout engine, with SGLang of a rank of a server: weights, and the KV cache of its share of a rollout's samples
    at their longest."""
    width = DTYPE_BYTES[config.model.dtype]
    widened = shape.vocab_size * shape.hidden_size * (FP32_BYTES - width) if config.model.fp32_lm_head else 0
    tp_size = config.rollout.rollout_num_gpus_per_engine if config.engine_bundles else 1
    samples = -(-config.samples_per_rollout // max(len(config.engine_bundles), 1))
    return (num_params(shape) * width + widened) // tp_size, kv_cache(config, shape, samples)


def kv_cache(config: Config, shape: ModelShape, samples: int) -> int:
    """Bytes that a process of the engine needs to generate so many samples at one time, all at their longest."""
    per_token = 2 * shape.num_layers * shape.num_query_groups * shape.head_dim * DTYPE_BYTES[config.model.dtype]
    tp_size = config.rollout.rollout_num_gpus_per_engine if config.engine_bundles else 1
    # ranks beyond the key-value heads hold copies of them
    return samples * config.max_sample_tokens * per_token // min(tp_size, shape.num_query_groups)


def _activations(
    recompute: RecomputeConfig, shape: ModelShape, layout: ParallelLayout, share: MicroBatchShare, *, pp_rank: int
) -> int:
    """Numbers kept for the backward pass, and those that it makes again at one time."""
    kept, again = _stage_activations(recompute, shape, shape.num_layers // (layout.pp_size * layout.vpp_size))
    numbers = kept * _stages_in_flight(layout, share.num, pp_rank) + again
    # tensor parallelism comes with sequence parallelism, so that all of it is split
    return share.tokens * numbers // layout.tp_size


def _stage_activations(recompute: RecomputeConfig, shape: ModelShape, num_layers: int) -> tuple[int, int]:
    """Per token of a pass through a stage: numbers that stay until its backward pass, and the most that are then recomputed
    together. A layer has 6h around the norms and residuals, q + 2k + q of attention, 4f of the MLP; where it is recomputed h, its
    input. Recomputed attention saves nothing here: its scores are not counted."""
    q, k = shape.num_attention_heads * shape.head_dim, shape.num_query_groups * shape.head_dim
    mlp = 4 * shape.ffn_size_per_token
    layer = 6 * shape.hidden_size + 2 * q + 2 * k + mlp
    count = recompute.recompute_num_layers
    if recompute.recompute_granularity == "full" and count is not None:
        if recompute.recompute_method == "uniform":
            return num_layers // count * shape.hidden_size, count * layer
        return count * shape.hidden_size + (num_layers - count) * layer, layer
    if recompute.recompute_granularity == "selective" and {"mlp", "moe"} & set(recompute.modules):
        return num_layers * (layer - mlp), mlp
    return num_layers * layer, 0


def _stages_in_flight(layout: ParallelLayout, num_micro_batches: int, pp_rank: int) -> int:
    """Passes through a stage of this rank whose backward pass is still to come, at most: 1F1B starts as many as there are
    stages from here to the end; with virtual stages Megatron warms up by twice the later ranks and by all but the last round."""
    if layout.vpp_size == 1:
        return min(layout.pp_size - pp_rank, num_micro_batches)
    most = 2 * (layout.pp_size - pp_rank - 1) + (layout.vpp_size - 1) * layout.pp_size + 1
    return min(most, num_micro_batches * layout.vpp_size)
