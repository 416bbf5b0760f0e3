"""Checks that look at files, before any device is used: model folders, prompt files, the run folder."""

import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import yaml

from slime_ppo.config.checks import check_model_shape
from slime_ppo.config.critic_start import CriticStart
from slime_ppo.config.data import DataConfig
from slime_ppo.config.debug import rollout_file
from slime_ppo.config.debug_checks import check_rollout_files_free
from slime_ppo.config.hf_folder import check_replaceable, check_weight_files, staging_folders
from slime_ppo.config.model_shape import ModelShape
from slime_ppo.config.prompt_files import prompt_files
from slime_ppo.config.prompt_path import PromptPath
from slime_ppo.config.roles import RoleName
from slime_ppo.config.root import Config
from slime_ppo.errors import CheckpointError, ConfigError, DataError

METRICS_FILE = "metrics.jsonl"
RUN_STATE_FILE = "run_state.json"
CONFIG_FILE = "config.yaml"
# folders in the run folder that are written during training
_RUN_FOLDERS = ("logs", "tensorboard", "wandb", "actor", "rollout")
# end tokens belong to generation, not to the weights
_SHAPE_FIELDS = tuple(field.name for field in fields(ModelShape) if field.name != "eos_token_ids")


@dataclass(frozen=True)
class RunShapes:
    """The shapes of the trained models; the reference has the actor's. `critic` is None in a run without one."""

    actor: ModelShape
    critic: ModelShape | None

    @property
    def by_role(self) -> dict[RoleName, ModelShape]:
        """Those of the roles of the run."""
        shapes: dict[RoleName, ModelShape] = {"actor": self.actor}
        if self.critic is not None:
            shapes["critic"] = self.critic
        return shapes


def preflight(config: Config) -> RunShapes:
    """`check_files`, then read the model shapes and check them against the config. Leaves nothing behind.

    Raises ConfigError for everything, also for a model folder that cannot be read: no device was used yet.
    """
    check_files(config)
    start = CriticStart.of(config.role("critic").hf_folder) if config.has_critic else None
    try:
        actor = ModelShape.from_hf_folder(config.model.hf_checkpoint)
        reference = ModelShape.from_hf_folder(config.model.ref_folder)
        critic = ModelShape.from_hf_folder(start.hf_folder) if start is not None else None
        own = {str(start.hf_folder)} if start is not None and start.checkpoint is None else set()
        for folder in {config.model.ref_folder, config.model.hf_checkpoint} | own:
            check_weight_files(Path(folder))
        brings_head = start is not None and start.holds_head()
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    check_model_shape(config, actor, "actor")
    _check_same(actor, reference, _SHAPE_FIELDS, f"--ref-load {config.model.ref_folder}", config.model.hf_checkpoint)
    if critic is not None:
        check_model_shape(config, critic, "critic")
        _check_same(actor, critic, ("vocab_size",), f"--critic-load {config.role('critic').hf_folder}", config.model.hf_checkpoint)
        if not brings_head and config.critic.init_value_head is None:
            _refuse_headless(config)
    return RunShapes(actor, critic)


def _refuse_headless(config: Config) -> None:
    flag = "--hf-checkpoint" if config.critic.load is None else "--critic-load"
    raise ConfigError(
        f"the critic starts from {flag} {config.role('critic').hf_folder}, which holds no value head (score.weight). Say how the "
        "head starts (--init-value-head zeros or normal), or give a critic or reward model (...ForSequenceClassification) by "
        "--critic-load"
    )


def check_files(config: Config) -> None:
    """Model folders and prompt files are there, nothing that must stay is in a folder that is
    replaced, the run folder is free and writable.

    Raises ConfigError naming flag, path and what to do. Creates nothing that stays.
    """
    _check_model_folder("--hf-checkpoint", config.model.hf_checkpoint)
    _check_model_folder("--ref-load", config.model.ref_folder)
    if config.has_critic:
        _check_critic_folder(config.role("critic").hf_folder)
    _check_prompt_file("--prompt-data", config.data.prompt_data)
    for path in config.eval_files.values():
        _check_prompt_file(config.eval_flag, path)
    _check_chat_template(config.data)
    _check_folders_apart(config)
    _check_run_folder_free(config)
    _check_writable("--save", config.run.save)
    if config.debug.save_debug_rollout_data is not None:
        if not loads_own_folder(config):
            check_rollout_files_free(config)
        _check_writable("--save-debug-rollout-data", str(rollout_file(config.debug.save_debug_rollout_data, 0).parent))
    if config.rollout.weight_sync == "disk":
        _check_writable("--weight-sync-folder", config.weight_sync_folder)
    if config.has_critic:
        _check_writable("--critic-save", config.role("critic").checkpoint_folder)


