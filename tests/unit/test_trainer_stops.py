"""SIGTERM at every stage of the training loop: what is saved, and that the resumed loop does what the one that went on did."""

import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slime_ppo.checkpoint.buffer import read_samples
from slime_ppo.checkpoint.progress import Progress
from slime_ppo.checkpoint.run_state import RunState, SavedState
from slime_ppo.config.fields import Value
from slime_ppo.config.root import Config
from slime_ppo.errors import CheckpointError, ParallelError, RewardError, RolloutError
from slime_ppo.orchestration.interrupts import Interrupted, Preempted
from slime_ppo.tracking.base import RolloutRecord
from slime_ppo.trainer import PpoTrainer
from tests.helpers.configs import make_config
from tests.helpers.played_time import PlayedTime
from tests.helpers.saved_runs import save_plan
from tests.helpers.trainer_parts import Parts, step_stats

NUM_ROLLOUT = 3


def config_in(folder: Path, **values: Value) -> Config:
    defaults: dict[str, Value] = {
        "run__num_rollout": NUM_ROLLOUT,
        "run__save": str(folder),
        "model__save_hf": False,
        "rollout__rollout_batch_size": 4,
        "batch__global_batch_size": 2,
        "tracking__num_logged_samples": 0,
        "ppo__kl_coef": 0.1,
        "ppo__kl_controller": "adaptive",
        "ppo__kl_target": 1.0,
        "ppo__kl_horizon": 8.0,
    }
    return make_config(**(defaults | values))


def parts_in(config: Config, saved: RunState | None = None) -> Parts:
    """A loop whose numbers depend on the rollout, so that a rollout done twice or left out would show."""
    parts = Parts(config, save_plan=save_plan(config), saved=saved or RunState("run"))
    parts.actor.log_prob_stats.add_mean("kl", 3.0, 10)
    parts.actor.log_prob_stats.add_mean("kl_trajectory", 30.0, 10)
    parts.actor.outcomes = lambda rollout_id, step: step_stats(pg_loss=rollout_id + step / 10, skipped=(rollout_id, step) == (0, 1))
    return parts


def run(parts: Parts, progress: Progress | None = None) -> Parts:
    trainer_parts = parts.trainer_parts()
    with parts.stop.listening():
        PpoTrainer(parts.config, trainer_parts, progress or parts.progress).run()
    return parts


def stopped(parts: Parts) -> Parts:
    """The same, by SIGTERM."""
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(Preempted) as caught:
            run(parts)
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGINT, before[1])
    assert caught.value.exit_code == 3
    return parts


def resumed(config: Config) -> Parts:
    """A new loop that goes on where the last one was stopped."""
    folder = Path(config.run.save)
    state = RunState.read(folder)
    assert state is not None and state.newest is not None
    newest = state.newest
    saved = SavedState.read(folder / newest.state_file, newest.state_sha256)
    samples = () if newest.buffer_file is None else read_samples(folder / newest.buffer_file)
    parts = parts_in(config, state)
    parts.prompts.load_state_dict(saved.progress["prompts"])
    return run(parts, Progress.restored(saved.progress, samples, config.ppo))


def at(rollout_id: int, method: Callable[..., Any]) -> Callable[..., Any]:
    """SIGTERM in the middle of a part's method, in this rollout."""
    calls = iter(range(100))

    def signalled(*arguments: Any, **named: Any) -> Any:
        result = method(*arguments, **named)
        if next(calls) == rollout_id:
            signal.raise_signal(signal.SIGTERM)
        return result

    return signalled


def numbers(*all_parts: Parts) -> list[RolloutRecord]:
    """What was logged, without times."""
    records = [record for parts in all_parts for record in parts.tracker.records]
    return [replace(one, phases={}, metrics={k: v for k, v in one.metrics.items() if not k.startswith("perf/")}) for one in records]


