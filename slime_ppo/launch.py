"""From a config to a running job: everything that can be checked first, then the ranks and the engine, and the loop."""

import logging
import shutil
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from slime_ppo.checkpoint.layout import role_folders
from slime_ppo.checkpoint.start import StartPoint, check_role_folders_free, find_start
from slime_ppo.config.batch_plan import batch_plan_text
from slime_ppo.config.checks import check_engine_support, config_warnings
from slime_ppo.config.launcher import LauncherName
from slime_ppo.config.model_shape import ModelShape
from slime_ppo.config.preflight import METRICS_FILE, RUN_STATE_FILE, RunShapes, loads_own_folder, preflight
from slime_ppo.config.roles import RoleName
from slime_ppo.config.root import Config
from slime_ppo.data.chat import load_chat_template
from slime_ppo.data.examples import ExampleFormat
from slime_ppo.data.row_format import RowFormat
from slime_ppo.data.source import PromptSource, RowPolicy, RowReader
from slime_ppo.data.tokenizer import TextTokenizer, load_tokenizer
from slime_ppo.errors import CheckpointError, ConfigError, DataError, SlimePpoError
from slime_ppo.evaluation import EvalSet, Evaluation
from slime_ppo.orchestration.engine_keeper import ROLLOUT, EngineKeeper
from slime_ppo.orchestration.engine_settings import check_sglang
from slime_ppo.orchestration.interrupts import Interrupted, Preempted, StopRequest, interrupts_raise
from slime_ppo.orchestration.local import LocalLauncher
from slime_ppo.orchestration.local_world import LocalWorld
from slime_ppo.orchestration.protocols import Launcher, RunningRoles, Tenant, TrainGroup
from slime_ppo.orchestration.turns import DeviceTurns, RolloutTenant
from slime_ppo.rewards.resolve import resolve_reward
from slime_ppo.rewards.runner import RewardRunner
from slime_ppo.rollout.dump import DumpWriter
from slime_ppo.rollout.generate import SampleBuilder
from slime_ppo.rollout_only import RolloutOnly
from slime_ppo.rollout_source import (
    DumpedRollouts,
    GeneratedRollouts,
    RolloutSource,
    check_dumps,
    rollout_sampling,
)
from slime_ppo.saver import CheckpointSaver, SavePlan
from slime_ppo.sft_trainer import SftParts, SftTrainer
from slime_ppo.tracking.base import RunInfo, Tracker
from slime_ppo.tracking.clock import ROLLOUT_PHASES, SFT_PHASES, RunClock, run_phases
from slime_ppo.tracking.trackers import build_trackers
from slime_ppo.trainer import PpoTrainer, TrainerParts
from slime_ppo.types.load_report import LoadReport

_log = logging.getLogger(__name__)

RECORDS = (METRICS_FILE, "samples.jsonl")
"""What a run that goes on in another folder takes with it."""

_LEXICON_NOTE = (
    "A lexicon reward is easily flattered: it counts kind words, not kind sentences. Read the samples and the most "
    "repeated words beside the curve before you believe it."
)


@dataclass(frozen=True)
class RunInputs:
    """What is read and checked before any device is used; `shape` is the actor's. `left_out`: lines that tell which rows of which
    file are not used. `start`: where --load has the run begin. `save_plan` None: nothing is saved to go on from."""

    tokenizer: TextTokenizer
    shape: ModelShape
    prompts: PromptSource
    eval_sets: tuple[EvalSet, ...]
    left_out: tuple[str, ...]
    rewards: RewardRunner
    reward_warnings: tuple[str, ...]
    tracker: Tracker
    start: StartPoint
    save_plan: SavePlan | None


