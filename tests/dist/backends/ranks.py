"""What the tests of the Megatron backend run on each rank of the pool."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

from slime_ppo.backends.megatron.device import prepare_megatron

prepare_megatron("cpu")

from megatron.core import parallel_state  # noqa: E402
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region  # noqa: E402

from slime_ppo.backends.megatron.actor import ActorRole  # noqa: E402
from slime_ppo.backends.megatron.collectives import data_parallel_group, gather_objects  # noqa: E402
from slime_ppo.backends.megatron.critic import CriticRole  # noqa: E402
from slime_ppo.backends.megatron.export import WeightExporter, save_hf_folder  # noqa: E402
from slime_ppo.backends.megatron.init import init_parallel_state  # noqa: E402
from slime_ppo.backends.megatron.model import converted_parameters, load_hf_weights, split_place  # noqa: E402
from slime_ppo.backends.megatron.optimizer import StepOutcome  # noqa: E402
from slime_ppo.backends.megatron.role import MegatronRole  # noqa: E402
from slime_ppo.config.model_shape import padded_vocab_size  # noqa: E402
from slime_ppo.conversion.hf_io import HfWeights  # noqa: E402
from slime_ppo.conversion.mapping import Split  # noqa: E402
from slime_ppo.conversion.shard import unshard  # noqa: E402
from slime_ppo.errors import ConversionError, ParallelError  # noqa: E402
from slime_ppo.parallel.layout import ParallelLayout  # noqa: E402
from slime_ppo.parallel.worker_settings import STANDING_GROUP  # noqa: E402
from slime_ppo.types.micro_batch import MicroBatch  # noqa: E402
from slime_ppo.types.rollout_batch import ColumnPart, RolloutBatch, filled  # noqa: E402
from slime_ppo.types.stats import Stats, merge_stats  # noqa: E402
from slime_ppo.types.step_plan import StepPlan  # noqa: E402
from slime_ppo.weight_sync.bucket import plan_buckets  # noqa: E402
from tests.dist.backends.cases import Case, make_batch  # noqa: E402

Tensors = dict[str, np.ndarray]


@dataclass(frozen=True)
class RoleReport:
    """What one role did, as every rank sees it: statistics merged over ranks, and whole HF tensors."""

    steps: list[dict[str, float]]
    gradients: list[Tensors]
    weights: Tensors
    replicas_equal: bool


@dataclass(frozen=True)
class Report:
    """One iteration; `critic` is None when the advantages need none."""

    columns: dict[str, np.ndarray]
    log_prob_stats: dict[str, float]
    advantage_stats: dict[str, float]
    actor: RoleReport
    critic: RoleReport | None


def _start_actor(case: Case) -> ActorRole:
    """The actor brings up the ranks as in production."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    return ActorRole(case.settings(rank, "actor"), case.ppo, case.correction, case.temperature)


def _start(case: Case) -> tuple[ActorRole, CriticRole]:
    """Both roles in this process: the critic joins what the actor has brought up."""
    rank = dist.get_rank()
    actor, settings = _start_actor(case), case.settings(rank, "critic")
    return actor, CriticRole(replace(settings, rank=replace(settings.rank, init_method=STANDING_GROUP)), case.ppo)


def _gathered(value: object) -> list:
    values: list = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _merged(batch: RolloutBatch, part: ColumnPart | None, stats: Stats) -> tuple[RolloutBatch, dict[str, float]]:
    return batch.with_parts(_gathered(part)), merge_stats(_gathered(stats)).result()


def _whole(role: MegatronRole, local: Callable[[torch.nn.Parameter], torch.Tensor]) -> Tensors:
    """A tensor per parameter as whole HF tensors, from the shards of all ranks; without the product's own exporter."""
    mine = {  # of clones: the memory that numpy has seen cannot be given back, as an offload does
        rule.megatron: (rule, split_place(rule), local(parameter).detach().clone().float().numpy())
        for rule, parameter in converted_parameters(role.models, role.table, role.layout)
    }
    shards: dict[str, dict[int, torch.Tensor]] = {}
    rules = {}
    for other in _gathered(mine):  # of arrays, which travel at a tenth of the cost of tensors
        for name, (rule, (_, place), array) in other.items():
            rules[name] = rule
            shards.setdefault(name, {}).setdefault(place, torch.from_numpy(array))
    shape, whole = role.shape, {}
    for name, by_place in shards.items():
        parts = unshard(
            rules[name].split,
            [by_place[place] for place in sorted(by_place)],
            num_query_groups=shape.num_query_groups,
            num_heads=shape.num_attention_heads,
            vocab_size=shape.vocab_size,
        )
        whole |= {hf: part.clone().numpy() for hf, part in zip(rules[name].hf, parts, strict=True)}
    return whole


