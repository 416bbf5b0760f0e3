"""What a training run needs of memory, rank by rank and part by part, and which layouts fit so many GPUs.

python tools/plan_memory.py --config configs/qwen3-4b_8gpu.yaml
python tools/plan_memory.py --config configs/qwen3-4b_8gpu.yaml --num-gpus 16 --gpu-memory-gb 80
python tools/plan_memory.py --hf-checkpoint models/Qwen3-4B/config.json --num-gpus 8 --gpu-memory-gb 80 --dtype bfloat16 \\
    --rollout-engine sglang --rollout-max-response-len 4096 --use-dynamic-batch-size --max-tokens-per-gpu 8192

Every flag of scripts/train_ppo.py works, with its defaults: the batch, the lengths, recomputation and the layout are the run's.
Of the model its config.json is read; weights, prompts and devices are not needed. Without --num-gpus the numbers are those of
--dry-run for the layout that is given. With it every tensor x pipeline x context x expert x data-parallel layout of the actor is
tried, with the critic as --critic-... flags lay it out, or without those in the cheapest layout that fits beside it. Parameters,
gradients and optimizer are exact, activations and logits rough.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from slime_ppo.config.cli import parse_config
from slime_ppo.config.device_peak import DevicePlan
from slime_ppo.config.dry_run import aligned, memory_text, size_text
from slime_ppo.config.layout_search import Candidate, candidates, layout_cost
from slime_ppo.config.model_shape import ModelShape
from slime_ppo.config.resident_memory import num_params
from slime_ppo.config.roles import RoleName
from slime_ppo.config.root import Config
from slime_ppo.errors import CheckpointError, ConfigError
from slime_ppo.parallel.layout import ParallelLayout

_GIB = 2**30
_NEAREST = 10


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0, 1 when no layout fits, 2 for options or a model that cannot be."""
    try:
        given, of_run = _parser().parse_known_args(argv)
        config = parse_config(["--prompt-data", "not read here", *of_run]).config
        shapes = _shapes(config)
        if given.num_gpus is None:
            if given.gpu_memory_gb is not None:
                raise ConfigError("--gpu-memory-gb is used only with --num-gpus. Add that, or leave it out")
            print(f"{_run_text(config, shapes)}\n{memory_text(config, shapes)}", end="")
            return 0
        if given.gpu_memory_gb is None:
            raise ConfigError("--num-gpus needs --gpu-memory-gb, the memory of each of them")
        room = round((given.gpu_memory_gb - given.reserve_gb) * _GIB)
        found = candidates(config, shapes, num_gpus=given.num_gpus, gpus_per_node=given.gpus_per_node, room=room)
    except (ConfigError, CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    fitting = [one for one in found if one.plan is not None and one.plan.peak <= room]
    ranks_per_node = min(given.num_gpus, given.gpus_per_node)
    print(search_text(config, shapes, found, room=room, ranks_per_node=ranks_per_node, shows_all=given.all), end="")
    return 0 if fitting else 1


def search_text(
    config: Config,
    shapes: Mapping[RoleName, ModelShape],
    found: Sequence[Candidate],
    *,
    room: int,
    ranks_per_node: int,
    shows_all: bool,
) -> str:
    """Layouts that fit into `room` bytes a device, the cheapest first, and why the others do not."""
    planned = [(one, one.plan) for one in found if one.plan is not None]
    fitting = sorted((row for row in planned if row[1].peak <= room), key=lambda row: (layout_cost(row[0].layout), row[1].peak))
    larger = sorted((row for row in planned if row[1].peak > room), key=lambda row: row[1].peak)
    parts = [_run_text(config, shapes)]
    head = f"{len(fitting)} of {len(found)} layouts fit into {size_text(room)} a GPU"
    order = "; those that send least between GPUs come first, then those with most room" if len(fitting) > 1 else ""
    parts.append(head + order + "\n" + (_table(fitting, room, ranks_per_node) if fitting else ""))
    if larger:
        shown = larger if shows_all else larger[:_NEAREST]
        more = (
            f"and {len(larger) - len(shown)} more, up to {size_text(larger[-1][1].peak)} (--all)\n" if larger[len(shown) :] else ""
        )
        parts.append(f"{len(larger)} need more memory, the nearest first\n{_table(shown, room, ranks_per_node)}{more}")
    refused = _by_problem(found)
    if refused:
        lines = [f"{reason}\n  {'; '.join(names)}" for reason, names in refused.items()]
        parts.append(f"{sum(map(len, refused.values()))} cannot be\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


def _table(rows: Sequence[tuple[Candidate, DevicePlan]], room: int, ranks_per_node: int) -> str:
    roles = list(rows[0][1].roles)
    has_experts = any(one.layout.ep_size > 1 for one, _ in rows)
    own_critic = ["critic at"] if any(one.critic is not None for one, _ in rows) else []
    cells = [(*_sizes(rows[0][0].layout, has_experts=has_experts), *own_critic, *roles, "rollout", "device", "room", "host/node",
              "fullest when")]  # fmt: skip
    for one, plan in rows:
        sizes = _sizes(one.layout, has_experts=has_experts).values()
        critic = [_name(one.critic or one.layout)] if own_critic else []
        totals = [plan.roles[role].total for role in roles] + [plan.engine, plan.peak]
        left, host = room - plan.peak, plan.host * ranks_per_node
        numbers = [*map(size_text, totals), f"{left / _GIB:+.1f} GiB", size_text(host)]
        cells.append((*map(str, sizes), *critic, *numbers, _largest(plan)))
    return aligned(cells)


def _sizes(lay: ParallelLayout, *, has_experts: bool) -> dict[str, int]:
    experts = {"EP": lay.ep_size, "ETP": lay.etp_size} if has_experts else {}
    return {"TP": lay.tp_size, "CP": lay.cp_size, "PP": lay.pp_size} | experts | {"DP": lay.dp_size}


def _largest(plan: DevicePlan) -> str:
    """When a device is fullest, and by what."""
    role = next((role for role in plan.roles if plan.phase.startswith(f"{role} trains")), None)
    if role is None:
        return plan.phase
    one = plan.roles[role]
    parts = {
        "params": one.resident.params,
        "grads": one.resident.grads,
        "main params and moments": one.resident.main_params + one.resident.moments,
        "activations": one.activations,
        "logits": one.logits,
    }
    largest = max(parts, key=lambda name: parts[name])
    return f"{plan.phase}: {largest} {size_text(parts[largest])}"


def _by_problem(found: Sequence[Candidate]) -> dict[str, list[str]]:
    """Names of the refused layouts by the reason, without the advice behind it."""
    reasons: dict[str, list[str]] = {}
    for one in found:
        if one.plan is None:
            reasons.setdefault(one.problem.split(". ")[0], []).append(_name(one.layout))
    return reasons


def _name(lay: ParallelLayout) -> str:
    sizes = {name: size for name, size in _sizes(lay, has_experts=lay.ep_size > 1).items() if size > 1}
    if lay.etp_size != lay.tp_size:
        sizes["ETP"] = lay.etp_size
    return " ".join(f"{name}{size}" for name, size in sizes.items()) or "one rank"


def _run_text(config: Config, shapes: Mapping[RoleName, ModelShape]) -> str:
    """What the numbers are of."""
    batch = config.batch
    tokens = f"up to {batch.max_tokens_per_gpu} tokens" if batch.use_dynamic_batch_size else f"{batch.micro_batch_size} samples"
    models = ", ".join(f"{role} {config.role(role).hf_folder}" for role in shapes)
    size = f"{num_params(shapes['actor']) / 1e9:.2f} B parameters"
    return (
        f"{models}: {size}\n{config.model.dtype}, {config.rollout.engine}, samples of up to {config.max_sample_tokens} tokens, "
        f"{batch.global_batch_size} a step, micro-batches of {tokens}\n"
    )


def _shapes(config: Config) -> dict[RoleName, ModelShape]:
    roles: set[RoleName] = {"actor", *config.roles}
    folders = {role: Path(config.role(role).hf_folder) for role in sorted(roles)}
    return {role: ModelShape.from_hf_folder(path.parent if path.is_file() else path) for role, path in folders.items()}


def _whole(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def _gib(text: str) -> float:
    number = float(text)
    if not 0 <= number < float("inf"):
        raise ValueError
    return number


class _Parser(argparse.ArgumentParser):
    """argparse that raises our error instead of ending the process."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise ConfigError(f"command line: {message}. `--help` lists the flags")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        usage="%(prog)s [--num-gpus N --gpu-memory-gb M] [flags of scripts/train_ppo.py]",
        epilog="Exit code 0, 1 when no layout fits, 2 for options or a model that cannot be. `scripts/train_ppo.py --help` lists "
        "its flags.",
    )
    parser.add_argument("--num-gpus", type=_whole, metavar="N", help="try every layout of so many GPUs for each trained role")
    parser.add_argument("--gpu-memory-gb", type=_gib, metavar="M", help="memory of a GPU in GiB, such as 80")
    parser.add_argument("--gpus-per-node", type=_whole, default=8, metavar="N", help="a tensor-parallel group stays on a node [8]")
    parser.add_argument(
        "--reserve-gb", type=_gib, default=8.0, metavar="M",
        help="GiB of each GPU for CUDA, communication buffers, fragmentation and what an engine computes with [8]",
    )  # fmt: skip
    parser.add_argument("--all", action="store_true", help="show every layout that needs more memory, not the nearest ten")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