def run_job(config: Config, launcher_name: LauncherName, world: LocalWorld) -> int:
    """Train on the ranks that Ray starts, or without it on those of `world`, of which this is rank 0. Returns the exit code: 0
    done, 3 when SIGTERM ended it and its state is saved, 128 + signal number after SIGINT, or SIGTERM with nothing to save.

    Raises ConfigError before any device is used, another SlimePpoError when the run fails, with the place in its text. On
    every way out all processes that the run started are ended.
    """
    phases = run_phases(has_critic=config.has_critic, side_by_side=not config.cluster.colocate)
    clock = RunClock(SFT_PHASES if config.objective == "sft" else phases if config.trains else ROLLOUT_PHASES)
    try:
        with ExitStack() as stack:
            stack.enter_context(interrupts_raise())
            inputs = read_inputs(config, returns_support=_launcher(config, launcher_name, world).returns_support)
            launcher = _launcher(inputs.start.config, launcher_name, world)
            _open_logs(config)
            if config.generates:
                stack.enter_context(inputs.rewards).start()
            say(batch_plan_text(config), *config_warnings(config), *inputs.reward_warnings, *inputs.left_out)
            stack.enter_context(launcher)
            say(launcher.description)
            roles = launcher.start(lambda: clock.where)
            stop = StopRequest()
            loop = _loop(config, roles, inputs, clock, stop=stop)
            _claim_run_folder(config, inputs.start)
            if roles.engine is not None:
                stack.callback(roles.engine.sync.close)
            stack.callback(inputs.tracker.close)
            inputs.tracker.start(_run_info(config, inputs.start))
            if inputs.save_plan is not None:
                stack.enter_context(stop.listening())
            loop.run()
    except Interrupted as interrupt:
        rest = f"the run folder is {config.run.save}"
        if isinstance(interrupt, Preempted):
            done = inputs.start.progress.rollout_id
            rest = f"saved after {done} rollouts: go on with --load {config.run.save} --save {config.run.save}"
        say(f"stopped by {interrupt} in {clock.where}; {rest}")
        return interrupt.exit_code
    except SlimePpoError as error:
        raise type(error)(f"{clock.where}: {error}") from error
    except Exception as error:
        _log.exception("the run failed in %s", clock.where)
        text = f"{clock.where}: {type(error).__name__}: {error}. The traceback is in {config.run.save}/logs/driver.log"
        raise SlimePpoError(text) from error
    say(f"done: {config.run.save}/report.html")
    return 0


def say(*lines: str) -> None:
    """A line for the person at the terminal; metrics go through the trackers."""
    for line in lines:
        sys.stdout.write(line.rstrip("\n") + "\n")
    sys.stdout.flush()


def read_inputs(config: Config, *, returns_support: bool) -> RunInputs:
    """Read and check every input; nothing is started or written. Raises ConfigError for everything that is wrong."""
    try:
        return _read_inputs(config, returns_support=returns_support)
    except (DataError, CheckpointError) as error:
        raise ConfigError(str(error)) from error


def _read_inputs(config: Config, *, returns_support: bool) -> RunInputs:
    shapes = preflight(config)
    check_engine_support(config, returns_support=returns_support)
    check_sglang(config)
    tokenizer = load_tokenizer(config.model.hf_checkpoint)
    read = partial(_read_prompts, config, tokenizer, _row_format(config, tokenizer))
    eval_sources = {name: read(path, origin=config.eval_flag) for name, path in config.eval_files.items()}
    reward = config.reward
    prompts = read(config.data.prompt_data, origin="--prompt-data")
    reward_spec = resolve_reward(reward, policy_folder=config.model.hf_checkpoint)
    start = find_start(config, shapes.by_role, prompts)
    if start.config != config:
        preflight(start.config)
    if config.debug.load_debug_rollout_data is not None:
        check_dumps(config, config.debug.load_debug_rollout_data, shapes.actor, first=start.progress.rollout_id)
    return RunInputs(
        tokenizer=tokenizer,
        shape=shapes.actor,
        prompts=prompts,
        eval_sets=tuple(EvalSet(name, source.prompts) for name, source in eval_sources.items()),
        left_out=tuple(line for source in (prompts, *eval_sources.values()) for line in source.left_out),
        rewards=RewardRunner(
            reward_spec,
            num_workers=reward.reward_num_workers,
            batch_size=reward.reward_batch_size,
            timeout_s=reward.reward_timeout_s,
            on_bad_sample=reward.on_bad_sample,
            on_timeout=reward.timeout_policy,
            log_file=Path(config.run.save) / "logs" / "reward.log",
        ),
        reward_warnings=reward_spec.warnings,
        tracker=build_trackers(config.tracking),
        start=start,
        save_plan=_save_plan(config, shapes, start) if config.saves_checkpoints else None,
    )


def _save_plan(config: Config, shapes: RunShapes, start: StartPoint) -> SavePlan:
    """Raises ConfigError where another run's checkpoints are in the way."""
    check_role_folders_free(config, start.run_state)
    return SavePlan(
        run_folder=Path(config.run.save),
        folders=role_folders(config),
        interval=config.checkpoint.save_interval,
        keep=config.checkpoint.keep_checkpoints,
        settings={"objective": config.objective, **config.values()},
        models={role: shape.plain_values() for role, shape in shapes.by_role.items()},
    )


