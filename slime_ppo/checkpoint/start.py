"""Where a run starts: at its beginning, from the weights of a folder, or exactly where a run folder's checkpoint was saved.

Everything is read and compared before any device is used, the ranks' own files aside: of those, names and sizes.
"""

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from slime_ppo.checkpoint.buffer import read_samples
from slime_ppo.checkpoint.files import read_json, size_problems
from slime_ppo.checkpoint.layout import IDENTITY_FILE, role_folders
from slime_ppo.checkpoint.ownership import Ownership, owner_text, whole_checkpoints, writers
from slime_ppo.checkpoint.progress import Progress
from slime_ppo.checkpoint.run_state import Checkpoint, RunState, SavedState
from slime_ppo.config.fields import shown
from slime_ppo.config.model_shape import ModelShape
from slime_ppo.config.preflight import RUN_STATE_FILE, loads_own_folder
from slime_ppo.config.roles import RoleName
from slime_ppo.config.root import OPTION_BY_KEY, Config
from slime_ppo.conversion.torch_dist_folder import find_torch_dist, is_torch_dist
from slime_ppo.data.source import DataSource
from slime_ppo.errors import CheckpointError, ConfigError
from slime_ppo.types.load_report import LoadReport

# options that say which prompts and samples come when, and which of them train in which step at which learning rate
ORDER_SETTINGS = (
    "run.seed",
    "data.input_key",
    "data.label_key",
    "data.tool_key",
    "data.apply_chat_template_kwargs",
    "rollout.rollout_batch_size",
    "rollout.n_samples_per_prompt",
    "batch.global_batch_size",
    "batch.partial_step",
    "ppo.num_epochs_per_rollout",
    "ppo.num_critic_only_steps",
)
# where a run is and how it saves may change at any time
_NOT_COMPARED = ("checkpoint.", "run.save", "run.overwrite")
_MAX_LISTED = 8


@dataclass(frozen=True)
class StartPoint:
    """Where a run starts.

    `config` is what the roles are started with, the run's own but where the actor's first weights are those of another Hugging Face
    folder. `folders` are torch_dist folders that roles load, with the optimizer where the run is `resumed` from a run folder, else
    weights only. `progress` is the loop's. `run_state` is that of --save from now on; `records` the run folder whose metrics go on,
    None when there are none. `text` says where the run starts, `changes` which options are others than in the saved run.
    """

    text: str
    config: Config
    progress: Progress
    run_state: RunState
    folders: Mapping[RoleName, Path] = field(default_factory=dict)
    resumed: bool = False
    records: Path | None = None
    changes: tuple[str, ...] = ()

    def told(self, reports: Mapping[RoleName, LoadReport]) -> str:
        """What was restored, for the start of the output, once the roles have loaded."""
        if not self.resumed:
            return self.text
        roles = " and ".join(reports)
        reseeded = [role for role, report in reports.items() if not report.restored_rng]
        new = f"; new random states for the ranks of the {' and '.join(reseeded)}, whose layout or kind of device is another"
        states = new if reseeded else ""
        progress = self.progress
        kl = f", KL coefficient {progress.kl.beta:g}" if self.config.objective == "ppo" else ""
        waiting = f", {len(progress.samples)} samples that wait for their training" if progress.samples else ""
        return (
            f"{self.text}: weights and optimizer of {roles}, place in the prompts{kl}, weight version {progress.version}"
            f"{waiting}{states}"
        )


