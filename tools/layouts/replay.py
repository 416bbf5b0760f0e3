"""Steps of a rollout file, replayed in several layouts and compared: what tools/replay_step.py does, without its command line."""

import math
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from slime_ppo.config.checks import check_config, check_model_shape
from slime_ppo.config.cli import merge_settings
from slime_ppo.config.critic import CriticConfig
from slime_ppo.config.critic_start import CriticStart
from slime_ppo.config.debug import DebugConfig
from slime_ppo.config.hf_folder import check_weight_files
from slime_ppo.config.model_shape import ModelShape
from slime_ppo.config.roles import RoleName
from slime_ppo.config.root import Config
from slime_ppo.config.yaml_file import read_config_file
from slime_ppo.errors import ConfigError, DataError
from slime_ppo.rollout.dump import RolloutDump, TrainingDump
from tools.layouts.memory import Pool, as_text

RANKS = "tools.layouts.replay_ranks"
TIMEOUT_S = 3600.0
_SIZES = ("tp", "cp", "pp", "dp", "ep", "etp", "vpp", "mbs")
_FLOOR = 0.1
_FITS = 0.05  # bfloat16 on another layout moves a log-prob by a few hundredths
_HEAD: tuple[str, ...] = ("role", "layout", "step", "loss", "grad norm", "off by", "weights")


@dataclass(frozen=True)
class Layout:
    """Sizes by name; `ranks` in one world."""

    name: str
    sizes: Mapping[str, int]

    @staticmethod
    def parse(text: str) -> "Layout":
        """Raises ConfigError for a text that is no list of sizes."""
        sizes = dict.fromkeys(_SIZES[:-1], 1)
        for part in text.removeprefix("1-").split("-") if text != "1" else ():
            found = re.fullmatch(r"([a-z]+)([1-9]\d*)", part)
            if found is None or found[1] not in _SIZES:
                known = ", ".join(_SIZES)
                raise ConfigError(
                    f"--layouts {text}: {part!r} is no size, expected some of {known} with a number, as in tp2-dp2, or 1"
                )
            sizes[found[1]] = int(found[2])
        return Layout(text, sizes if "etp" in text else sizes | {"etp": sizes["tp"]})

    @property
    def num_ranks(self) -> int:
        return self.sizes["tp"] * self.sizes["cp"] * self.sizes["pp"] * self.sizes["dp"]


@dataclass(frozen=True)
class Replayed:
    """What one role did in one layout. `steps`: statistics of each step; `fit`: how far its log-probs or values before the first
    step lie from those of the file, over trainable tokens."""

    steps: list[dict[str, float]]
    fit: float


@dataclass(frozen=True)
class Tolerance:
    """`metrics` as in "off by"; `weights` in largest learning rates per step."""

    metrics: float
    weights: float


@dataclass(frozen=True)
class Start:
    """Where a role's weights come from: a Hugging Face folder, or a torch_dist checkpoint and the folder that explains it."""

    hf_folder: str
    checkpoint: str | None

    @staticmethod
    def of(folder: str) -> "Start":
        """Raises CheckpointError for a folder that is neither, or not whole."""
        found = CriticStart.of(folder)  # of any role
        ModelShape.from_hf_folder(found.hf_folder)
        if found.checkpoint is None:
            check_weight_files(found.hf_folder)
        return Start(str(found.hf_folder), None if found.checkpoint is None else str(found.checkpoint))


