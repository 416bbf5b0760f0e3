"""Replay the training steps of a rollout file (--save-debug-rollout-data) in several layouts, on gloo ranks of this machine's CPU,
and compare: every layout should compute what the first one does.

    python tools/replay_step.py runs/dumps/rollout_0000000.npz --weights runs/models/glass-en --layouts 1 tp2 pp2 dp2-mbs1
    python tools/replay_step.py runs/dumps/rollout_0000003.npz --weights runs/a/hf --critic-weights runs/a/critic --num-steps 1

The file brings samples, columns, step plan and learning rates, and the config of its run; the weights are those that the rollout
started from, and the optimizer starts anew. A layout is a list of sizes: tp, cp, pp, dp, ep, etp, vpp (virtual stages) and mbs
(samples per micro-batch), as in tp2-dp2; 1 is one rank. "off by" is the largest error of a step's metrics relative to
max(|metric|, 0.1) of the first layout, "weights" the largest difference of a weight after the last step in units of the largest
learning rate.
Exit code 1 when a layout is beyond --tolerance or --weights-tolerance, 2 for input that cannot be replayed.
"""

import argparse
import math
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime_ppo.config.checks import check_config, check_model_shape
from slime_ppo.config.cli import merge_settings
from slime_ppo.config.critic import CriticConfig
from slime_ppo.config.debug import DebugConfig
from slime_ppo.config.hf_folder import check_weight_files
from slime_ppo.config.model_shape import ModelShape
from slime_ppo.config.roles import ROLE_NAMES, RoleName
from slime_ppo.config.root import Config
from slime_ppo.config.yaml_file import read_config_file
from slime_ppo.errors import ConfigError, DataError, SlimePpoError
from slime_ppo.rollout.dump import RolloutDump, TrainingDump, read_dump
from tools.layouts.memory import as_text

if TYPE_CHECKING:
    from tools.layouts.memory import Pool
    from tools.layouts.replay_ranks import Replayed

RANKS = "tools.layouts.replay_ranks"
TIMEOUT_S = 3600.0
_SIZES = ("tp", "cp", "pp", "dp", "ep", "etp", "vpp", "mbs")
_FLOOR = 0.1
_FITS = 0.05  # bfloat16 on another layout moves a log-prob by a few hundredths
_HEAD = ("role", "layout", "step", "loss", "grad norm", "off by", "weights")


@dataclass(frozen=True)
class Layout:
    """Sizes by name; `ranks` in one world."""

    name: str
    sizes: Mapping[str, int]

    @staticmethod
    def parse(text: str) -> "Layout":
        """Raises ConfigError for a text that is no list of sizes."""
        sizes = dict.fromkeys(_SIZES[:-1], 1)
        if text != "1":
            for part in text.split("-"):
                found = re.fullmatch(r"([a-z]+)([1-9]\d*)", part)
                if found is None or found[1] not in _SIZES:
                    raise ConfigError(
                        f"--layouts {text}: {part!r} is no size, expected some of {', '.join(_SIZES)} with a number, as in "
                        "tp2-dp2, or 1"
                    )
                sizes[found[1]] = int(found[2])
            if "etp" not in text:
                sizes["etp"] = sizes["tp"]
        return Layout(text, sizes)

    @property
    def num_ranks(self) -> int:
        return self.sizes["tp"] * self.sizes["cp"] * self.sizes["pp"] * self.sizes["dp"]


@dataclass(frozen=True)
class Tolerance:
    """`metrics` as in "off by"; `weights` in largest learning rates per step."""

    metrics: float
    weights: float