def find_start(config: Config, shapes: Mapping[RoleName, ModelShape], prompts: DataSource) -> StartPoint:
    """What --load means, and with a run folder `prompts` at its place. Raises CheckpointError, DataError or ConfigError."""
    given = config.checkpoint.load
    fresh = beginning(config, prompts.state_dict())
    if given is None:
        return fresh
    folder, in_place = Path(given), loads_own_folder(config)
    if (folder / RUN_STATE_FILE).exists():
        return _resumed(config, folder, shapes, prompts)
    if config.checkpoint.ckpt_step is not None:
        raise ConfigError(f"--ckpt-step {config.checkpoint.ckpt_step}: --load {given} holds no checkpoint of a run")
    if _is_hf_folder(folder):
        _refuse_as_save(in_place, folder, "a Hugging Face folder")
        return _from_hf(fresh, folder)
    if is_torch_dist(folder):
        _refuse_as_save(in_place, folder, "a torch_dist folder")
        return _from_torch_dist(fresh, find_torch_dist(folder).weights)
    if in_place:
        return replace(fresh, text=f"--load {given} holds no checkpoint yet: the run starts at its beginning")
    found = ", ".join(sorted(os.listdir(folder))[:_MAX_LISTED]) or "nothing" if folder.is_dir() else "no such folder"
    raise CheckpointError(
        f"--load {given}: expected a run folder with a complete checkpoint ({RUN_STATE_FILE}), a torch_dist folder, or a Hugging "
        f"Face folder; found {found}"
    )


def beginning(config: Config, prompts: Mapping[str, object]) -> StartPoint:
    """Of a run that goes on from nothing; `prompts` is the state before the first draw."""
    return StartPoint("", config, Progress.start(config.ppo, prompts), RunState(secrets.token_hex(8)))


def _from_hf(fresh: StartPoint, folder: Path) -> StartPoint:
    config = fresh.config
    model = replace(config.model, hf_checkpoint=str(folder), ref_load=config.model.ref_folder)
    critic = replace(config.critic, load=config.role("critic").hf_folder)
    text = f"--load {folder} is a Hugging Face folder: its weights only, for the actor; the run starts at its beginning"
    return replace(fresh, text=text, config=replace(config, model=model, critic=critic))


def _from_torch_dist(fresh: StartPoint, iteration: Path) -> StartPoint:
    if (iteration / IDENTITY_FILE).exists():
        role = read_json(iteration / IDENTITY_FILE)["role"]
        if role != "actor":
            raise CheckpointError(
                f"--load {iteration} holds the {role} of a run, expected its actor (--critic-load is for the critic)"
            )
    text = f"--load {iteration} is a torch_dist folder: its weights only, for the actor; the run starts at its beginning"
    return replace(fresh, text=text, folders={"actor": iteration})


def _resumed(config: Config, folder: Path, shapes: Mapping[RoleName, ModelShape], prompts: DataSource) -> StartPoint:
    run_state = RunState.read(folder)
    chosen = _chosen(folder, run_state, config.checkpoint.ckpt_step)
    assert run_state is not None, "there is a checkpoint in it"
    saved = SavedState.read(folder / chosen.state_file, chosen.state_sha256)
    _check_roles(config, chosen, saved)
    _check_files(folder, chosen, saved, run_state)
    _check_models(shapes, saved)
    changes = _changed_settings(config, saved)
    _check_something_left(config, folder, chosen)
    if loads_own_folder(config):
        kept = run_state.until(chosen.rollout_id)
        _check_rewind(config, run_state, kept)
    else:
        kept = RunState(secrets.token_hex(8))
    prompts.load_state_dict(saved.progress["prompts"])
    samples = () if chosen.buffer_file is None else read_samples(folder / chosen.buffer_file)
    return StartPoint(
        text=f"resumed from {folder} after {chosen.rollout_id} of {config.run.num_rollout} rollouts",
        config=config,
        progress=Progress.restored(saved.progress, samples, config.ppo),
        run_state=kept,
        folders={role: folder / path for role, path in chosen.folders.items()},
        resumed=True,
        records=folder,
        changes=changes,
    )


def _chosen(folder: Path, run_state: RunState | None, step: int | None) -> Checkpoint:
    kept = () if run_state is None else run_state.checkpoints
    chosen = [one for one in kept if step in (None, one.rollout_id)]
    if not chosen:
        numbers = ", ".join(str(one.rollout_id) for one in kept) or "none"
        asked = "" if step is None else f" after {step} rollouts (--ckpt-step)"
        raise CheckpointError(f"--load {folder} has no checkpoint{asked}; {RUN_STATE_FILE} lists: {numbers}")
    return chosen[-1]


