"""Section `parallel`: ranks of the actor and how they share the model."""

from dataclasses import dataclass

from slime_ppo.config.fields import option


@dataclass(frozen=True)
class ParallelConfig:
    """World size = nodes x ranks per node = tensor x context x data x pipeline parallel. The experts of a mixture share out the
    same ranks anew: expert tensor x expert x expert data x pipeline parallel."""

    actor_num_nodes: int = option(
        1, help="ranks = nodes x ranks per node; Ray packs them on as few nodes as fit", unit="nodes", at_least=1
    )
    actor_num_gpus_per_node: int = option(
        1, help="ranks of the actor on each node: one GPU each, on a CPU one process each", unit="ranks", at_least=1
    )
    tensor_model_parallel_size: int = option(1, help="ranks that share each layer's matrices", unit="ranks", at_least=1)
    sequence_parallel: bool | None = option(
        None,
        help="split norms and activations over the tensor-parallel ranks too",
        default_text="on where tensor parallelism is above 1",
    )
    pipeline_model_parallel_size: int = option(1, help="ranks that share the layers, one after the other", unit="ranks", at_least=1)
    num_virtual_stages_per_pipeline_rank: int = option(
        1, help="stages on each pipeline rank; more of them leave it idle for less time", unit="stages", at_least=1
    )
    context_parallel_size: int = option(1, help="ranks that share the tokens of each sample", unit="ranks", at_least=1)
    expert_model_parallel_size: int = option(1, help="ranks that share the experts of a layer", unit="ranks", at_least=1)
    expert_tensor_parallel_size: int | None = option(
        None,
        help="ranks that share each expert's matrices",
        unit="ranks",
        default_text="same as --tensor-model-parallel-size",
        at_least=1,
    )
    overlap_grad_reduce: bool = option(
        False, help="reduce gradients over data-parallel ranks while the backward pass still runs; same numbers"
    )
    overlap_param_gather: bool = option(
        False,
        help="gather updated weights while the next step's forward pass runs; with --overlap-grad-reduce. Same numbers: weights "
        "are whole again before anything but a step reads them",
    )
    gradient_accumulation_fusion: bool | None = option(
        None,
        help="the kernel that makes a weight's gradient adds it to the float32 sum; a GPU with apex's extension",
        default_text="on with transformer_engine where the extension is installed",
    )