def _check_same(left: ModelShape, right: ModelShape, names: tuple[str, ...], flag: str, actor_folder: str) -> None:
    ours, theirs = asdict(left), asdict(right)
    for name in names:
        if ours[name] != theirs[name]:
            raise ConfigError(
                f"{flag} has {name} {theirs[name]}, but the actor ({actor_folder}) has {ours[name]}. Both "
                "must agree: give a folder of the same model"
            )


def _check_model_folder(flag: str, path: str) -> None:
    if not os.path.isdir(path):
        raise ConfigError(
            f"{flag} {path}: {'is a file' if os.path.exists(path) else 'no such folder'}, expected a local Hugging Face folder "
            "with config.json and safetensors. Nothing is downloaded: convert or download the model first"
        )
    names = os.listdir(path)
    if "config.json" not in names:
        raise ConfigError(f"{flag} {path}: has no config.json, expected a complete Hugging Face folder; found {_listing(names)}")
    if not any(name.endswith(".safetensors") for name in names):
        raise ConfigError(f"{flag} {path}: has no .safetensors file, expected the model's weights; found {_listing(names)}")


def _check_critic_folder(path: str) -> None:
    try:
        start = CriticStart.of(path)
    except CheckpointError as error:
        raise ConfigError(f"--critic-load {path}: {error}") from error
    if start.checkpoint is None:
        _check_model_folder("--critic-load", path)


def _listing(names: list[str]) -> str:
    return ", ".join(sorted(names)[:8]) or "an empty folder"


def _check_prompt_file(flag: str, path: str) -> None:
    try:
        files = prompt_files(PromptPath.parse(path).file, origin=flag)
    except (DataError, OSError) as error:
        raise ConfigError(str(error)) from error
    for file in files:
        if not os.path.isfile(file):
            raise ConfigError(
                f"{flag} {path if len(files) == 1 else file}: no such file, expected a JSON Lines file with one prompt a line, "
                "a parquet file, or a folder of either. Paths are relative to the current directory"
            )


def _check_chat_template(data: DataConfig) -> None:
    if data.apply_chat_template and data.chat_template is not None and not os.path.isfile(data.chat_template):
        raise ConfigError(
            f"--chat-template {data.chat_template}: {_no_file(data.chat_template)}, expected a Jinja template. Paths are relative "
            "to the current directory"
        )


def _no_file(path: str) -> str:
    return "is a folder" if os.path.isdir(path) else "no such file"


def _check_folders_apart(config: Config) -> None:
    """The run folder is no input, the critic's folder is its own, and those that are replaced as a whole hold nothing that must
    stay."""
    run, inputs = os.path.realpath(config.run.save), _inputs(config)
    _check_not_above("--save", run, {flag: path for flag, path in inputs.items() if os.path.realpath(path) == run})
    load = config.checkpoint.load
    if load is not None and not loads_own_folder(config):
        _check_not_above("--save", run, {"--load": load})
    hf = os.path.realpath(config.role("actor").save_folder)
    own, replaced = {"--save (its hf folder)": hf}, {"--save (its hf folder)": hf}
    if config.has_critic:
        taken = (hf, *map(str, staging_folders(Path(hf))), *(os.path.join(run, name) for name in _RUN_FOLDERS))
        own["--critic-save"] = _critic_folder(config.role("critic").checkpoint_folder, taken)
        replaced["--critic-save (its hf folder)"] = os.path.realpath(config.role("critic").save_folder)
    for flag, folder in own.items():
        _check_not_above(flag, folder, {"--save": run, "the current directory": os.curdir} | inputs)
    for flag, folder in replaced.items() if config.model.save_hf else ():
        may_be_ours = _holds(run, folder) or _saves_critics_again(config)
        advice = "say --overwrite" if may_be_ours else "move them away: --save holds no run that has saved its critic there"
        if loads_own_folder(config) and not _goes_on(config):
            advice = f"bring {RUN_STATE_FILE} back, without which --load {load} has nothing to go on from, or {advice}"
        replaceable = (config.run.overwrite or _goes_on(config)) and may_be_ours
        _check_replaced_folder(flag, Path(folder), replaceable=replaceable, advice=advice)