def _check_files(folder: Path, chosen: Checkpoint, saved: SavedState, run_state: RunState) -> None:
    """Every file is there with its size, and each role's folder says that it is that role's, after as many rollouts."""
    problems: list[str] = []
    for role, path in chosen.folders.items():
        missing = size_problems(folder / path, saved.files[role])
        problems += missing or _identity_problems(folder / path, role, chosen.rollout_id)
    if chosen.buffer_file is not None and saved.buffer is not None:
        buffer = folder / chosen.buffer_file
        problems += size_problems(buffer.parent, {buffer.name: saved.buffer})
    if problems:
        others = [str(one.rollout_id) for one in run_state.checkpoints if one != chosen]
        advice = (
            f"Go on from another one with --ckpt-step {' or '.join(others)}" if others else "There is no other one to go on from"
        )
        listed = "\n  ".join(problems[:_MAX_LISTED]) + (
            f"\n  and {len(problems) - _MAX_LISTED} more" if problems[_MAX_LISTED:] else ""
        )
        raise CheckpointError(f"the checkpoint after {chosen.rollout_id} rollouts in {folder} is damaged:\n  {listed}\n{advice}")


def _identity_problems(folder: Path, role: RoleName, rollout_id: int) -> list[str]:
    found = read_json(folder / IDENTITY_FILE)
    if (found["role"], found["rollout_id"]) == (role, rollout_id):
        return []
    return [f"{folder} holds the {found['role']} after {found['rollout_id']} rollouts, expected the {role} after {rollout_id}"]


def _check_roles(config: Config, chosen: Checkpoint, saved: SavedState) -> None:
    ours, theirs = list(config.roles), list(chosen.folders)
    saved_by = saved.settings.get("objective", "ppo")
    if saved_by != config.objective:
        raise CheckpointError(
            f"the run in --load {config.checkpoint.load} is one of scripts/train_{saved_by}.py, and only that goes on with it. "
            f"Start from its weights: --load {config.checkpoint.load}/{chosen.folders['actor']}"
        )
    if sorted(ours) != sorted(theirs) or sorted(theirs) != sorted(saved.files):
        raise CheckpointError(
            f"the checkpoint holds {' and '.join(theirs)}, the run trains {' and '.join(ours)} (--advantage-estimator "
            f"{config.ppo.advantage_estimator}). Resume with the estimator of the saved run, or start a new run from the actor's "
            f"weights: --load {config.checkpoint.load}/{chosen.folders['actor']}"
        )


def _check_models(shapes: Mapping[RoleName, ModelShape], saved: SavedState) -> None:
    for role, shape in shapes.items():
        ours, theirs = shape.plain_values(), saved.models[role]
        changed = [f"{name} was {theirs[name]!r} and is {ours[name]!r} now" for name in ours if theirs.get(name) != ours[name]]
        if changed:
            flag = "--hf-checkpoint" if role == "actor" else "--critic-load"
            raise CheckpointError(
                f"the {role} is another model than in the checkpoint: {'; '.join(changed)}. Give its folder ({flag})"
            )


def _changed_settings(config: Config, saved: SavedState) -> tuple[str, ...]:
    """A line per option that has changed and may. Raises CheckpointError for those that may not."""
    changed = {
        key: f"{OPTION_BY_KEY[key].flag} was {shown(saved.settings[key])}, is {shown(value)}"
        for key, value in config.values().items()
        if key in saved.settings and saved.settings[key] != value and not key.startswith(_NOT_COMPARED)
    }
    refused = [changed[key] for key in ORDER_SETTINGS if key in changed]
    if refused:
        raise CheckpointError(
            f"these options decide which samples come when, and differ from the saved run's: {'; '.join(refused)}. Resume with "
            f"those of the saved run; a new run can start from the actor's weights: --load {config.checkpoint.load}/actor"
        )
    return tuple(changed.values())


def _check_something_left(config: Config, folder: Path, chosen: Checkpoint) -> None:
    if chosen.rollout_id >= config.run.num_rollout:
        export = f"python tools/convert_torch_dist_to_hf.py {folder / chosen.folders['actor']} {folder / 'hf'}"
        missing = "" if (folder / "hf").exists() or not config.model.save_hf else f". It has no hf folder yet: {export}"
        raise ConfigError(
            f"nothing is left to do: {folder} has done {chosen.rollout_id} of --num-rollout {config.run.num_rollout}, which counts "
            f"the whole run. Raise --num-rollout to go on{missing}"
        )