STAGES: dict[str, Callable[[Parts], tuple[object, str]]] = {
    "before generation": lambda parts: (parts.engine, "weight_version"),
    "generate": lambda parts: (parts.engine, "generate"),
    "reward": lambda parts: (parts.rewards, "score"),
    "log-probs": lambda parts: (parts.actor, "compute_log_probs"),
    "values": lambda parts: (parts.critic, "compute_advantages"),
    "critic train": lambda parts: (parts.critic, "train"),
    "actor train": lambda parts: (parts.actor, "train"),
    "report": lambda parts: (parts.tracker, "log"),
}


@pytest.mark.parametrize("offload", [True, False])
@pytest.mark.parametrize("stage", STAGES)
def test_loop_stopped_at_any_stage_goes_on_as_if_it_had_not_been(tmp_path: Path, stage: str, offload: bool) -> None:
    whole = run(parts_in(config_in(tmp_path / "whole", cluster__offload=offload)))
    assert len({record.metrics["rollout/kl_coef"] for record in whole.tracker.records}) == NUM_ROLLOUT
    config = config_in(tmp_path / "run", cluster__offload=offload)
    first = parts_in(config)
    owner, name = STAGES[stage](first)
    setattr(owner, name, at(1, getattr(owner, name)))
    stopped(first)
    trained = stage in ("critic train", "actor train", "report")
    state = RunState.read(tmp_path / "run")
    assert state is not None and state.newest is not None
    assert state.newest.rollout_id == (2 if trained else 1), "a training that has begun is finished, any other is not"
    assert state.newest.buffered == (stage in ("reward", "log-probs", "values"))
    second = resumed(config)
    assert numbers(first, second) == numbers(whole)
    asked = [requests for parts in (first, second) for requests in parts.engine.requests]
    again = [requests[0].sample_id for requests in asked]
    assert again == ([0, 4, 4, 8] if stage == "generate" else [0, 4, 8]), "only what was cut is generated again"
    assert (second.prompts.drawn, second.engine.version) == (whole.prompts.drawn, whole.engine.version)
    assert [plan.rollout_id for parts in (first, second) for plan in parts.actor.plans] == [0, 1, 2]


def test_loop_stopped_in_its_last_training_ends_by_itself_and_saves(tmp_path: Path) -> None:
    parts = parts_in(config_in(tmp_path, model__save_hf=True))
    parts.actor.train = at(NUM_ROLLOUT - 1, parts.actor.train)  # type: ignore[method-assign]
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    try:
        run(parts)
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGINT, before[1])
    assert f"save actor in {tmp_path}/hf" in parts.journal
    state = RunState.read(tmp_path)
    assert state is not None and [one.rollout_id for one in state.checkpoints] == [NUM_ROLLOUT]


def test_loop_saves_at_its_interval_and_at_its_end(tmp_path: Path) -> None:
    parts = run(parts_in(config_in(tmp_path, checkpoint__save_interval=2, checkpoint__keep_checkpoints=None)))
    state = RunState.read(tmp_path)
    assert state is not None and [one.rollout_id for one in state.checkpoints] == [2, 3]
    after_logs = [parts.journal[place + 1 :] for place, line in enumerate(parts.journal) if line == "log"]
    assert [line for line in after_logs[1][:8] if line.startswith("save")] == [
        "save actor as iter_0000002.partial",
        "save critic as iter_0000002.partial",
    ], "a rollout is saved when its metrics are written"


def test_loop_that_saves_in_the_background_publishes_after_the_next_generation(tmp_path: Path) -> None:
    config = config_in(tmp_path, checkpoint__save_interval=1, checkpoint__async_save=True)
    journal = run(parts_in(config)).journal
    first_save = journal.index("save critic as iter_0000001.partial in the background")
    assert journal[first_save:].index("generate") < journal[first_save:].index("finish actor")
    between = journal[first_save : first_save + journal[first_save:].index("finish actor")]
    assert "actor train" not in between and "actor log-probs" not in between
    assert "save actor as iter_0000003.partial" in journal, "the last one is waited for"


