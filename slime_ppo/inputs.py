"""Everything that a run reads and checks before any device is used."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from slime_ppo.checkpoint.layout import role_folders
from slime_ppo.checkpoint.start import StartPoint, check_role_folders_free, find_start, replaced_paths, replaced_runs
from slime_ppo.config.checks import check_engine_support
from slime_ppo.config.preflight import RunShapes, preflight
from slime_ppo.config.root import Config
from slime_ppo.data.chat import load_chat_template
from slime_ppo.data.examples import ExampleFormat
from slime_ppo.data.row_format import RowFormat
from slime_ppo.data.source import PromptSource, RowPolicy, RowReader
from slime_ppo.data.tokenizer import TextTokenizer, load_tokenizer
from slime_ppo.errors import CheckpointError, ConfigError, DataError
from slime_ppo.evaluation import EvalSet
from slime_ppo.orchestration.engine_settings import check_sglang
from slime_ppo.rewards.resolve import resolve_reward
from slime_ppo.rewards.runner import RewardRunner
from slime_ppo.rollout_source import check_dumps
from slime_ppo.saver import SavePlan
from slime_ppo.tracking.base import Tracker
from slime_ppo.tracking.trackers import build_trackers


@dataclass(frozen=True)
class RunInputs:
    """What is read and checked before any device is used. `left_out`: lines that tell which rows of which file are not used.
    `start`: where --load has the run begin. `save_plan` None: nothing is saved to go on from."""

    tokenizer: TextTokenizer
    shapes: RunShapes
    prompts: PromptSource
    eval_sets: tuple[EvalSet, ...]
    left_out: tuple[str, ...]
    rewards: RewardRunner
    reward_warnings: tuple[str, ...]
    tracker: Tracker
    start: StartPoint
    save_plan: SavePlan | None


def read_inputs(config: Config, *, returns_support: bool, asks_servers: bool = True) -> RunInputs:
    """Read and check every input; nothing is started or written. Without `asks_servers`, as for a dry run, a reward server need
    not be there yet. Raises ConfigError for everything that is wrong."""
    try:
        return _read_inputs(config, returns_support=returns_support, asks_servers=asks_servers)
    except (DataError, CheckpointError) as error:
        raise ConfigError(str(error)) from error


def _read_inputs(config: Config, *, returns_support: bool, asks_servers: bool) -> RunInputs:
    shapes = preflight(config)
    check_engine_support(config, returns_support=returns_support)
    check_sglang(config)
    tokenizer = load_tokenizer(config.model.hf_checkpoint)
    read = partial(_read_prompts, config, tokenizer, _row_format(config, tokenizer))
    eval_sources = {name: read(path, origin=config.eval_flag) for name, path in config.eval_files.items()}
    reward = config.reward
    prompts = read(config.data.prompt_data, origin="--prompt-data")
    reward_spec = resolve_reward(reward, policy_folder=config.model.hf_checkpoint, asks_server=asks_servers)
    start = find_start(config, shapes.by_role, prompts)
    if start.config != config:
        preflight(start.config)
    if config.debug.load_debug_rollout_data is not None:
        check_dumps(config, config.debug.load_debug_rollout_data, shapes.actor, first=start.progress.rollout_id)
    return RunInputs(
        tokenizer=tokenizer,
        shapes=shapes,
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
        replaced_runs=replaced_runs(config),
        replaced_paths=replaced_paths(config),
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
