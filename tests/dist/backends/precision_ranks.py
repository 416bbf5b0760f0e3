"""What the tests of precision, recomputation and overlap run on each rank of the pool."""

from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

import numpy as np
import torch

# first: it makes Megatron importable
from tests.dist.backends.ranks import Tensors, _exporter, _start, _start_actor, _train, _whole, _whole_gradients  # isort: skip
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.transformer.mlp import MLP

from slime_ppo.backends.megatron import optimizer as optimizer_module
from slime_ppo.backends.megatron.actor import ActorRole
from slime_ppo.backends.megatron.attention import PackedAttention
from slime_ppo.backends.megatron.optimizer import StepOutcome
from slime_ppo.backends.megatron.role import MegatronRole
from slime_ppo.types.rollout_batch import RolloutBatch
from slime_ppo.types.step_plan import StepPlan
from slime_ppo.weight_sync.bucket import plan_buckets
from tests.dist.backends.cases import Case
from tests.dist.backends.ranks import RoleReport

# of parameters; small enough that a tiny model has several buckets, whose collectives overlap
BUCKET_SIZE = 20_000


@dataclass(frozen=True)
class Counted:
    """Both roles' reports, and how often attention and MLPs ran on this rank while they trained."""

    actor: RoleReport
    critic: RoleReport
    attention_calls: int
    mlp_calls: int


def train_counted(case: Case, batch: RolloutBatch, plan: StepPlan) -> Counted:
    actor, critic = _start(case)
    calls: Counter[type] = Counter()

    def counting(kind: type) -> AbstractContextManager[object]:
        forward = kind.forward  # type: ignore[attr-defined]

        def counted(self: torch.nn.Module, *args: object, **kwargs: object) -> object:
            calls[kind] += 1
            return forward(self, *args, **kwargs)

        return patch.object(kind, "forward", counted)

    with counting(PackedAttention), counting(MLP):
        reports = _train(actor, batch, plan, case), _train(critic, batch, plan, case)
    return Counted(*reports, attention_calls=calls[PackedAttention], mlp_calls=calls[MLP])


def _in_small_buckets() -> AbstractContextManager[object]:
    return patch.object(
        optimizer_module, "DistributedDataParallelConfig", partial(DistributedDataParallelConfig, bucket_size=BUCKET_SIZE)
    )


def train_in_small_buckets(case: Case, batch: RolloutBatch, plan: StepPlan) -> tuple[RoleReport, RoleReport, int]:
    """(actor, critic, buckets of the actor's first stage)."""
    with _in_small_buckets():
        actor, critic = _start(case)
    return _train(actor, batch, plan, case), _train(critic, batch, plan, case), len(actor.chunks[0].bucket_groups)


def _exported(actor: ActorRole) -> Tensors:
    exporter = _exporter(actor)
    exported: Tensors = {}
    for bucket in plan_buckets(exporter.specs, 2**20):
        exported |= {name: tensor.float().clone().numpy() for name, tensor in exporter.gather(bucket).items()}
    return exported


def life_of_weights(case: Case, batch: RolloutBatch, plan: StepPlan) -> dict[str, Tensors]:
    """What each reader of the parameters finds right after training, in turn: the export, the pass that swaps the reference in,
    an offload; then training again."""
    with _in_small_buckets():
        actor = _start_actor(case)

    def train() -> None:
        actor.train(batch, plan, [case.lr] * len(plan.steps))

    train()
    found = {"export": _exported(actor)}
    train()
    found["columns"] = dict(actor.columns(actor.micro_batches(batch, np.arange(batch.num_samples)), actor._old_head).columns)
    train()
    actor.compute_log_probs(batch)
    found["export after the swap"] = _exported(actor)
    train()
    actor.memory.offload()
    actor.memory.wake()
    train()
    found["export after sleep and training"] = _exported(actor)
    return found


def parameters_after_a_bare_step(case: Case, batch: RolloutBatch, plan: StepPlan) -> tuple[bool, bool]:
    """(parameters changed by `complete_parameters` after one step that nothing has completed, again by a second call)."""
    with _in_small_buckets():
        actor = _start_actor(case)
    with patch("slime_ppo.backends.megatron.role.complete_parameters", lambda chunks: None):
        actor.train(batch, plan, [case.lr] * len(plan.steps))
    seen = [buffer.param_data.clone() for chunk in actor.chunks for buffer in chunk.buffers]
    changed = []
    for _ in range(2):
        optimizer_module.complete_parameters(actor.chunks)
        now = [buffer.param_data.clone() for chunk in actor.chunks for buffer in chunk.buffers]
        changed.append(not all(torch.equal(own, other) for own, other in zip(now, seen, strict=True)))
        seen = now
    return changed[0], changed[1]