def _row_format(config: Config, tokenizer: TextTokenizer) -> RowReader:
    data, sft, template = config.data, config.sft, None
    if data.apply_chat_template:
        template = load_chat_template(config.model.hf_checkpoint, file=data.chat_template, variables=data.template_variables)
    prompts = RowFormat(data.input_key, data.label_key, data.tool_key, template)
    if config.objective == "ppo":
        return prompts
    return ExampleFormat(
        prompts, sft.response_key, tokenizer, sft.max_response_len, sft.overlong_response, append_eos=sft.append_eos
    )


def _read_prompts(config: Config, tokenizer: TextTokenizer, row_format: RowReader, path: str, *, origin: str) -> PromptSource:
    data = config.data
    return PromptSource(
        path,
        tokenizer,
        row_format=row_format,
        policy=RowPolicy(data.rollout_max_prompt_len, data.overlong_prompt, data.broken_row),
        shuffle=data.shuffle,
        seed=config.run.seed,
        origin=origin,
    )


def _load(start: StartPoint, groups: Mapping[RoleName, TrainGroup], turns: DeviceTurns) -> list[str]:
    """Let the roles take over the checkpoint that the run starts from, and say what they have."""
    reports: dict[RoleName, LoadReport] = {}
    for role, folder in start.folders.items():
        turns.take(role)
        reports[role] = groups[role].load_checkpoint(str(folder), with_optimizer=start.resumed)
    return [start.told(reports), *start.changes] if start.text else []