def config_of(dump: RolloutDump, file: Path, weights: Mapping[RoleName, str]) -> Config:
    """The config of the file's run, on this CPU and without an engine, with roles that start from `weights`."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as resolved:
        resolved.write(dump.header.config)
        resolved.flush()
        config, _ = merge_settings(read_config_file(resolved.name))
    actor = weights.get("actor", config.model.hf_checkpoint)
    model = replace(config.model, hf_checkpoint=actor, transformer_impl="auto")
    critic = CriticConfig(load=weights.get("critic"), lr=config.critic.lr, clip_grad=config.critic.clip_grad)
    cluster = replace(config.cluster, device="cpu", launcher="local", num_threads_per_rank=1)
    debug = DebugConfig(debug_train_only=True, load_debug_rollout_data=str(file.parent))
    return replace(config, model=model, critic=critic, cluster=cluster, debug=debug)


def laid_out(config: Config, layout: Layout) -> Config:
    """The config with both roles in this layout. Raises ConfigError for one that cannot be."""
    sizes = layout.sizes
    parallel = replace(
        config.parallel,
        actor_num_nodes=1,
        actor_num_gpus_per_node=layout.num_ranks,
        tensor_model_parallel_size=sizes["tp"],
        context_parallel_size=sizes["cp"],
        pipeline_model_parallel_size=sizes["pp"],
        num_virtual_stages_per_pipeline_rank=sizes["vpp"],
        expert_model_parallel_size=sizes["ep"],
        expert_tensor_parallel_size=sizes["etp"],
        sequence_parallel=None,
    )
    batch = config.batch
    if "mbs" in sizes:
        batch = replace(batch, micro_batch_size=sizes["mbs"], use_dynamic_batch_size=False, max_tokens_per_gpu=None)
    return replace(config, parallel=parallel, batch=batch)


def checked(config: Config, layout: Layout, roles: Sequence[RoleName]) -> Config:
    """`laid_out`, held against the models of the roles."""
    try:
        found = laid_out(config, layout)
        check_config(found)
        for role in roles:
            check_model_shape(found, ModelShape.from_hf_folder(found.role(role).hf_folder), role)
    except ConfigError as error:
        raise ConfigError(f"layout {layout.name}: {error}") from error
    return found


def training_of(dump: RolloutDump, weights: Mapping[RoleName, str], num_steps: int | None) -> TrainingDump:
    """What is replayed. Raises DataError when the file has not got that far, or its run did not train a role."""
    training = dump.training
    if training is None:
        raise DataError("the file holds samples only: it was saved before training had made its columns, or nothing was trained")
    for role in weights:
        if role not in training.learning_rates:
            raise DataError(f"the run did not train the {role} in rollout {dump.header.rollout_id}: leave its weights out")
    steps = training.plan.steps[:num_steps]
    rates = {role: rates[: len(steps)] for role, rates in training.learning_rates.items()}
    return replace(training, plan=replace(training.plan, steps=steps), learning_rates=rates)


def replay(
    pool: "Pool", configs: Mapping[str, Config], training: TrainingDump, roles: Sequence[RoleName], tolerance: Tolerance
) -> bool:
    """Run all layouts and print the table. True when all agree with the first one."""
    found: dict[str, dict[RoleName, Replayed]] = {}
    moved: dict[tuple[str, RoleName], float] = {}
    with tempfile.TemporaryDirectory(prefix="replay_") as scratch:
        for number, (name, config) in enumerate(configs.items()):
            print(f"layout {name} ...", file=sys.stderr, flush=True)
            folders = {role: f"{scratch}/{number}/{role}" for role in roles}
            given = {"config": config, "training": training, "folders": folders}
            found[name] = pool.run(f"{RANKS}:replay", world=config.role("actor").num_ranks, timeout_s=TIMEOUT_S, **given)[0]
            for role, folder in folders.items():
                moved[name, role] = weights_difference(f"{scratch}/0/{role}", folder) / max(training.learning_rates[role])
    first = next(iter(found.values()))
    rows: list[tuple[str, ...]] = [_HEAD]
    agrees = True
    for role in roles:
        what = "old log-probs" if role == "actor" else "values"
        note = "" if first[role].fit < _FITS else ": these are not the weights that the rollout started from"
        print(f"{role}: {what} before the first step differ from the file's by at most {first[role].fit:.1e}{note}")
        for name, one in found.items():
            errors = [step_error(own, other) for own, other in zip(one[role].steps, first[role].steps, strict=True)]
            agrees &= max(errors) <= tolerance.metrics and moved[name, role] <= tolerance.weights * len(errors)
            rows += _rows(role, name, one[role], errors, moved=moved[name, role])
    print(as_text(rows))
    return agrees


def _rows(role: RoleName, layout: str, one: "Replayed", errors: Sequence[float], *, moved: float) -> Iterator[tuple[str, ...]]:
    """One row per step; the weights stand in the last one. A step that was skipped has no loss."""
    loss = "loss" if role == "actor" else "value_loss"
    for index, (step, error) in enumerate(zip(one.steps, errors, strict=True)):
        numbers = [f"{step[name]:.6f}" if name in step else "skipped" for name in (loss, "grad_norm")]
        yield role, layout, str(index), *numbers, f"{error:.1e}", f"{moved:.1e}" if index == len(errors) - 1 else ""


def step_error(own: Mapping[str, float], first: Mapping[str, float]) -> float:
    """The largest error of a metric, relative to max(|metric|, 0.1); infinite when the metrics are not the same ones."""
    if own.keys() != first.keys():
        return math.inf
    errors = [abs(own[name] - value) / max(abs(value), _FLOOR) for name, value in first.items()]
    return max((math.inf if math.isnan(error) else error for error in errors), default=0.0)


def weights_difference(first: str, own: str) -> float:
    """The largest difference of a weight of two folders, which are read one tensor at a time."""
    from slime_ppo.conversion.hf_io import HfWeights

    ours, theirs = HfWeights(own), HfWeights(first)
    return max(float((ours[name].double() - theirs[name].double()).abs().max()) for name in theirs)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="replay_step.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("file", type=Path, help="a file of --save-debug-rollout-data, of a run that trained")
    parser.add_argument("--weights", metavar="FOLDER", help="Hugging Face folder: the actor at the beginning of the rollout")
    parser.add_argument(
        "--critic-weights", metavar="FOLDER", help="the critic, likewise; without one of the two its role is left out"
    )
    parser.add_argument("--layouts", nargs="+", default=["1", "tp2", "pp2", "dp2"], metavar="SIZES", help="[1 tp2 pp2 dp2]")
    parser.add_argument("--num-steps", type=int, metavar="N", help="the first N steps of the rollout [all]")
    parser.add_argument("--tolerance", type=float, default=5e-5, help="of metrics [5e-5]")
    parser.add_argument("--weights-tolerance", type=float, default=0.1, help="in learning rates per step [0.1]")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="type of weights [that of the run]")
    parser.add_argument("--dry-run", action="store_true", help="check everything, say what would run, and exit")
    return parser


def run(options: argparse.Namespace) -> int:
    """Check, replay, compare. Returns the exit code."""
    given: dict[RoleName, str | None] = {"actor": options.weights, "critic": options.critic_weights}
    weights = {role: folder for role, folder in given.items() if folder is not None}
    if not weights:
        raise ConfigError("nothing to replay: give --weights, --critic-weights, or both")
    dump = read_dump(options.file)
    training = training_of(dump, weights, options.num_steps)
    for folder in weights.values():
        ModelShape.from_hf_folder(folder)
        check_weight_files(Path(folder))
    config = config_of(dump, options.file, weights)
    if options.dtype is not None:
        config = replace(config, model=replace(config.model, dtype=options.dtype))
    roles = [role for role in ROLE_NAMES if role in weights]
    configs = {layout.name: checked(config, layout, roles) for layout in map(Layout.parse, options.layouts)}
    print(f"rollout {dump.header.rollout_id}: {len(training.plan.steps)} steps of {' and '.join(roles)} in {config.model.dtype}")
    print("layouts: " + ", ".join(f"{name} on {_ranks_text(one)}" for name, one in configs.items()))
    if options.dry_run:
        return 0
    from tests.helpers.rank_pool import RankPool

    os.environ.setdefault("PYTHONWARNINGS", "ignore")  # of libraries, once per rank
    with RankPool([RANKS]) as pool:
        agrees = replay(pool, configs, training, roles, Tolerance(options.tolerance, options.weights_tolerance))
    print("all layouts agree" if agrees else "layouts differ by more than the tolerance")
    return 0 if agrees else 1


def _ranks_text(config: Config) -> str:
    num_ranks = config.role("actor").num_ranks
    return "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    try:
        return run(options)
    except SlimePpoError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
