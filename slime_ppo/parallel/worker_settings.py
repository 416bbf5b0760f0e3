"""What one rank of a role is started with. No torch: the driver makes these."""

from dataclasses import dataclass
from typing import Literal

from slime_ppo.parallel.layout import ParallelLayout

DeviceKind = Literal["cpu", "cuda"]
TransformerImpl = Literal["local", "transformer_engine"]

STANDING_GROUP = "standing://"
"""The init_method of a role whose process has joined its process group already; roles of one process share Megatron's groups."""


@dataclass(frozen=True)
class RankSettings:
    """Where a rank stands and how it computes.

    `init_method` is torch.distributed's (file:///path, env://), or store://host:port for a TCPStore that is served already, or
    STANDING_GROUP.
    """

    rank: int
    init_method: str
    device: DeviceKind
    seed: int
    num_threads: int
    deterministic: bool
    collective_timeout_s: float


@dataclass(frozen=True)
class ModelSettings:
    """Where a role's weights come from: `checkpoint_folder`, a torch_dist checkpoint, where it is given, else `hf_folder`.
    `ref_folder` None: the role keeps no reference. `init_value_head`: how a critic's head starts that does not come with the
    weights; None: it must. `fuse_lm_head`: the policy's log-probs are
    made from hidden states, without logits. `fp32_lm_head`: the policy's output layer is float32 whatever `dtype` is.
    `moe_aux_loss_coeff` 0: no load-balancing loss of a mixture of experts."""

    hf_folder: str
    ref_folder: str | None
    dtype: Literal["float32", "bfloat16"]
    make_vocab_size_divisible_by: int
    fuse_lm_head: bool = False
    fp32_lm_head: bool = False
    transformer_impl: TransformerImpl = "local"
    moe_aux_loss_coeff: float = 0.0
    checkpoint_folder: str | None = None
    init_value_head: Literal["zeros", "normal"] | None = None
    init_value_head_std: float = 0.01


@dataclass(frozen=True)
class OptimizerSettings:
    """Adam's numbers of one role. The learning rate is set anew at every step."""

    clip_grad: float
    weight_decay: float
    adam_beta1: float
    adam_beta2: float
    adam_eps: float


@dataclass(frozen=True)
class ExecutionSettings:
    """How a step is computed, in Megatron's words; none of it changes a gradient. `recompute_granularity` None: all activations
    are kept; `gradient_accumulation_fusion` None: where it can be had."""

    recompute_granularity: Literal["full", "selective"] | None = None
    recompute_method: Literal["uniform", "block"] | None = None
    recompute_num_layers: int | None = None
    recompute_modules: tuple[str, ...] = ("core_attn",)
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    gradient_accumulation_fusion: bool | None = None


@dataclass(frozen=True)
class BatchSettings:
    """Memory knobs that never change the gradient: samples, or packed tokens, per forward pass. One of them is set.

    `balance_by`: what micro-batches and ranks get equally much of.
    """

    micro_batch_size: int | None
    max_tokens: int | None
    balance_by: Literal["tokens", "flops"] = "tokens"


@dataclass(frozen=True)
class WorkerSettings:
    """Everything one rank needs to come up. `starts_offloaded`: it frees the device again as soon as it is built."""

    rank: RankSettings
    layout: ParallelLayout
    model: ModelSettings
    optimizer: OptimizerSettings
    batch: BatchSettings
    starts_offloaded: bool = False
    execution: ExecutionSettings = ExecutionSettings()
