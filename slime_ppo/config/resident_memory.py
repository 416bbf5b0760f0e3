"""Bytes that a rank of a trainer holds while it is awake, from the model's shape and its layout: arithmetic, no torch.

Symbols: h hidden size, f FFN size, q = heads x head_dim, k = key-value heads x head_dim, E experts.

The rounding is megatron-core's (distributed/param_and_grad_buffer.py). The parameters of a pipeline stage lie in one buffer and
their gradients in another of the same length: each parameter starts at a multiple of 64 numbers, and the buffer ends where it
splits evenly over the ranks of its distributed optimizer, at a multiple of lcm(128, ranks). So all ranks of a stage hold equal
buffers. Main parameters and moments leave out the gaps between parameters, which are counted here: at most 63 numbers each.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from slime_ppo.config.model_shape import ModelShape, padded_vocab_size
from slime_ppo.parallel.layout import ParallelLayout

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
FP32_BYTES = 4
_PARAM_START, _BUFFER_END = 64, 128


@dataclass(frozen=True)
class ResidentBytes:
    """Bytes of one rank by part. `main_params` are the float32 copies that a bfloat16 run updates; float32 runs have none."""

    params: int
    grads: int
    main_params: int
    moments: int

    @property
    def total(self) -> int:
        return self.params + self.grads + self.main_params + self.moments


@dataclass(frozen=True)
class TrainedModel:
    """What a role trains. `value_head`: the critic's, which takes the place of the output layer and stays in float32, as the output
    layer does with `fp32_lm_head`, and the embedding if it is tied to it."""

    shape: ModelShape
    dtype: Literal["float32", "bfloat16"]
    value_head: bool
    make_vocab_size_divisible_by: int
    fp32_lm_head: bool = False


@dataclass(frozen=True)
class _Buffer:
    """`numel` numbers, padding included, of `width` bytes; Adam's state of them is split over `num_shards` ranks."""

    numel: int
    width: int
    num_shards: int

    @staticmethod
    def of(sizes: Sequence[int], *, width: int, num_shards: int) -> "_Buffer":
        """Parameters of these sizes one after the other."""
        numel = sum(_round_up(size, _PARAM_START) for size in sizes)
        return _Buffer(_round_up(numel, math.lcm(_BUFFER_END, num_shards)), width, num_shards)

    @property
    def bytes(self) -> ResidentBytes:
        """Gradients and moments are float32 whatever the parameters are."""
        shard = self.numel // self.num_shards
        return ResidentBytes(
            params=self.numel * self.width,
            grads=self.numel * FP32_BYTES,
            main_params=shard * FP32_BYTES if self.width < FP32_BYTES else 0,
            moments=shard * 2 * FP32_BYTES,
        )


def resident_bytes(model: TrainedModel, layout: ParallelLayout, *, pp_rank: int) -> ResidentBytes:
    """What each rank of pipeline rank `pp_rank` holds once Adam has its moments, all its virtual stages together."""
    parts = [buffer.bytes for vp_stage in range(layout.vpp_size) for buffer in _buffers(model, layout, pp_rank, vp_stage)]
    return ResidentBytes(
        params=sum(part.params for part in parts),
        grads=sum(part.grads for part in parts),
        main_params=sum(part.main_params for part in parts),
        moments=sum(part.moments for part in parts),
    )


def num_params(shape: ModelShape) -> int:
    """Parameters of the whole language model."""
    alone = ParallelLayout(1)
    layer = sum(_layer_sizes(shape, alone)) + sum(_expert_sizes(shape, alone))
    embeddings = (1 if shape.tie_word_embeddings else 2) * shape.vocab_size * shape.hidden_size
    return shape.num_layers * layer + shape.hidden_size + embeddings


def _buffers(model: TrainedModel, layout: ParallelLayout, pp_rank: int, vp_stage: int) -> Iterator[_Buffer]:
    """The buffers of one stage, a tied embedding's stretch of them counted as one of its own."""
    shape, width = model.shape, DTYPE_BYTES[model.dtype]
    is_first = pp_rank == vp_stage == 0
    is_last = pp_rank == layout.pp_size - 1 and vp_stage == layout.vpp_size - 1
    vocab = padded_vocab_size(shape.vocab_size, divisible_by=model.make_vocab_size_divisible_by, tp_size=layout.tp_size)
    embedding = vocab // layout.tp_size * shape.hidden_size
    tied = shape.tie_word_embeddings and not model.value_head
    num_layers = shape.num_layers // (layout.pp_size * layout.vpp_size)
    head_width = FP32_BYTES if model.fp32_lm_head else width
    by_width: dict[int, list[int]] = {FP32_BYTES: []}
    by_width[width] = num_layers * _layer_sizes(shape, layout)
    # a tied embedding of several stages lies apart, so that first and last stage split it over their data-parallel ranks alike
    apart: list[int] = []
    if is_first:
        place = apart if tied and layout.pp_size > 1 else by_width[head_width if tied else width]
        place.append(embedding)
    if is_last:
        by_width[width].append(shape.hidden_size)
        if model.value_head:
            by_width[FP32_BYTES].append(shape.hidden_size)
        elif not (tied and is_first):
            (apart if tied else by_width[head_width]).append(embedding)
    shards = layout.dp_size * layout.cp_size
    yield _Buffer.of(apart, width=head_width, num_shards=shards)
    for one, sizes in by_width.items():
        yield _Buffer.of(sizes, width=one, num_shards=shards)
    yield _Buffer.of(num_layers * _expert_sizes(shape, layout), width=width, num_shards=layout.expert_dp_size)


def _layer_sizes(shape: ModelShape, layout: ParallelLayout) -> list[int]:
    """Parameters of a layer that all expert-parallel ranks hold: matrices and their biases are split over TP, norms and an
    expert layer's router are not."""
    h, f, tp_size = shape.hidden_size, shape.ffn_hidden_size, layout.tp_size
    q, k = shape.num_attention_heads * shape.head_dim, shape.num_query_groups * shape.head_dim
    sizes = [h, (q + 2 * k) * h // tp_size, q * h // tp_size, h]
    if shape.qkv_bias:
        sizes.append((q + 2 * k) // tp_size)
    if shape.qk_layernorm:
        sizes += 2 * [shape.head_dim]
    return [*sizes, shape.num_experts * h] if shape.num_experts else [*sizes, 2 * f * h // tp_size, f * h // tp_size]


def _expert_sizes(shape: ModelShape, layout: ParallelLayout) -> list[int]:
    """Parameters of a layer's experts on one rank."""
    h, f = shape.hidden_size, shape.expert_ffn_size
    return shape.num_experts // layout.ep_size * [2 * f * h // layout.etp_size, f * h // layout.etp_size]


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
