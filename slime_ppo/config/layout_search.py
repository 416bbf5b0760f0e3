"""Every way to lay a model over so many devices: which are allowed, and what a device then holds. Arithmetic, no device."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from slime_ppo.config.checks import check_config, check_model_shape
from slime_ppo.config.device_peak import DevicePlan, device_plan
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
    """A layout with what its fullest device holds, or with `problem`, why the run's checks refuse it (then `plan` is None)."""

    layout: ParallelLayout
    plan: DevicePlan | None
    problem: str = ""


def candidates(config: Config, shapes: Mapping[RoleName, ModelShape], *, num_gpus: int, gpus_per_node: int) -> Iterator[Candidate]:
    """Every layout of `num_gpus` ranks for all trained roles alike, without virtual stages: the critic's own sizes in `config` are
    left out. `shapes` of every role in `config.roles`. What a run would refuse its own checks refuse here.

    Raises ConfigError where the devices do not make whole nodes.
    """
    per_node = min(num_gpus, gpus_per_node)
    if num_gpus % per_node:
        raise ConfigError(f"{num_gpus} GPUs are no whole number of nodes of {per_node}; expected a multiple of that")
    for layout in layouts(num_gpus, has_experts=shapes["actor"].moe is not None):
        tried = _with_layout(config, layout, per_node)
        try:
            check_config(tried)
            for role, shape in shapes.items():
                check_model_shape(tried, shape, role)
        except ConfigError as error:
            yield Candidate(layout, None, str(error))
        else:
            yield Candidate(layout, device_plan(tried, shapes))


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
    """The config with this layout for every trained role; the default number of rollout devices follows."""
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
    as_the_actor: dict[str, Any] = dict.fromkeys(_CRITIC_SIZES)
    return replace(config, parallel=parallel, critic=replace(config.critic, **as_the_actor))