def _whole_gradients(role: MegatronRole) -> Tensors:
    """After the reduce-scatter a rank's buffer is valid in its own shard alone, so the shards are gathered, into a copy."""
    buffers = [buffer for chunk in role.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    kept = [buffer.grad_data.clone() for buffer in buffers]
    for chunk in role.chunks:
        for bucket_group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            group = bucket_group.intra_distributed_optimizer_instance_group
            for bucket in bucket_group.buckets:
                mine = bucket.grad_data.chunk(group.size())[group.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, mine, group=group)
    gradients = _whole(role, lambda parameter: parameter.main_grad)
    for buffer, own in zip(buffers, kept, strict=True):
        buffer.grad_data.copy_(own)
    return gradients


def _replicas_equal(role: MegatronRole) -> bool:
    """Ranks that hold the same shard of a parameter hold the same numbers, bit for bit."""
    mine = {}
    for rule, parameter in converted_parameters(role.models, role.table, role.layout):
        place = 0 if rule.split is Split.REPLICATED else split_place(rule)[1]
        mine[(rule.hf, place)] = parameter.detach().float().numpy().copy()
    copies: dict[object, np.ndarray] = {}
    return all(np.array_equal(copies.setdefault(key, own), own) for other in _gathered(mine) for key, own in other.items())


def _train(role: MegatronRole, batch: RolloutBatch, plan: StepPlan, case: Case) -> RoleReport:
    gradients: list[Tensors] = []
    apply = role.apply

    def apply_and_record(lr: float) -> StepOutcome:
        gradients.append(_whole_gradients(role))
        return apply(lr)

    stats: list[Stats] = []
    with patch.object(role, "apply", apply_and_record):
        if case.offload_between:
            for step in plan.steps:
                _sleep(role)
                stats += role.train(batch, replace(plan, steps=(step,)), [case.lr])
        else:
            stats = role.train(batch, plan, [case.lr] * len(plan.steps))
    steps = [merge_stats(ranks).result() for ranks in zip(*_gathered(stats), strict=True)]
    weights = _whole(role, _data)
    return RoleReport(steps, gradients, weights, _replicas_equal(role))


def _held_bytes(role: MegatronRole) -> int:
    """Bytes of parameters, gradients, main parameters and moments, counted by storage without the product's own counter."""
    tensors = [tensor for model in role.models for p in model.parameters() for tensor in (p.data, p.main_grad)]
    for part in role.optimizer.chained_optimizers:
        tensors += [p.data for group in part.optimizer.param_groups for p in group["params"]]
        tensors += [value for state in part.optimizer.state.values() for value in state.values()]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().size() for t in tensors}.values())


def _sleep(role: MegatronRole) -> None:
    awake, counted = _held_bytes(role), role.memory.resident_bytes()
    role.memory.offload()
    role.memory.offload()  # a second one does nothing
    asleep = _held_bytes(role), role.memory.resident_bytes(), role.memory.awake
    role.memory.wake()
    role.memory.wake()
    if asleep != (0, 0, False) or not role.memory.awake or awake == 0 or not awake == counted == _held_bytes(role):
        raise AssertionError(
            f"held {awake} bytes awake, counted as {counted}, {asleep} asleep (bytes, bytes, awake), {_held_bytes(role)} after it"
        )