def config_of(dump: RolloutDump, file: Path, starts: Mapping[RoleName, Start]) -> Config:
    """The config of the file's run, on this CPU and without an engine, with roles that start from `starts`."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as resolved:
        resolved.write(dump.header.config)
        resolved.flush()
        config, _ = merge_settings(read_config_file(resolved.name))
    folders = {role: start.hf_folder for role, start in starts.items()}
    model = replace(config.model, hf_checkpoint=folders.get("actor", config.model.hf_checkpoint), transformer_impl="auto")
    own = config.critic
    critic = CriticConfig(
        load=folders.get("critic"),
        lr=own.lr,
        clip_grad=own.clip_grad,
        init_value_head=own.init_value_head,
        init_value_head_std=own.init_value_head_std,
    )
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


def training_of(dump: RolloutDump, roles: Sequence[RoleName], num_steps: int | None) -> TrainingDump:
    """What is replayed. Raises DataError when the file has not got that far, or its run did not train a role."""
    training = dump.training
    if training is None:
        raise DataError("the file holds samples only: it was saved before training had made its columns, or nothing was trained")
    for role in roles:
        if role not in training.learning_rates:
            raise DataError(f"the run did not train the {role} in rollout {dump.header.rollout_id}: leave its weights out")
    steps = training.plan.steps[:num_steps]
    rates = {role: rates[: len(steps)] for role, rates in training.learning_rates.items()}
    return replace(training, plan=replace(training.plan, steps=steps), learning_rates=rates)


def replay(
    pool: Pool, configs: Mapping[str, Config], training: TrainingDump, starts: Mapping[RoleName, Start], *, with_optimizer: bool
) -> "Comparison":
    """Run all layouts. `with_optimizer`: the optimizers go on from the checkpoints, too."""
    found: dict[str, dict[RoleName, Replayed]] = {}
    moved: dict[tuple[str, RoleName], float] = {}
    checkpoints = {role: start.checkpoint for role, start in starts.items()}
    with tempfile.TemporaryDirectory(prefix="replay_") as scratch:
        for number, (name, config) in enumerate(configs.items()):
            print(f"layout {name} ...", file=sys.stderr, flush=True)
            folders = {role: f"{scratch}/{number}/{role}" for role in starts}
            given = {"config": config, "training": training, "folders": folders}
            given |= {"checkpoints": checkpoints, "with_optimizer": with_optimizer}
            found[name] = pool.run(f"{RANKS}:replay", world=config.role("actor").num_ranks, timeout_s=TIMEOUT_S, **given)[0]
            for role, folder in folders.items():
                moved[name, role] = weights_difference(f"{scratch}/0/{role}", folder) / max(training.learning_rates[role])
    return Comparison(found, moved)


@dataclass(frozen=True)
class Comparison:
    """What was found by layout and role, the first layout first; `moved` is the largest difference of a weight after the last step
    from the first layout's, in largest learning rates."""

    found: Mapping[str, Mapping[RoleName, Replayed]]
    moved: Mapping[tuple[str, RoleName], float]

    @property
    def first(self) -> Mapping[RoleName, Replayed]:
        return next(iter(self.found.values()))

    def errors(self, layout: str, role: RoleName) -> list[float]:
        """`step_error` of each step."""
        pairs = zip(self.found[layout][role].steps, self.first[role].steps, strict=True)
        return [step_error(own, other) for own, other in pairs]

    def agrees(self, tolerance: Tolerance) -> bool:
        """True when no layout is beyond the tolerance."""
        return all(
            max(errors := self.errors(layout, role)) <= tolerance.metrics
            and self.moved[layout, role] <= tolerance.weights * len(errors)
            for layout, role in self.moved
        )

    def text(self) -> str:
        """Whether the weights fit the file, and a table with a row per step."""
        lines, rows = [], [_HEAD]
        for role, first in self.first.items():
            what = "old log-probs" if role == "actor" else "values"
            note = "" if first.fit < _FITS else ": these are not the weights that the rollout started from"
            lines.append(f"{role}: {what} before the first step differ from the file's by at most {first.fit:.1e}{note}")
            for layout in self.found:
                rows += self._rows(layout, role)
        return "\n".join([*lines, as_text(rows)])

    def _rows(self, layout: str, role: RoleName) -> Iterator[tuple[str, ...]]:
        """The weights stand in the last row. A step that was skipped has no loss."""
        steps, loss = self.found[layout][role].steps, "loss" if role == "actor" else "value_loss"
        for index, (step, error) in enumerate(zip(steps, self.errors(layout, role), strict=True)):
            numbers = [f"{step[name]:.6f}" if name in step else "skipped" for name in (loss, "grad_norm")]
            moved = f"{self.moved[layout, role]:.1e}" if index == len(steps) - 1 else ""
            yield role, layout, str(index), *numbers, f"{error:.1e}", moved


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
