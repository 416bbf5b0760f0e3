"""Every way to lay a model over so many devices: which are allowed, and what a device then holds. Arithmetic, no device."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from slime_ppo.config.checks import check_config, check_model_shape
from slime_ppo.config.device_peak import DevicePlan, device_plan, engine_needs, plan_of_roles
from slime_ppo.config.memory_plan import MemoryEstimate
from slime_ppo.config.model_shape import ModelShape
from slime_ppo.config.roles import RoleName
from slime_ppo.config.root import Config
from slime_ppo.errors import ConfigError
from slime_ppo.parallel.layout import ParallelLayout

_CRITIC_SIZES = (
    "num_nodes", "num_gpus_per_node", "tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size",
    "num_virtual_stages_per_pipeline_rank", "expert_model_parallel_size", "expert_tensor_parallel_size",
)  # fmt: skip


@dataclass(frozen=True)
class Candidate:
    """A layout of the actor with what its fullest device holds, or with `problem`, why the run's checks refuse it (then `plan` is
    None). `critic` is the critic's layout, None where it has the actor's or there is no critic."""

    layout: ParallelLayout
    plan: DevicePlan | None
    problem: str = ""
    critic: ParallelLayout | None = None


def candidates(
    config: Config, shapes: Mapping[RoleName, ModelShape], *, num_gpus: int, gpus_per_node: int, room: int
) -> list[Candidate]:
    """Every layout of `num_gpus` ranks for the actor, without virtual stages. What a run would refuse its own checks refuse here.

    Sizes of the critic that `config` gives stay, and those it leaves out are the actor's. Where it gives none the critic has, of
    the layouts that both roles may have, the cheapest (`layout_cost`) with which a device keeps within `room` bytes, or else the
    one with which it is least full. `shapes` of every role in `config.roles`.

    Raises ConfigError where the devices do not make whole nodes.
    """
    per_node = min(num_gpus, gpus_per_node)
    if num_gpus % per_node:
        raise ConfigError(f"{num_gpus} GPUs are no whole number of nodes of {per_node}; expected a multiple of that")
    tried = [_with_layout(config, layout, per_node) for layout in layouts(num_gpus, has_experts=shapes["actor"].moe is not None)]
    found = [_candidate(one, shapes) for one in tried]
    if "critic" not in shapes or _critic_is_given(config):
        return found
    # the roles' estimates do not depend on each other, and the engine's on neither layout
    engine = engine_needs(tried[0], shapes["actor"])
    critics = [(one.layout, one.plan.roles["critic"]) for one in sorted(found, key=_cost_of_candidate) if one.plan is not None]
    return [_with_best_critic(config, one, critics, engine=engine, room=room) for one in found]


def layout_cost(layout: ParallelLayout) -> tuple[int, ...]:
    """Ranks that work on one sample, all of which send each other activations; of them pipeline stages idle as well."""
    return layout.tp_size * layout.cp_size * layout.pp_size, layout.pp_size, layout.ep_size * layout.etp_size, layout.tp_size


def _cost_of_candidate(one: Candidate) -> tuple[int, ...]:
    return layout_cost(one.layout)


def _candidate(tried: Config, shapes: Mapping[RoleName, ModelShape]) -> Candidate:
    layout = tried.role("actor").layout
    try:
        check_config(tried)
        for role, shape in shapes.items():
            check_model_shape(tried, shape, role)
    except ConfigError as error:
        return Candidate(layout, None, str(error))
    critic = tried.role("critic").layout if "critic" in shapes else layout
    return Candidate(layout, device_plan(tried, shapes), critic=None if critic == layout else critic)


def _with_best_critic(
    config: Config,
    one: Candidate,
    critics: Sequence[tuple[ParallelLayout, MemoryEstimate]],
    *,
    engine: tuple[int, int],
    room: int,
) -> Candidate:
    if one.plan is None:
        return one
    actor = one.plan.roles["actor"]
    best: tuple[ParallelLayout, DevicePlan] | None = None
    for layout, estimate in critics:
        plan = plan_of_roles(config, {"actor": actor, "critic": estimate}, engine)
        if best is None or plan.peak < best[1].peak:
            best = layout, plan
        if plan.peak <= room:
            break
    assert best is not None, "the candidate itself is among them"
    return replace(one, plan=best[1], critic=None if best[0] == one.layout else best[0])


def _critic_is_given(config: Config) -> bool:
    return any(value is not None for value in (vars(config.critic)[name] for name in _CRITIC_SIZES))


def layouts(num_ranks: int, *, has_experts: bool) -> Iterator[ParallelLayout]:
    """Sizes that split `num_ranks`; each expert lies on one rank, or on as many as the other matrices."""
    for tp_size in _divisors(num_ranks):
        for cp_size in _divisors(num_ranks // tp_size):
            for pp_size in _divisors(num_ranks // (tp_size * cp_size)):
                for etp_size in sorted({1, tp_size}) if has_experts else [tp_size]:
                    for ep_size in _divisors(num_ranks // (pp_size * etp_size)) if has_experts else (1,):
                        yield ParallelLayout(num_ranks, tp_size, cp_size, pp_size, 1, ep_size, etp_size)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if not number % size]


def _with_layout(config: Config, layout: ParallelLayout, per_node: int) -> Config:
    """The config with this layout for the actor and whatever follows it."""
    parallel = replace(
        config.parallel,
        actor_num_nodes=layout.num_ranks // per_node,
        actor_num_gpus_per_node=per_node,
        tensor_model_parallel_size=layout.tp_size,
        context_parallel_size=layout.cp_size,
        pipeline_model_parallel_size=layout.pp_size,
        num_virtual_stages_per_pipeline_rank=1,
        expert_model_parallel_size=layout.ep_size,
        expert_tensor_parallel_size=None if layout.etp_size == layout.tp_size else layout.etp_size,
        sequence_parallel=None,
    )
    return replace(config, parallel=parallel)
