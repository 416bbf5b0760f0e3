"""Run folders with checkpoints, made by the real saver of roles that write a few words instead of weights."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from slime_ppo.checkpoint.layout import role_folders
from slime_ppo.checkpoint.progress import Progress
from slime_ppo.checkpoint.run_state import RunState
from slime_ppo.config.model_shape import ModelShape
from slime_ppo.config.roles import RoleName
from slime_ppo.config.root import Config
from slime_ppo.saver import CheckpointSaver, SavePlan
from slime_ppo.types.sample import FinishReason, Prompt, Sample, Support, VersionSpan
from tests.helpers.trainer_parts import Journal, RecordingRole


def save_plan(config: Config, shapes: Mapping[RoleName, ModelShape] | None = None) -> SavePlan:
    """As the launcher makes it."""
    return SavePlan(
        run_folder=Path(config.run.save),
        folders=role_folders(config),
        interval=config.checkpoint.save_interval,
        keep=config.checkpoint.keep_checkpoints,
        settings=config.values(),
        models={role: shape.plain_values() for role, shape in (shapes or {}).items()},
    )


def make_saver(
    config: Config,
    *,
    shapes: Mapping[RoleName, ModelShape] | None = None,
    journal: Journal | None = None,
    state: RunState | None = None,
) -> CheckpointSaver:
    """A saver of recording roles; `journal` gets what they are asked to do."""
    lines = [] if journal is None else journal
    groups: dict[RoleName, RecordingRole] = {role: RecordingRole(role, lines) for role in config.roles}
    return CheckpointSaver(
        save_plan(config, shapes), state or RunState("run-1"), groups=groups, take=lambda role: lines.append(f"take {role}")
    )


def progress_after(config: Config, rollout_id: int, *, prompts: Mapping[str, object], samples: Sequence[Sample] = ()) -> Progress:
    """A loop that has done `rollout_id` rollouts, all of which changed the weights."""
    begun = Progress.start(config.ppo, prompts)
    return replace(begun, rollout_id=rollout_id, version=rollout_id, samples=tuple(samples))


def make_sample(sample_id: int, *, full: bool) -> Sample:
    """A sample of three tokens; a `full` one has everything that a sample may have."""
    prompt = Prompt(sample_id, "Où?\n", np.array([5, 6], np.int32), "label" if full else None, {"level": 3} if full else {})
    return Sample(
        sample_id=sample_id,
        group_id=sample_id // 2,
        trajectory_id=sample_id,
        prompt=prompt,
        response_ids=np.array([7, 8, 3], np.int32),
        response_text="là ☃",
        rollout_log_probs=np.array([-0.1, -1e-30, -7.25], np.float32),
        support=Support(np.array([7, 8, 9, 3], np.int32), np.array([1, 2, 1], np.int32)) if full else None,
        loss_mask=np.array([True, False, True]),
        finish=FinishReason.LENGTH if full else FinishReason.STOP,
        weight_versions=(VersionSpan(4, 0, 2), VersionSpan(5, 2, 3)) if full else (VersionSpan(5, 0, 3),),
        num_cached_tokens=2 if full else 0,
        full_log_probs=np.array([-0.2, -0.3, -0.4], np.float32) if full else None,
        reward=0.1 + 0.2 if full else 1.0,
        reward_cut=full,
        process_rewards=np.array([0.0, 0.5, 0.0], np.float32) if full else None,
    )


def same_samples(left: Sequence[Sample], right: Sequence[Sample]) -> bool:
    """Equal in every field, bit for bit."""
    return len(left) == len(right) and all(_plain(a) == _plain(b) for a, b in zip(left, right, strict=True))


def _plain(value: object) -> object:
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.tobytes()
    if isinstance(value, Prompt | Sample | Support):
        return {name: _plain(part) for name, part in vars(value).items()}
    return value