def iteration(case: Case, batch: RolloutBatch, plan: StepPlan, noise: float = 0.0) -> Report:
    """Log-probs, advantages, and all planned steps of both roles.

    `noise` moves old log-probs and values after they were computed, alike in every layout, so that ratios and values of the
    very first step reach their clips.
    """
    actor, critic = _start(case) if case.ppo.needs_critic else (_start_actor(case), None)
    if case.offload_between:  # before the first step there is no optimizer state yet
        for role in (actor, critic):
            _sleep(role)
    batch, log_prob_stats = _merged(batch, *actor.compute_log_probs(batch))
    batch, advantage_stats = _merged(batch, *(critic or actor).compute_advantages(batch, case.ppo.kl_coef))
    scored = batch
    if noise:
        rng = np.random.default_rng(9)
        moved = {
            name: filled(getattr(batch, name)) + (noise * rng.standard_normal(len(batch.loss_mask))).astype(np.float32)
            for name in ("old_log_probs", "values")
            if getattr(batch, name) is not None
        }
        batch = batch.with_columns(**moved)
    names = ("old_log_probs", "old_full_log_probs", "ref_log_probs", "entropy", "values", "bootstrap_values")
    names += ("token_rewards", "returns", "advantages", "rollout_weights", "rejected")
    columns = {name: getattr(scored, name).astype(np.float32) for name in names if getattr(scored, name) is not None}
    critic_report = None if critic is None else _train(critic, batch, plan, case)
    return Report(columns, log_prob_stats, advantage_stats, _train(actor, batch, plan, case), critic_report)


@dataclass(frozen=True)
class MatrixRun:
    """Several rollouts in one layout. `metrics` of each rollout: one dictionary per pass and step, as the driver would log them;
    `gradients` and `weights` (after each rollout) are whole HF tensors by role and name, on rank 0 alone."""

    metrics: list[list[dict[str, float]]]
    gradients: Tensors
    weights: list[Tensors]
    replicas_equal: bool
    seconds_per_step: float


def rollouts(case: Case, batches: Sequence[RolloutBatch], plan: StepPlan) -> MatrixRun | None:
    """Whole PPO rollouts one after the other, with the gradients of the very first step of both roles."""
    roles: tuple[ActorRole, CriticRole] = _start(case)
    actor, critic = roles
    metrics, weights, gradients, seconds = [], [], {}, []
    for batch in batches:
        batch, log_prob_stats = _merged(batch, *actor.compute_log_probs(batch))
        batch, advantage_stats = _merged(batch, *critic.compute_advantages(batch, case.ppo.kl_coef))
        found = [log_prob_stats, advantage_stats]
        for role in (critic, actor):
            if not gradients.keys() >= {role.table.head}:
                gradients[role.table.head] = _first_gradients(role, batch, plan)
            start = time.perf_counter()
            stats = role.train(batch, plan, [case.lr] * len(plan.steps))
            seconds.append((time.perf_counter() - start) / len(plan.steps))
            found += [merge_stats(ranks).result() for ranks in zip(*_gathered(stats), strict=True)]
        metrics.append(found)
        weights.append({f"{role.table.head} {name}": t for role in roles for name, t in _whole(role, _data).items()})
    equal = all(_replicas_equal(role) for role in roles)
    if dist.get_rank() > 0:
        return None
    flat = {f"{head} {name}": tensor for head, of_role in gradients.items() for name, tensor in of_role.items()}
    return MatrixRun(metrics, flat, weights, equal, min(seconds))


def _data(parameter: torch.nn.Parameter) -> torch.Tensor:
    return parameter.data


def _first_gradients(role: ActorRole | CriticRole, batch: RolloutBatch, plan: StepPlan) -> Tensors:
    """Gradients of the first step; the weights stay as they are."""
    found: list[Tensors] = []

    def only_record(lr: float) -> StepOutcome:
        found.append(_whole_gradients(role))
        return StepOutcome(grad_norm=1.0, stepped=False)

    with patch.object(role, "apply", only_record):
        role.train(batch, replace(plan, steps=plan.steps[:1]), [0.0])
    return found[0]


def train_columns(case: Case, batch: RolloutBatch, plan: StepPlan) -> tuple[RoleReport, RoleReport]:
    """(actor, critic) trained on the columns that `batch` brings."""
    actor, critic = _start(case)
    return _train(actor, batch, plan, case), _train(critic, batch, plan, case)


def train_actor_steps(case: Case, batch: RolloutBatch, plan: StepPlan) -> list[dict[str, float]]:
    """What this rank alone reports of the actor's steps."""
    actor, _ = _start(case)
    return [stats.result() for stats in actor.train(batch, plan, [case.lr] * len(plan.steps))]


