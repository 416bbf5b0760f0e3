"""What `--dry-run` prints: batch plan, placement, memory estimate, where the run starts. No device is touched."""

import itertools
from collections.abc import Iterator, Mapping, Sequence

from slime_ppo.config.batch_plan import batch_plan_text
from slime_ppo.config.checks import config_warnings
from slime_ppo.config.device_peak import device_plan
from slime_ppo.config.engine_checks import server_urls
from slime_ppo.config.launcher import LauncherName
from slime_ppo.config.memory_plan import MemoryEstimate, engine_memory, stage_memory
from slime_ppo.config.model_shape import ModelShape
from slime_ppo.config.roles import RoleName, RoleSettings
from slime_ppo.config.root import Config

_NO_ENGINE = "rollout engine: none, rollouts are read from files (--debug-train-only)"
_MEMORY_COLUMNS = ("params", "grads", "main params", "moments", "activations", "logits", "total", "host copies")


def dry_run_report(
    config: Config,
    shape: ModelShape,
    *,
    critic_shape: ModelShape | None = None,
    launcher: LauncherName = "ray",
    start: Sequence[str] = (),
) -> str:
    """The text of `--dry-run`; `critic_shape` only where the critic starts from another model. `start` are lines that say where
    the run would start, from what its files hold."""
    shapes: dict[RoleName, ModelShape] = {"actor": shape, "critic": critic_shape or shape}
    parts = [
        "Batch plan\n" + _indented(batch_plan_text(config)),
        "Placement\n" + _indented(placement_text(config, launcher)),
        "Memory per rank (activations and logits are rough)\n" + _indented(memory_text(config, shapes)),
    ]
    if start:
        parts.append("Start\n" + _indented("\n".join(start)))
    warnings = config_warnings(config)
    if warnings:
        parts.append("Warnings\n" + _indented("\n".join(warnings) + "\n"))
    return "\n".join(parts)


def bundle_tenants(config: Config) -> list[tuple[str, ...]]:
    """Who lives on each bundle of the placement group."""
    places = config.bundles
    return [
        tuple(
            _engine_part(config, bundle) if tenant == "rollout" else f"{tenant} rank {bundle - bundles.start}"
            for tenant, bundles in places.items()
            if bundle in bundles
        )
        for bundle in range(config.num_bundles)
    ]


def _engine_part(config: Config, bundle: int) -> str:
    """What of the rollout engine is on one of its bundles."""
    for number, bundles in enumerate(config.engine_bundles):
        if bundle in bundles:
            return f"SGLang server {number}" + (f" rank {bundle - bundles.start}" if len(bundles) > 1 else "")
    return "rollout engine"


def placement_text(config: Config, launcher: LauncherName) -> str:
    """The ranks of each role and how tenants use the devices; then a line per bundle, or without Ray per process."""
    roles = [config.role(role) for role in config.roles]
    head = [f"{one.role}: {one.num_ranks} rank{'' if one.num_ranks == 1 else 's'} = {_sizes(one)}" for one in roles]
    head.append(f"rollout engine: {_engine_text(config)}; {_sharing(config)}" if config.generates else _NO_ENGINE)
    if config.objective == "sft":
        head.pop()
    device = {"cuda": "1 CPU + 1 GPU", "cpu": "1 CPU", "auto": "1 CPU, + 1 GPU if there is one"}[config.cluster.device]
    place = "bundle" if launcher == "ray" else "process"
    lines = [f"{place} {index} ({device}): {', '.join(tenants)}" for index, tenants in enumerate(bundle_tenants(config))]
    return "\n".join(head + lines) + "\n"


def _engine_text(config: Config) -> str:
    """How many processes or servers generate, and of what size."""
    if config.rollout.engine == "embedded":
        return "1 process"
    own = len(config.engine_bundles)
    if own == 0:
        others = len(server_urls(config.sglang.server_urls))
        return f"{others} SGLang server{'' if others == 1 else 's'} that others have started (--sglang-server-urls)"
    return f"{own} SGLang server{'' if own == 1 else 's'} of TP {config.rollout.rollout_num_gpus_per_engine}"


def _sharing(config: Config) -> str:
    """Who uses the devices when."""
    if not config.trains:
        return "nothing else (--debug-rollout-only)"
    if not config.cluster.colocate:
        return "each has devices of its own" + (", critic and actor train side by side" if config.has_critic else "")
    if config.rollout.engine == "sglang" and not config.engine_bundles:
        return "the roles share their devices, " + ("one is awake at a time" if config.offloads else "all stay in memory")
    return "all share the devices, " + ("one is awake at a time" if config.offloads else "all stay in memory")


def _sizes(role: RoleSettings) -> str:
    """The factors of a role's ranks, in Megatron's rank order; those that are 1 are left out, but for TP and DP."""
    context = f" x CP {role.cp_size}" if role.cp_size > 1 else ""
    pipeline = f" x PP {role.pp_size}" if role.pp_size > 1 else ""
    virtual = f" ({role.vpp_size} virtual stages each)" if role.vpp_size > 1 else ""
    experts = f"; experts: ETP {role.etp_size} x EP {role.ep_size} x DP {role.layout.expert_dp_size}" if role.ep_size > 1 else ""
    return f"TP {role.tp_size}{context} x DP {role.dp_size}{pipeline}{virtual}{experts}"


def memory_text(config: Config, shapes: Mapping[RoleName, ModelShape]) -> str:
    """A row per role and distinct pipeline stage, one of the engine, and the most that a device holds at one time."""
    rows: list[tuple[str, ...]] = [("", *_MEMORY_COLUMNS)]
    for role in config.roles:
        stages = stage_memory(config, shapes[role], role)
        for label, one in _distinct_stages(stages):
            kept = one.resident
            parts = (kept.params, kept.grads, kept.main_params, kept.moments, one.activations, one.logits, one.total, one.host)
            rows.append((role + label, *map(size_text, parts)))
    if config.generates and (config.rollout.engine == "embedded" or config.engine_bundles):
        weights, cache = engine_memory(config, shapes["actor"])
        rows.append(("rollout", size_text(weights), "", "", "", f"{size_text(cache)} (KV)", "", size_text(weights + cache), ""))
    table = aligned(rows)
    if config.engine_bundles:
        table += (
            "rollout: a rank of a server, and the KV cache that a whole rollout would fill. SGLang reserves its cache by itself,\n"
            "on a GPU what --sglang-mem-fraction-static leaves to it\n"
        )
    plan = device_plan(config, shapes)
    return f"{table}a device at most: {size_text(plan.peak)} ({plan.phase})\n"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """A line per row, its cells at the right of their columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines) + "\n"


def _distinct_stages(stages: Sequence[MemoryEstimate]) -> Iterator[tuple[str, MemoryEstimate]]:
    """Neighbours that hold the same bytes as one, with the activations of the first of them, which has most in flight."""
    if len(stages) == 1:
        yield "", stages[0]
        return
    for _, group in itertools.groupby(range(len(stages)), lambda stage: (stages[stage].resident, stages[stage].logits)):
        first, *rest = group
        yield f" stage {first}" if not rest else f" stages {first}-{rest[-1]}", stages[first]


def size_text(num_bytes: int) -> str:
    """In GiB, or MiB below one."""
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:.1f} GiB"
    return f"{num_bytes / 2**20:.1f} MiB"


def _indented(text: str) -> str:
    return "".join(f"  {line}\n" for line in text.splitlines())