@dataclass(frozen=True)
class Precision:
    """Element types by what they are of; and after each call of `train` how far float32 main parameters, and what the model
    computes with, are from where they began, at most."""

    dtypes: dict[str, set[str]]
    main_moved: list[float]
    norm_main_moved: list[float]
    norm_moved: list[float]


def _main_parameters(role: MegatronRole) -> list[torch.Tensor]:
    return [p for part in role.optimizer.chained_optimizers for group in part.optimizer.param_groups for p in group["params"]]


def _dtypes(role: MegatronRole) -> dict[str, set[str]]:
    buffers = [buffer for chunk in role.chunks for buffer in chunk.buffers]
    states = [state for part in role.optimizer.chained_optimizers for state in part.optimizer.state.values()]
    parameters = [p for model in role.models for p in model.parameters()]
    heads = [p for model in role.models if model.post_process for p in model.output_layer.parameters()]
    groups = {
        "parameters": parameters,
        "head": heads,
        "gradients": [buffer.grad_data for buffer in buffers],
        "main": _main_parameters(role),
        "moments": [value for state in states for value in state.values()],
    }
    return {name: {str(tensor.dtype).removeprefix("torch.") for tensor in tensors} for name, tensors in groups.items()}


def small_steps(case: Case, batch: RolloutBatch, plan: StepPlan, repeats: int) -> tuple[Precision, dict[str, set[str]]]:
    """The actor after `repeats` trainings, and the critic's element types."""
    actor, critic = _start(case)
    mains = _main_parameters(actor)
    main_before = [main.detach().clone() for main in mains]
    norm = actor.models[0].decoder.layers[0].input_layernorm.weight
    norm_before = norm.detach().clone()
    # the part of it that this rank updates, if any
    own_norm = torch.zeros(0) if norm.main_param is None else norm.main_param
    norm_main_before = own_norm.detach().clone()
    moved: list[list[float]] = [[], [], []]
    for _ in range(repeats):
        actor.train(batch, plan, [case.lr] * len(plan.steps))
        moved[0].append(max(float((now - old).abs().max()) for now, old in zip(mains, main_before, strict=True) if len(now)))
        moved[1].append(float((own_norm - norm_main_before).abs().max()) if len(own_norm) else 0.0)
        moved[2].append(float((norm - norm_before).float().abs().max()))
    return Precision(_dtypes(actor), *moved), _dtypes(critic)


def gradients_of_accumulating_twice(case: Case, batch: RolloutBatch, plan: StepPlan, *, discards: bool) -> list[Tensors]:
    """Gradients of the actor's first step as two runs of it in a row find them, with a step at learning rate 0 between them, or
    one that is discarded."""
    actor, gradients = _start(case)[0], list[Tensors]()
    apply = actor.apply

    def recorded(lr: float) -> StepOutcome:
        gradients.append(_whole_gradients(actor))
        return StepOutcome(0.0, stepped=False) if discards else apply(0.0)

    with patch.object(actor, "apply", recorded):
        for _ in range(2):
            actor.train(batch, plan, [case.lr] * len(plan.steps))
    return gradients


def critic_embeddings(case: Case) -> tuple[bool, bool]:
    """(a parameter of this stage of the critic is an embedding, Megatron takes one of them for a shared copy)."""
    _, critic = _start(case)
    named = [pair for model in critic.models for pair in model.named_parameters()]
    return any("embedding" in name for name, _ in named), any(getattr(p, "shared_embedding", False) for _, p in named)


def lm_head_pass(case: Case, batch: RolloutBatch) -> tuple[dict[str, np.ndarray], Tensors, dict[str, str]]:
    """(columns of the pass over log-probs on this rank, the weights as they are, element types of the export)."""
    actor = _start_actor(case)
    part, _ = actor.compute_log_probs(batch)
    types = {spec.name: spec.dtype for spec in _exporter(actor).specs}
    return {} if part is None else dict(part.columns), _whole(actor, lambda p: p.data.float()), types
