"""From a config to a running job: everything that can be checked first, then the ranks and the engine, and the loop."""

import logging
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from slime_ppo.checkpoint.start import StartPoint
from slime_ppo.config.batch_plan import batch_plan_text
from slime_ppo.config.checks import config_warnings
from slime_ppo.config.launcher import LauncherName
from slime_ppo.config.roles import RoleName
from slime_ppo.config.root import Config
from slime_ppo.errors import CheckpointError, SlimePpoError
from slime_ppo.evaluation import Evaluation
from slime_ppo.inputs import RunInputs, read_inputs
from slime_ppo.orchestration.engine_keeper import ROLLOUT, EngineKeeper
from slime_ppo.orchestration.interrupts import Interrupted, StopRequest, interrupts_raise
from slime_ppo.orchestration.local import LocalLauncher
from slime_ppo.orchestration.local_world import LocalWorld
from slime_ppo.orchestration.protocols import Launcher, RunningRoles, Tenant, TrainGroup
from slime_ppo.orchestration.turns import DeviceTurns, RolloutTenant
from slime_ppo.rollout.dump import DumpWriter
from slime_ppo.rollout.generate import SampleBuilder
from slime_ppo.rollout_only import RolloutOnly
from slime_ppo.rollout_source import DumpedRollouts, GeneratedRollouts, RolloutSource, rollout_sampling
from slime_ppo.run_folder import claim_run_folder, folder_locks, open_logs, way_on
from slime_ppo.saver import CheckpointSaver
from slime_ppo.sft_trainer import SftParts, SftTrainer
from slime_ppo.tracking.base import RunInfo
from slime_ppo.tracking.clock import ROLLOUT_PHASES, SFT_PHASES, RunClock, run_phases
from slime_ppo.trainer import PpoTrainer, TrainerParts
from slime_ppo.types.load_report import LoadReport

_log = logging.getLogger(__name__)

_LEXICON_NOTE = (
    "A lexicon reward is easily flattered: it counts kind words, not kind sentences. Read the samples and the most "
    "repeated words beside the curve before you believe it."
)


def run_job(config: Config, launcher_name: LauncherName, world: LocalWorld) -> int:
    """Train on the ranks that Ray starts, or without it on those of `world`, of which this is rank 0. Returns the exit code: 0
    done, 3 when SIGTERM ended it and its state is saved, 128 + signal number after SIGINT, or SIGTERM with nothing to save.

    Raises ConfigError before any device is used, another SlimePpoError when the run fails, with the place in its text. On
    every way out all processes that the run started are ended.
    """
    phases = run_phases(has_critic=config.has_critic, side_by_side=not config.cluster.colocate)
    clock = RunClock(SFT_PHASES if config.objective == "sft" else phases if config.trains else ROLLOUT_PHASES)
    begun: StartPoint | None = None
    try:
        with ExitStack() as stack:
            stack.enter_context(interrupts_raise())
            locks = stack.enter_context(folder_locks(config))
            inputs = read_inputs(config, returns_support=launcher_for(config, launcher_name, world).returns_support)
            launcher = launcher_for(inputs.start.config, launcher_name, world)
            locks.claim()
            open_logs(config)
            begun = inputs.start
            if config.generates:
                stack.enter_context(inputs.rewards).start()
            say(batch_plan_text(config), *config_warnings(config), *locks.warnings, *inputs.reward_warnings, *inputs.left_out)
            stack.enter_context(launcher)
            say(launcher.description)
            roles = launcher.start(lambda: clock.where)
            stop = StopRequest()
            loop = _loop(config, roles, inputs, clock, stop=stop)
            claim_run_folder(config, inputs.start)
            if roles.engine is not None:
                stack.callback(roles.engine.sync.close)
            stack.callback(inputs.tracker.close)
            inputs.tracker.start(_run_info(config, inputs.start))
            if inputs.save_plan is not None:
                stack.enter_context(stop.listening())
            loop.run()
    except Interrupted as interrupt:
        say(f"stopped by {interrupt} in {clock.where}; {way_on(config, begun)}")
        return interrupt.exit_code
    except SlimePpoError as error:
        raise type(error)(f"{clock.where}: {error}") from error
    except Exception as error:
        _log.exception("the run failed in %s", clock.where)
        traceback = f"in {config.run.save}/logs/driver.log" if begun is not None else "above"
        raise SlimePpoError(f"{clock.where}: {type(error).__name__}: {error}. The traceback is {traceback}") from error
    say(f"done: {config.run.save}/report.html")
    return 0


def say(*lines: str) -> None:
    """A line for the person at the terminal; metrics go through the trackers."""
    for line in lines:
        sys.stdout.write(line.rstrip("\n") + "\n")
    sys.stdout.flush()


def _load(start: StartPoint, groups: Mapping[RoleName, TrainGroup], turns: DeviceTurns) -> list[str]:
    """Let the roles take over the checkpoint that the run starts from, and say what they have."""
    reports: dict[RoleName, LoadReport] = {}
    for role, folder in start.folders.items():
        turns.take(role)
        try:
            reports[role] = groups[role].load_checkpoint(str(folder), with_optimizer=start.resumed)
        except CheckpointError as error:
            if folder.is_dir():
                raise
            raise CheckpointError(
                f"{folder} has gone since this run has found it: a run that goes on there deletes its older checkpoints. Start "
                "again; with a higher --keep-checkpoints there they stay for longer"
            ) from error
    return [start.told(reports), *start.changes] if start.text else []


def launcher_for(config: Config, name: LauncherName, world: LocalWorld) -> Launcher:
    """Starts nothing yet. Ray is imported only where it is used."""
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
    dumps = None if where is None else DumpWriter(where, config.to_yaml(), inputs.shapes.actor.plain_values())
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
        vocab_size=inputs.shapes.actor.vocab_size,
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
