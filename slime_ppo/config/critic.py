"""Section `critic`: where the critic differs from the actor. None = as the actor.

In YAML the keys carry no prefix (`critic: {lr: 1e-3}`); the flags do (`--critic-lr 1e-3`).
"""

from dataclasses import dataclass
from typing import Literal

from slime_ppo.config.fields import option


@dataclass(frozen=True)
class CriticConfig:
    """Overrides of one role."""

    lr: float | None = option(None, flag="--critic-lr", help="peak learning rate", default_text="same as --lr", at_least=0)
    lr_warmup_iters: int | None = option(
        None,
        flag="--critic-lr-warmup-iters",
        help="linear warm-up from 0",
        unit="optimizer steps",
        default_text="same as --lr-warmup-iters",
        at_least=0,
    )
    load: str | None = option(
        None,
        flag="--critic-load",
        help="local folder of the critic's first weights: a policy, critic or reward model in Hugging Face's format, or a "
        "torch_dist checkpoint (weights only)",
        default_text="same as --hf-checkpoint",
    )
    init_value_head: Literal["zeros", "normal"] | None = option(
        None,
        flag="--init-value-head",
        help="how the value head starts where the critic's folder holds none",
        default_text="a folder without a value head is refused",
    )
    init_value_head_std: float = option(
        0.01, flag="--init-value-head-std", help="standard deviation of a head that starts normal", above=0
    )
    save: str | None = option(
        None,
        flag="--critic-save",
        help="folder of the critic's checkpoints, and of its final weights in hf/; never the actor's",
        default_text="<save>/critic",
    )
    num_nodes: int | None = option(
        None,
        flag="--critic-num-nodes",
        help="ranks = nodes x ranks per node; Ray packs them on as few nodes as fit",
        unit="nodes",
        default_text="same as --actor-num-nodes",
        at_least=1,
    )
    num_gpus_per_node: int | None = option(
        None,
        flag="--critic-num-gpus-per-node",
        help="ranks of the critic on each node",
        unit="ranks",
        default_text="same as --actor-num-gpus-per-node",
        at_least=1,
    )
    tensor_model_parallel_size: int | None = option(
        None,
        flag="--critic-tensor-model-parallel-size",
        help="ranks that share each layer's matrices",
        unit="ranks",
        default_text="same as --tensor-model-parallel-size",
        at_least=1,
    )
    pipeline_model_parallel_size: int | None = option(
        None,
        flag="--critic-pipeline-model-parallel-size",
        help="ranks that share the layers, one after the other",
        unit="ranks",
        default_text="same as --pipeline-model-parallel-size",
        at_least=1,
    )
    num_virtual_stages_per_pipeline_rank: int | None = option(
        None,
        flag="--critic-num-virtual-stages-per-pipeline-rank",
        help="stages on each pipeline rank",
        unit="stages",
        default_text="same as --num-virtual-stages-per-pipeline-rank",
        at_least=1,
    )
    expert_model_parallel_size: int | None = option(
        None,
        flag="--critic-expert-model-parallel-size",
        help="ranks that share the experts of a layer",
        unit="ranks",
        default_text="same as --expert-model-parallel-size",
        at_least=1,
    )
    expert_tensor_parallel_size: int | None = option(
        None,
        flag="--critic-expert-tensor-parallel-size",
        help="ranks that share each expert's matrices",
        unit="ranks",
        default_text="same as --expert-tensor-parallel-size",
        at_least=1,
    )
    context_parallel_size: int | None = option(
        None,
        flag="--critic-context-parallel-size",
        help="ranks that share the tokens of each sample",
        unit="ranks",
        default_text="same as --context-parallel-size",
        at_least=1,
    )
    clip_grad: float | None = option(
        None, flag="--critic-clip-grad", help="largest gradient norm; 0 = off", default_text="same as --clip-grad", at_least=0
    )
