"""How Megatron's parameters are made of Hugging Face tensors: the words a model family's table is written in. No torch."""

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
    """One line of a table. `{layer}` in both names is the global layer number, `{expert}` the global number of an expert.

    Rule("decoder.layers.{layer}.mlp.linear_fc2.weight", ("model.layers.{layer}.mlp.down_proj.weight",), Split.ROW)

    `per_expert`: the parameter is that of one expert, so it is split over expert-tensor-parallel ranks.
    """

    megatron: str
    hf: tuple[str, ...]
    split: Split
    per_expert: bool = False


@dataclass(frozen=True)
class MoeKeys:
    """Where config.json says what a mixture of experts is like; the first of `num_experts` that is there counts."""

    num_experts: tuple[str, ...]
    top_k: str
    ffn_hidden_size: str
    norm_topk_prob: str


class WindowKey(Enum):
    """Which key of config.json says that attention sees a window of the sequence only."""

    NONE = "none"  # the family has no windows
    WINDOW = "sliding_window"  # in use when it is a number
    SWITCH = "use_sliding_window"  # `sliding_window` is in use when this is true


@dataclass(frozen=True)
class ModelFamily:
    """A family is a table that converts both ways, and how its config.json differs from that of the others.

    `output_layer` is left out when the embeddings are tied. `value_head` replaces it in a critic, whose folder is that of
    the HF class `value_architecture`. Names in `derived` may be in a folder and are not read. A config.json whose
    `refused_flags` are true, or whose `fixed_values` (key, the only value that is in this version) differ, has other weights than
    the table; `required_keys` have defaults in transformers that differ from family to family, so they must be written out.
    `moe_keys`: every layer is a mixture of experts.
    """

    model_type: str
    rules: tuple[Rule, ...]
    output_layer: Rule
    value_head: Rule
    value_architecture: str
    derived: tuple[str, ...] = ()
    window_key: WindowKey = WindowKey.NONE
    refused_flags: tuple[str, ...] = ()
    required_keys: tuple[str, ...] = ()
    fixed_values: tuple[tuple[str, object], ...] = ()
    moe_keys: MoeKeys | None = None

    @property
    def qkv_bias(self) -> bool:
        """Queries, keys and values have biases."""
        return self._has("self_attention.linear_qkv.bias")

    @property
    def qk_layernorm(self) -> bool:
        """Each query and key head is normed before RoPE."""
        return self._has("self_attention.q_layernorm.weight")

    def _has(self, parameter: str) -> bool:
        return any(rule.megatron.endswith(parameter) for rule in self.rules)
