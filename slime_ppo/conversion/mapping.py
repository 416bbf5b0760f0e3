"""How Megatron's parameters are made of Hugging Face tensors: the words a model family's table is written in."""

from dataclasses import dataclass
from enum import Enum


class Split(Enum):
    """How a parameter is split over tensor-parallel ranks, and how several HF tensors are fused into it.

    Shapes are those of the whole parameter: h hidden, f feed-forward, n heads, g query groups, d head size.
    """

    REPLICATED = "replicated"  # the same on every rank
    ROW = "row"  # split along dim 1 (input)
    VOCAB = "vocab"  # [V, h] padded with zero rows to a multiple of TP, split along dim 0
    QKV = "qkv"  # q, k, v -> [g * (n/g + 2) * d, ...]: per query group its q heads, k, v; split along dim 0
    GATE_UP = "gate_up"  # gate, up -> on each rank cat(gate shard, up shard)


@dataclass(frozen=True)
class Rule:
    """One line of a table. `{layer}` in both names is the global layer number.

    Rule("decoder.layers.{layer}.mlp.linear_fc2.weight", ("model.layers.{layer}.mlp.down_proj.weight",), Split.ROW)
    """

    megatron: str
    hf: tuple[str, ...]
    split: Split


@dataclass(frozen=True)
class ModelFamily:
    """A family is a table that converts both ways.

    `output_layer` is left out when the embeddings are tied. `value_head` replaces it in a critic, whose folder is that of
    the HF class `value_architecture`.
    """

    model_type: str
    rules: tuple[Rule, ...]
    output_layer: Rule
    value_head: Rule
    value_architecture: str