def _check_rewind(config: Config, present: RunState, kept: RunState) -> None:
    dropped = [str(one.rollout_id) for one in present.checkpoints if one not in kept.checkpoints]
    if dropped and not config.run.overwrite:
        raise ConfigError(
            f"--ckpt-step {config.checkpoint.ckpt_step} in the same folder gives up the later checkpoints ({', '.join(dropped)}) "
            "and their records. Give another --save, or say --overwrite"
        )


def _is_hf_folder(folder: Path) -> bool:
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


def _refuse_as_save(in_place: bool, folder: Path, kind: str) -> None:
    if in_place:
        raise ConfigError(f"--load {folder} is {kind}, and --save is the same: the run would write into it. Give another --save")


def replaced_runs(config: Config) -> frozenset[str]:
    """The runs of --save that this one goes on with, or gives up by --overwrite. What a killed one has left in its folder, and
    nothing lists, is theirs, too."""
    if not (config.run.overwrite or loads_own_folder(config)):
        return frozenset()
    folders, run = role_folders(config), Path(config.run.save)
    inside = [folder for folder in folders.values() if Path(os.path.realpath(run)) in Path(os.path.realpath(folder)).parents]
    return writers(folders["actor"]).union(*(writers(folder, home=run) for folder in inside))


def replaced_paths(config: Config) -> frozenset[str]:
    """Where everything lies that the run of --save has listed which this one goes on with, or gives up by --overwrite."""
    if not (config.run.overwrite or loads_own_folder(config)):
        return frozenset()
    try:
        state = RunState.read(Path(config.run.save))
    except CheckpointError:  # given up, since a run that goes on has read it
        state = None
    return frozenset() if state is None else frozenset(state.real_paths(Path(config.run.save)))


def check_role_folders_free(config: Config, run_state: RunState) -> None:
    """Refuse folders that hold checkpoints of another run: they would be deleted one day. --overwrite gives up what --save holds,
    and never what another run saves in --critic-save. Raises ConfigError."""
    folders, run = role_folders(config), Path(config.run.save)
    own = Ownership(run, replaced_runs(config) | {run_state.run_id}, replaced_paths(config))
    if loads_own_folder(config) and not config.run.overwrite:
        _check_list_is_not_lost(config, run_state, whole_checkpoints(folders["actor"]))
    listed = run_state.real_paths(run)
    for role, folder in folders.items():
        if role == "actor" and config.run.overwrite:
            continue
        unlisted = (one for one in whole_checkpoints(folder) if os.path.realpath(one) not in listed)
        foreign = [one for one in unlisted if not own.owns(one)]
        if foreign:
            again = replace(config, run=replace(config.run, overwrite=True))
            replaceable = Ownership(run, own.runs | replaced_runs(again), replaced_paths(again))
            by_overwrite = role == "actor" or all(map(replaceable.owns, foreign))
            raise ConfigError(
                f"{folder} already holds checkpoints ({', '.join(one.name for one in foreign[:3])}) of {owner_text(foreign[0])}, "
                f"not of this run's {role}. Choose another folder, or "
                + ("say --overwrite" if by_overwrite else "move them away: --overwrite speaks of --save only")
            )


def _check_list_is_not_lost(config: Config, run_state: RunState, left: list[Path]) -> None:
    """A kill in the first save leaves one checkpoint that nothing lists; where there are more, there was a list."""
    if not run_state.checkpoints and len(left) > 1:
        raise ConfigError(
            f"--load {config.checkpoint.load} has no {RUN_STATE_FILE}, which lists its checkpoints, but {left[0].parent} holds "
            f"{', '.join(one.name for one in left[:3])}: the run would begin anew and delete them. Bring the file back, take the "
            f"weights alone by --load {left[-1]} into another --save, or say --overwrite"
        )