def _claim_run_folder(config: Config, start: StartPoint) -> None:
    """Write the resolved config. Where the run goes on, the folder has the records of the saved run, of which the trackers drop
    what comes after the checkpoint; otherwise those of an earlier run go, its list of checkpoints first: two runs never mix.

    Called when all processes are up: a run that could not start has destroyed nothing. Weights stay until this run's own
    take their place: a run that is interrupted must not cost those of the one before.
    """
    folder = Path(config.run.save)
    if start.resumed and loads_own_folder(config):
        start.run_state.write(folder)  # without the checkpoints after the one that is resumed
    else:
        for file in (RUN_STATE_FILE, *RECORDS, "run.json", "report.html"):
            (folder / file).unlink(missing_ok=True)
        if config.tracking.use_tensorboard:
            shutil.rmtree(folder / "tensorboard", ignore_errors=True)  # event files of two runs would be drawn as one
        if start.records is not None:
            for source in filter(Path.exists, (start.records / name for name in RECORDS)):
                shutil.copyfile(source, folder / source.name)
    (folder / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")


def _open_logs(config: Config) -> None:
    """The driver's log in the run folder; warnings are shown on the console, too."""
    folder = Path(config.run.save)
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    mode = "a" if loads_own_folder(config) else "w"  # what ended the run before may be in it
    handler = logging.FileHandler(folder / "logs" / "driver.log", mode=mode, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(message)s"))
    package = logging.getLogger("slime_ppo")
    console = logging.StreamHandler(sys.stderr)
    console.setLevel(logging.WARNING)
    console.setFormatter(logging.Formatter("warning: %(message)s"))
    package.handlers = [handler, console]
    package.setLevel(logging.INFO)
    package.propagate = False


def _launcher(config: Config, name: LauncherName, world: LocalWorld) -> Launcher:
    """Ray is imported only where it is used."""
    if name == "local":
        return LocalLauncher(config, world)
    from slime_ppo.orchestration.ray_launcher import RayLauncher

    return RayLauncher(config)


def _loop(
    config: Config, roles: RunningRoles, inputs: RunInputs, clock: RunClock, *, stop: StopRequest
) -> PpoTrainer | SftTrainer | RolloutOnly:
    """The loop of the run, with its parts, where it starts."""
    tenants: dict[str, Tenant] = {} if roles.engine is None else {ROLLOUT: RolloutTenant(roles.engine.engine)}
    tenants.update({str(role): group for role, group in roles.groups.items()})
    turns = DeviceTurns(tenants, offload=config.offloads, on_time=clock.add)
    if config.objective == "sft":
        return _sft_loop(config, roles, inputs, turns, clock=clock, stop=stop)
    rollouts, evaluation = _sources(config, roles, inputs, turns, clock=clock, stop=stop)
    where = config.debug.save_debug_rollout_data
    dumps = None if where is None else DumpWriter(where, config.to_yaml(), inputs.shape.plain_values())
    if not config.trains:
        return RolloutOnly(
            config, rollouts, inputs.tokenizer, evaluation=evaluation, tracker=inputs.tracker, clock=clock, dumps=dumps
        )
    start = inputs.start
    say(*_load(start, roles.groups, turns))
    parts = TrainerParts(
        actor=roles.groups["actor"],
        critic=roles.groups["critic"] if config.has_critic else None,
        turns=turns,
        rollouts=rollouts,
        tokenizer=inputs.tokenizer,
        evaluation=evaluation,
        tracker=inputs.tracker,
        clock=clock,
        dumps=dumps,
        side_by_side=roles.side_by_side,
        saver=_saver(inputs, roles, turns),
        stop=stop,
    )
    return PpoTrainer(config, parts, start.progress)


def _saver(inputs: RunInputs, roles: RunningRoles, turns: DeviceTurns) -> CheckpointSaver | None:
    plan, state = inputs.save_plan, inputs.start.run_state
    return None if plan is None else CheckpointSaver(plan, state, groups=roles.groups, take=turns.take)


def _sft_loop(
    config: Config, roles: RunningRoles, inputs: RunInputs, turns: DeviceTurns, *, clock: RunClock, stop: StopRequest
) -> SftTrainer:
    say(*_load(inputs.start, roles.groups, turns))
    parts = SftParts(
        actor=roles.groups["actor"],
        turns=turns,
        examples=inputs.prompts,
        held_out=inputs.eval_sets[0].prompts if inputs.eval_sets else (),
        tracker=inputs.tracker,
        clock=clock,
        saver=_saver(inputs, roles, turns),
        stop=stop,
    )
    return SftTrainer(config, parts, inputs.start.progress)


def _sources(
    config: Config, roles: RunningRoles, inputs: RunInputs, turns: DeviceTurns, *, clock: RunClock, stop: StopRequest
) -> tuple[RolloutSource, Evaluation | None]:
    """What gives the rollouts, and what answers held-out prompts: both by the engine, or files and nothing."""
    num_prompts = config.rollout.rollout_batch_size
    if roles.engine is None:
        return DumpedRollouts(str(config.debug.load_debug_rollout_data), inputs.prompts, num_prompts=num_prompts, clock=clock), None
    engine, sync = roles.engine.engine, roles.engine.sync
    keeper = EngineKeeper(turns, sync, engine, clock, attempts=config.push_attempts)
    samples = SampleBuilder(
        engine=engine,
        tokenizer=inputs.tokenizer,
        run_seed=config.run.seed,
        vocab_size=inputs.shape.vocab_size,
        mask_truncated=config.ppo.truncation_policy == "mask",
        restore=keeper.restore,
        answering=stop.answering,
    )
    rollouts = GeneratedRollouts(
        keeper=keeper,
        samples=samples,
        rewards=inputs.rewards,
        prompts=inputs.prompts,
        sampling=rollout_sampling(config, inputs.tokenizer),
        num_prompts=num_prompts,
        n_samples_per_prompt=config.rollout.n_samples_per_prompt,
        clock=clock,
        check_alive=roles.check_alive,
    )
    if not inputs.eval_sets:
        return rollouts, None
    return rollouts, Evaluation.of(
        config,
        inputs.eval_sets,
        samples=samples,
        rewards=inputs.rewards,
        tracker=inputs.tracker,
        check_alive=roles.check_alive,
    )


def _run_info(config: Config, start: StartPoint) -> RunInfo:
    notes: list[str] = []
    what = "Fine-tuning" if config.objective == "sft" else "PPO" if config.trains else "Rollouts"
    if config.generates and config.reward.custom_rm_path is None and config.reward.rm_type == "vader":
        notes.append(_LEXICON_NOTE)
    if not config.generates and config.objective == "ppo":
        notes.append(f"Trains on the rollouts of {config.debug.load_debug_rollout_data}; no engine is started.")
    if not config.trains:
        notes.append("Generates with the weights of --hf-checkpoint; nothing is trained.")
    num_critic_only = config.ppo.num_critic_only_steps
    if num_critic_only > 0 and config.has_critic:
        first = "first rollout trains" if num_critic_only == 1 else f"first {num_critic_only} rollouts train"
        notes.append(f"The {first} the critic only, so the reward starts flat.")
    return RunInfo(
        title=f"{what} of {Path(config.model.hf_checkpoint).name}",
        run_dir=Path(config.run.save),
        num_rollout=config.run.num_rollout,
        config_yaml=config.to_yaml(),
        notes=tuple(notes),
        start_rollout=start.progress.rollout_id,
        run_id=start.run_state.run_id,
        unit="batch" if config.objective == "sft" else "rollout",
    )