def _critic_folder(folder: str, taken: Iterable[str]) -> str:
    """The real path of the critic's folder, which must not lie in any of `taken`."""
    critic = os.path.realpath(folder)
    for other in taken:
        if _holds(other, critic):
            raise ConfigError(
                f"--critic-save {folder} is in {other}, where the run saves something else: one would overwrite the other. "
                "Give the critic a folder of its own (default: <save>/critic)"
            )
    return critic


def _inputs(config: Config) -> dict[str, str]:
    """Flag -> path of everything the run reads."""
    paths = {
        "--hf-checkpoint": config.model.hf_checkpoint,
        "--ref-load": config.model.ref_folder,
        "--prompt-data": PromptPath.parse(config.data.prompt_data).file,
    }
    if config.has_critic:
        paths["--critic-load"] = config.role("critic").hf_folder
    if config.data.chat_template is not None:
        paths["--chat-template"] = config.data.chat_template
    if config.sft.eval_data is not None:
        paths["--eval-data"] = PromptPath.parse(config.sft.eval_data).file
    return paths | {f"--eval-prompt-data, {name}": PromptPath.parse(path).file for name, path in config.eval.data_sets.items()}


def _check_not_above(flag: str, folder: str, kept: Mapping[str, str]) -> None:
    for what, path in kept.items():
        real = os.path.realpath(path)
        if _holds(folder, real):
            raise ConfigError(
                f"{flag} {folder} {'is' if folder == real else 'holds'} {real} ({what}), which the run would overwrite. Give a "
                "folder of its own"
            )


def _check_replaced_folder(flag: str, folder: Path, *, replaceable: bool, advice: str) -> None:
    """`replaceable`: weights in it are those of the run that goes on or is given up; otherwise `advice` says what else to do."""
    try:
        for one in (folder, *staging_folders(folder)):
            check_replaceable(one)
    except CheckpointError as error:
        raise ConfigError(f"{flag}: {error}") from error
    if folder.exists() and os.listdir(folder) and not replaceable:
        raise ConfigError(f"{flag} {folder}: already holds saved weights. Choose another folder, or {advice}")


def _saves_critics_again(config: Config) -> bool:
    """Whether the run that --save holds has its critic in the same folder, as its config says."""
    try:
        saved = yaml.safe_load((Path(config.run.save) / CONFIG_FILE).read_text(encoding="utf-8"))["critic"]["save"]
    except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError):
        return False
    return isinstance(saved, str) and os.path.realpath(saved) == os.path.realpath(config.role("critic").checkpoint_folder)


def _holds(folder: str, path: str) -> bool:
    """True when `path` is `folder` or lies in it; both are real paths."""
    return os.path.commonpath((folder, path)) == folder


def loads_own_folder(config: Config) -> bool:
    """True when --load and --save are one folder: that of a run that goes on, or begins when it has not come to a checkpoint."""
    load = config.checkpoint.load
    return load is not None and os.path.realpath(load) == os.path.realpath(config.run.save)


def _goes_on(config: Config) -> bool:
    """True when the run folder is to be continued, so that what it holds is this run's."""
    return loads_own_folder(config) and os.path.exists(os.path.join(config.run.save, RUN_STATE_FILE))


def _check_run_folder_free(config: Config) -> None:
    if config.run.overwrite or loads_own_folder(config):
        return
    for name in (METRICS_FILE, RUN_STATE_FILE):
        if os.path.exists(os.path.join(config.run.save, name)):
            raise ConfigError(
                f"--save {config.run.save}: already holds a run ({name}). Choose another folder, go on with that run by --load "
                f"{config.run.save}, or say --overwrite"
            )


def _check_writable(flag: str, path: str) -> None:
    """Writes and removes a file in the folder, or in the nearest one above it that exists."""
    folder = Path(path).absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".write_probe_"):
            pass
    except OSError as error:
        where = "" if folder == Path(path).absolute() else f" in {folder}"
        raise ConfigError(f"{flag} {path}: cannot write{where} ({error.strerror}). Choose a folder you can write to") from error
