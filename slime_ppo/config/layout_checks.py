"""Parallel sizes that cannot be, or that a model does not allow. Every message names the two numbers that disagree."""

import math
import re
from importlib.metadata import PackageNotFoundError, version

from slime_ppo.config.checked import Checked
from slime_ppo.config.model_shape import ModelShape, MoeShape
from slime_ppo.config.roles import RoleSettings
from slime_ppo.errors import ConfigError


def check_layout(checked: Checked) -> None:
    """Refuse sizes that do not split the ranks of a role, whatever its model. Raises ConfigError."""
    if not checked.config.trains:
        return
    for role in checked.config.roles:
        _check_ranks(checked.config.role(role))
    parallel = checked.config.parallel
    widest = max(checked.config.role(role).tp_size for role in checked.config.roles)
    if parallel.sequence_parallel is False and widest > 1:
        raise ConfigError(
            f"--no-sequence-parallel with tensor-parallel size {widest}: not in this version, where tensor parallelism always "
            "comes with sequence parallelism. Leave the option out"
        )
    if parallel.sequence_parallel and widest == 1:
        raise ConfigError(
            f"{checked.cite('parallel.sequence_parallel')} with tensor-parallel size 1 in every role: there is nothing to split. "
            "Leave it out, or raise --tensor-model-parallel-size"
        )


def check_layout_of_model(settings: RoleSettings, shape: ModelShape) -> None:
    """Refuse sizes that do not split the layers, heads or columns of the role's model. Raises ConfigError."""
    prefix = _prefix(settings)
    split = {"attention heads": shape.num_attention_heads, "key-value heads": shape.num_query_groups}
    if shape.moe is None:
        split["FFN columns"] = shape.ffn_hidden_size
        _check_dense(settings)
    else:
        _check_experts(settings, shape.moe)
    for what, count in split.items():
        if count % settings.tp_size:
            counts = math.gcd(*split.values())
            works = [size for size in range(1, settings.tp_size) if not counts % size]
            raise ConfigError(
                f"{prefix}tensor-model-parallel-size {settings.tp_size} of the {settings.role} does not divide the {count} {what} "
                f"of {settings.hf_folder}. Use {_either(works)}"
            )
    stages = settings.pp_size * settings.vpp_size
    if shape.num_layers % stages:
        virtual = f" x {prefix}num-virtual-stages-per-pipeline-rank {settings.vpp_size} = {stages} stages"
        works = [size for size in range(1, shape.num_layers + 1) if not shape.num_layers % size]
        raise ConfigError(
            f"{prefix}pipeline-model-parallel-size {settings.pp_size}{virtual if settings.vpp_size > 1 else ''} of the "
            f"{settings.role} does not divide the {shape.num_layers} layers of {settings.hf_folder}. Use {_either(works)} stages"
        )


def _check_dense(settings: RoleSettings) -> None:
    if settings.ep_size > 1 or settings.etp_size != settings.tp_size:
        name, size = ("model", settings.ep_size) if settings.ep_size > 1 else ("tensor", settings.etp_size)
        raise ConfigError(
            f"{_prefix(settings)}expert-{name}-parallel-size {size} of the {settings.role}, but "
            f"{settings.hf_folder} has 0 experts: leave the expert-parallel sizes of a dense model out"
        )


def _check_experts(settings: RoleSettings, moe: MoeShape) -> None:
    prefix = _prefix(settings)
    for name, size, what, count in (
        ("model", settings.ep_size, "experts", moe.num_experts),
        ("tensor", settings.etp_size, "FFN columns of an expert", moe.ffn_hidden_size),
    ):
        if count % size:
            works = [fewer for fewer in range(1, size) if not count % fewer]
            raise ConfigError(
                f"{prefix}expert-{name}-parallel-size {size} of the {settings.role} does not divide the {count} {what} of "
                f"{settings.hf_folder}. Use {_either(works)}"
            )
    if settings.ep_size == 1 and settings.etp_size != settings.tp_size and not _tells_experts_apart():
        raise ConfigError(
            f"{prefix}expert-tensor-parallel-size {settings.etp_size} of the {settings.role} differs from "
            f"{prefix}tensor-model-parallel-size {settings.tp_size} while {prefix}expert-model-parallel-size is 1: there "
            f"megatron-core {_megatron_version()} sums the gradients of experts over the wrong ranks, silently. Use "
            f"{prefix}expert-model-parallel-size 2 or more, {prefix}expert-tensor-parallel-size {settings.tp_size} (the default), "
            "or megatron-core 0.19 or later"
        )