def log_probs(case: Case, batch: RolloutBatch) -> dict[str, np.ndarray]:
    """The columns of this rank's samples that the pass over log-probs makes."""
    return score(case, batch)[0]


def score(case: Case, batch: RolloutBatch) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Columns and statistics of the pass over log-probs on this rank."""
    part, stats = _start_actor(case).compute_log_probs(batch)
    return {} if part is None else dict(part.columns), stats.result()


def advantages(case: Case, batch: RolloutBatch) -> None:
    _, critic = _start(case)
    critic.compute_advantages(batch, case.ppo.kl_coef)


def advantage_columns(case: Case, batch: RolloutBatch) -> dict[str, np.ndarray]:
    """What this rank makes of a rollout whose log-probs are known, without a critic."""
    part, _ = _start_actor(case).compute_advantages(batch, case.ppo.kl_coef)
    return {} if part is None else dict(part.columns)


def advantage_stats(case: Case, batch: RolloutBatch) -> dict[str, float]:
    """The statistics of the same."""
    return _start_actor(case).compute_advantages(batch, case.ppo.kl_coef)[1].result()


def logits(case: Case, batch: RolloutBatch) -> np.ndarray:
    """Logits [N, V] at the positions that predict the response tokens, the padding of the vocabulary cut off."""
    return _logits(_start(case)[0], batch)


def _logits(actor: ActorRole, batch: RolloutBatch) -> np.ndarray:
    micro_batches = actor.micro_batches(batch, np.arange(batch.num_samples))

    def whole(micro_batch: MicroBatch, own: torch.Tensor) -> dict[str, torch.Tensor]:
        found = gather_from_tensor_model_parallel_region(own[micro_batch.positions])
        return {str(token): found[:, token] for token in range(actor.shape.vocab_size)}

    columns = _in_batch_order(batch, actor.columns(micro_batches, whole))
    return np.stack([columns[str(token)] for token in range(actor.shape.vocab_size)], 1)


def _in_batch_order(batch: RolloutBatch, part: ColumnPart) -> Tensors:
    """Per-token columns of the samples of all data-parallel ranks."""
    parts = gather_objects(part, data_parallel_group())
    order = np.argsort(batch.flat_index(np.concatenate([one.rows for one in parts]), "response_token"))
    return {name: np.concatenate([one.columns[name] for one in parts])[order] for name in part.columns}


def logits_values_and_export(case: Case, batch: RolloutBatch, bucket_bytes: int) -> tuple[np.ndarray, np.ndarray, Tensors]:
    """(`logits`, the critic's values [N] at the same positions, the actor's exported tensors)."""
    actor, critic = _start(case)
    micro_batches = critic.micro_batches(batch, np.arange(batch.num_samples))
    part = critic.columns(micro_batches, lambda one, out: {"values": out.reshape(-1)[one.positions]})
    values = _in_batch_order(batch, part)["values"]
    exporter = _exporter(actor)
    exported: Tensors = {}
    for bucket in plan_buckets(exporter.specs, bucket_bytes):
        exported |= {name: tensor.numpy() for name, tensor in exporter.gather(bucket).items()}
    return _logits(actor, batch), values, exported


def export(case: Case, bucket_bytes: int) -> tuple[list[Tensors], list[str]]:
    """The actor's tensors bucket by bucket, and the names of the manifest."""
    exporter = _exporter(_start(case)[0])
    buckets = [exporter.gather(bucket) for bucket in plan_buckets(exporter.specs, bucket_bytes)]
    return [{name: tensor.numpy() for name, tensor in bucket.items()} for bucket in buckets], [s.name for s in exporter.specs]


def save(case: Case, folders: Mapping[str, str], bucket_bytes: int) -> None:
    """Both roles' HF folders."""
    for role in _start(case):
        kind = "actor" if isinstance(role, ActorRole) else "critic"
        save_hf_folder(
            _exporter(role),
            folders[kind],
            source=role.settings.model.hf_folder,
            bucket_bytes=bucket_bytes,
            writes=role.settings.rank.rank == 0,
        )


def _exporter(role: MegatronRole) -> WeightExporter:
    return WeightExporter(role.models, role.table, role.layout)