def fail_in_second_rollout(parts: Parts, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its rewards, when a save in the background may be under way."""
    score, calls = parts.rewards.score, iter(range(NUM_ROLLOUT))

    def fails(*arguments: Any, **named: Any) -> Any:
        if next(calls) == 1:
            raise error
        return score(*arguments, **named)

    monkeypatch.setattr(parts.rewards, "score", fails)
    with pytest.raises(type(error)) as caught:
        run(parts)
    assert caught.value is error


ENDS = (RewardError("the user's function"), RolloutError("lost"), TypeError("a bug"), Interrupted(signal.SIGINT))


@pytest.mark.parametrize("error", ENDS, ids=lambda error: type(error).__name__)
def test_loop_that_ends_in_a_rollout_has_what_it_saved_in_the_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    parts = parts_in(config_in(tmp_path, checkpoint__save_interval=1, checkpoint__async_save=True))
    fail_in_second_rollout(parts, error, monkeypatch)
    state = RunState.read(tmp_path)
    assert state is not None and [one.rollout_id for one in state.checkpoints] == [1]


def test_loop_that_ends_by_a_dead_rank_asks_no_rank_for_what_it_saved_in_the_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_in(tmp_path, checkpoint__save_interval=1, checkpoint__async_save=True)
    parts = parts_in(config)
    fail_in_second_rollout(parts, ParallelError("actor rank 1 died"), monkeypatch)
    assert "finish actor" not in parts.journal and RunState.read(tmp_path) is None
    assert [path.name for path in (tmp_path / "actor").iterdir()] == ["iter_0000001.partial"]
    run(parts_in(config))
    assert not list(tmp_path.glob("*/*.partial")), "the next run in the folder sweeps it"


@pytest.mark.parametrize(
    "error", [CheckpointError("disk full"), ParallelError("out of step")], ids=lambda error: type(error).__name__
)
def test_loop_that_ends_for_a_reason_tells_it_although_the_save_in_the_background_fails_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    parts = parts_in(config_in(tmp_path, checkpoint__save_interval=1, checkpoint__async_save=True))

    def fails() -> None:
        raise error

    monkeypatch.setattr(parts.critic, "finish_save", fails)
    fail_in_second_rollout(parts, RewardError("the user's function"), monkeypatch)
    assert RunState.read(tmp_path) is None


def test_loop_reports_the_time_of_a_save_in_the_rollout_that_it_delays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played = PlayedTime()
    monkeypatch.setattr("slime_ppo.tracking.clock.time", played)
    for in_background, slow in ((False, "save_checkpoint"), (True, "finish_save")):
        folder = tmp_path / slow
        parts = parts_in(config_in(folder, checkpoint__save_interval=2, checkpoint__async_save=in_background))
        monkeypatch.setattr(parts.critic, slow, played.slow(getattr(parts.critic, slow), seconds=7.0))
        assert run(parts).tracker.metric("perf/save_time") == pytest.approx([0, 0, 7], abs=0.01)
        assert parts.tracker.metric("perf/step_time") == pytest.approx([0, 0, 7], abs=0.01)


def test_loop_whose_save_fails_ends_with_what_is_left(tmp_path: Path) -> None:
    parts = parts_in(config_in(tmp_path, checkpoint__save_interval=1))
    trainer_parts = parts.trainer_parts()
    (tmp_path / "critic").write_text("a file where the critic's folder belongs")
    with pytest.raises(CheckpointError, match=r"after 1 rollouts could not be saved: .*critic.*There is none of before"):
        PpoTrainer(parts.config, trainer_parts, parts.progress).run()


def test_loop_without_checkpoints_saves_nothing(tmp_path: Path) -> None:
    parts = Parts(config_in(tmp_path))
    run(parts)
    assert list(tmp_path.iterdir()) == [] and not [line for line in parts.journal if line.startswith("save")]


def test_loop_stopped_beside_an_engine_that_has_died_saves_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_in(tmp_path / "run")
    parts = parts_in(config)
    monkeypatch.setattr(parts.engine, "generate", at(1, parts.engine.generate))

    def dead() -> None:
        raise RolloutError("the engine's process has died")

    monkeypatch.setattr(parts.engine, "abort", dead)
    stopped(parts)
    assert len(resumed(config).tracker.records) == NUM_ROLLOUT - 1
