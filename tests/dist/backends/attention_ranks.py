"""What the tests of packed attention run on each rank of the pool."""

from types import SimpleNamespace
from typing import cast

import numpy as np
import torch
import torch.distributed as dist

from slime_ppo.backends.megatron.device import prepare_megatron

prepare_megatron("cpu")

from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from megatron.core.transformer.enums import AttnMaskType  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from slime_ppo.backends.megatron.attention import PackedAttention  # noqa: E402
from slime_ppo.parallel.cp_map import CpMap  # noqa: E402

HEADS, GROUPS, DIM, SCALE = 4, 2, 8, 0.3
Results = dict[str, np.ndarray]


def _whole_inputs(lens: list[int], cp_size: int) -> tuple[CpMap, np.ndarray, dict[str, torch.Tensor]]:
    """(map, places that are not padding, tensors): query, key, value and the upstream gradient of sequences of `lens` tokens,
    padded for `cp_size`; padding is 0."""
    cp_map = CpMap(cp_size, np.array(lens), np.zeros(len(lens), np.int64))
    generator = torch.Generator().manual_seed(7)
    shapes = {"query": (HEADS, DIM), "key": (GROUPS, DIM), "value": (GROUPS, DIM), "upstream": (HEADS * DIM,)}
    first = np.cumsum(cp_map.padded_lens) - cp_map.padded_lens
    real = np.concatenate([start + np.arange(length) for start, length in zip(first, lens, strict=True)])
    inputs = {}
    for name, shape in shapes.items():
        inputs[name] = torch.zeros((int(cp_map.padded_lens.sum()), *shape), dtype=torch.float64)
        inputs[name][real] = torch.randn((len(real), *shape), generator=generator, dtype=torch.float64)
    return cp_map, real, inputs


def real_inputs(lens: list[int], cp_size: int) -> Results:
    """The same without padding."""
    _, real, inputs = _whole_inputs(lens, cp_size)
    return {name: x[real].numpy() for name, x in inputs.items()}


def attention(lens: list[int]) -> tuple[np.ndarray, Results]:
    """(token_index of this rank, its output and gradients) by PackedAttention over all ranks; the whole world is one
    context-parallel group."""
    world, rank = dist.get_world_size(), dist.get_rank()
    cp_map, _, inputs = _whole_inputs(lens, world)
    index = cp_map.token_index(rank)
    leaves = {name: inputs[name][index].requires_grad_() for name in ("query", "key", "value")}
    config = TransformerConfig(num_layers=1, hidden_size=HEADS * DIM, num_attention_heads=HEADS)
    groups = cast(ProcessGroupCollection, SimpleNamespace(cp=dist.group.WORLD))
    layer = PackedAttention(config, 1, AttnMaskType.causal, "self", softmax_scale=SCALE, pg_collection=groups)
    starts = torch.tensor(np.concatenate(([0], np.cumsum(cp_map.padded_lens))), dtype=torch.int32)
    packed = SimpleNamespace(cu_seqlens_q=starts)
    out = layer(*leaves.values(), None, packed_seq_params=packed)
    out.backward(inputs["upstream"][index])
    gradients = {name: leaf.grad.numpy() for name, leaf in leaves.items() if leaf.grad is not None}
    return index, {"out": out.detach().numpy()} | gradients