def reference_swap(case: Case) -> tuple[bool, bool, int]:
    """(the weights are those of before after the swap, they differ inside it, number of parameters)."""
    actor, _ = _start(case)
    before = {name: parameter.detach().clone() for name, parameter in actor.models[0].named_parameters()}

    def equal() -> bool:
        return all(torch.equal(parameter, before[name]) for name, parameter in actor.models[0].named_parameters())

    if actor.reference is None:
        raise AssertionError("the case keeps no reference")
    try:
        with actor.reference.swapped_in():
            inside = equal()
            raise KeyError("a pass that fails must not leave the reference in the policy's place")
    except KeyError:
        return equal(), not inside, len(before)


def parallel_ranks(layout: ParallelLayout) -> dict[str, tuple[int, int]]:
    """(our number, Megatron's) of this rank by dimension, sizes too."""
    init_parallel_state(layout, 1, timeout_s=60.0)
    rank, mpu = dist.get_rank(), parallel_state
    return {
        "tp_rank": (layout.tp_rank(rank), mpu.get_tensor_model_parallel_rank()),
        "cp_rank": (layout.cp_rank(rank), mpu.get_context_parallel_rank()),
        "dp_rank": (layout.dp_rank(rank), mpu.get_data_parallel_rank()),
        "pp_rank": (layout.pp_rank(rank), mpu.get_pipeline_model_parallel_rank()),
        "ep_rank": (layout.ep_rank(rank), mpu.get_expert_model_parallel_rank()),
        "etp_rank": (layout.etp_rank(rank), mpu.get_expert_tensor_parallel_rank()),
        "cp_size": (layout.cp_size, mpu.get_context_parallel_world_size()),
        "dp_size": (layout.dp_size, mpu.get_data_parallel_world_size()),
        "pp_size": (layout.pp_size, mpu.get_pipeline_model_parallel_world_size()),
        "ep_size": (layout.ep_size, mpu.get_expert_model_parallel_world_size()),
        "expert_dp_size": (layout.expert_dp_size, mpu.get_expert_data_parallel_group().size()),
    }


def collective_timeouts(case: Case) -> set[float]:
    """Seconds after which a collective of the actor gives up, over the groups of all ranks, of stages, and of copies."""
    _start_actor(case)
    tied, copies = parallel_state.get_embedding_group(), parallel_state.get_data_parallel_group(with_context_parallel=True)
    groups = [dist.group.WORLD, parallel_state.get_pipeline_model_parallel_group(), tied, copies]
    return {group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups}


def padded_sizes(sizes: Sequence[tuple[int, int, int]]) -> list[int]:
    return [padded_vocab_size(vocab, divisible_by=by, tp_size=tp) for vocab, by, tp in sizes]


def load_weights(case: Case, changes: Mapping[str, tuple[int, ...] | None], head: str) -> str:
    """Load the folder with some tensors replaced by zeros of another shape, added, or (None) left out; the error's text."""
    role = _start(case)[0 if head == "language_model" else 1]
    weights = dict(HfWeights(role.settings.model.hf_folder))
    for name, shape in changes.items():
        if shape is None:
            del weights[name]
        else:
            weights[name] = torch.zeros(shape)
    try:
        load_hf_weights(
            role.models,
            role.table,
            weights,
            layout=role.layout,
            source="the folder",
            keeps_missing_head=case.init_value_head is not None,
        )
    except ConversionError as error:
        return str(error)
    return ""


def value_head_after_loading_without_one(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """(the critic's head, its values) when the folder is a policy's."""
    _, critic = _start(case)
    part = critic.columns(
        critic.micro_batches(make_batch(), np.arange(7)), lambda one, out: {"values": out.reshape(-1)[one.positions]}
    )
    return critic.models[0].output_layer.weight.detach().numpy().copy(), part.columns["values"]


def second_role_of_another_layout(case: Case, tp_size: int) -> str:
    """What a critic that shares this process with the actor is told when its tensor-parallel size is another."""
    actor, rank = _start_actor(case), dist.get_rank()
    settings = case.settings(rank, "critic")
    layout = replace(settings.layout, tp_size=tp_size)
    shared = replace(settings, layout=layout, rank=replace(settings.rank, init_method=STANDING_GROUP))
    try:
        CriticRole(shared, case.ppo)
    except ParallelError as error:
        return str(error)
    return f"no error beside {type(actor).__name__}"