def _tells_experts_apart() -> bool:
    """The installed megatron-core gives experts their own groups by EP > 1 or ETP != TP; before 0.19 it looked at EP alone."""
    numbers = re.match(r"(\d+)\.(\d+)", _megatron_version())
    return numbers is not None and (int(numbers[1]), int(numbers[2])) >= (0, 19)


def _megatron_version() -> str:
    try:
        return version("megatron-core")
    except PackageNotFoundError:
        return "(not installed here)"


def _check_ranks(settings: RoleSettings) -> None:
    prefix = _prefix(settings)
    _check_split(settings, {"tensor-model-parallel-size": settings.tp_size, "context-parallel-size": settings.cp_size})
    if settings.num_nodes > 1 and settings.num_ranks_per_node % settings.tp_size:
        raise ConfigError(_straddling_groups(settings))
    _check_split(settings, {"expert-tensor-parallel-size": settings.etp_size, "expert-model-parallel-size": settings.ep_size})
    if settings.vpp_size > 1 and settings.pp_size == 1:
        flag = f"{prefix}num-virtual-stages-per-pipeline-rank"
        raise ConfigError(
            f"{flag} {settings.vpp_size} of the {settings.role} needs a pipeline, and {prefix}pipeline-model-parallel-size is 1. "
            f"Raise that to 2 or more, or use {flag} 1"
        )


def _check_split(settings: RoleSettings, sizes: dict[str, int]) -> None:
    """The ranks must divide by the product of `sizes` (flag without its prefix -> size) and the pipeline stages."""
    sizes = sizes | {"pipeline-model-parallel-size": settings.pp_size}
    needed = math.prod(sizes.values())
    if not settings.num_ranks % needed:
        return
    shown = [f"{_prefix(settings)}{name} {size}" for name, size in sizes.items() if size > 1]
    flag = _rank_prefix(settings)
    works = [size for size in range(1, settings.num_ranks + 1) if not settings.num_ranks % size]
    raise ConfigError(
        f"the {settings.role} has {settings.num_ranks} ranks ({flag}num-nodes {settings.num_nodes} x {flag}num-gpus-per-node "
        f"{settings.num_ranks_per_node}), which {' x '.join(shown)}{f' = {needed}' if len(shown) > 1 else ''} does not divide. Use "
        f"{_either(works)}, or {-(-settings.num_ranks // needed) * needed} ranks"
    )


def _straddling_groups(settings: RoleSettings) -> str:
    """Why the role's tensor-parallel groups do not fit on its nodes, and what would do."""
    prefix, flag = _prefix(settings), _rank_prefix(settings)
    works = [size for size in range(1, settings.tp_size) if not settings.num_ranks_per_node % size and not settings.tp_size % size]
    return (
        f"{prefix}tensor-model-parallel-size {settings.tp_size} does not divide the {settings.num_ranks_per_node} ranks of the "
        f"{settings.role} on each of {settings.num_nodes} nodes ({flag}num-gpus-per-node): a tensor-parallel group would lie on "
        f"two nodes, and its traffic on the network. Use {_either(works)}, or a multiple of {settings.tp_size} ranks per node"
    )


def _prefix(settings: RoleSettings) -> str:
    return "--critic-" if settings.role == "critic" else "--"


def _rank_prefix(settings: RoleSettings) -> str:
    return "--critic-" if settings.role == "critic" else "--actor-"


def _either(sizes: list[int]) -> str:
    return " or ".join(map(str, sizes))
