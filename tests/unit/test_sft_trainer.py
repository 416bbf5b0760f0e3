"""The loop of supervised fine-tuning with parts that write down what it does with them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from slime_ppo.checkpoint.progress import Progress
from slime_ppo.checkpoint.run_state import RunState
from slime_ppo.config.cli import SFT, merge_settings
from slime_ppo.config.fields import Value
from slime_ppo.config.root import OPTION_BY_KEY, Config
from slime_ppo.config.yaml_file import Setting
from slime_ppo.errors import NumericsError
from slime_ppo.orchestration.interrupts import Preempted, StopRequest
from slime_ppo.orchestration.protocols import BatchHandle
from slime_ppo.orchestration.turns import DeviceTurns
from slime_ppo.sft_trainer import SftParts, SftTrainer
from slime_ppo.tracking.clock import SFT_PHASES, RunClock
from slime_ppo.tracking.console import rollout_line
from slime_ppo.types.sample import Prompt
from slime_ppo.types.stats import Stats
from slime_ppo.types.step_plan import StepPlan
from tests.helpers.played_time import PlayedTime
from tests.helpers.saved_runs import make_saver
from tests.helpers.trainer_parts import CountingPrompts, RecordingRole, RecordingTracker, step_stats

HELD_OUT = tuple(Prompt(row, "q", np.array([5, 6], np.int32), "[[7,8,3],[1,1,1]]") for row in range(5))


def small(**values: Value) -> Config:
    """Four batches of two examples."""
    given: dict[str, Value] = {
        "model.hf_checkpoint": "model",
        "data.prompt_data": "examples.jsonl",
        "run.num_rollout": 4,
        "batch.global_batch_size": 2,
        "optimizer.lr": 1e-3,
        "model.save_hf": False,
    }
    given |= {key.replace("__", "."): value for key, value in values.items()}
    return merge_settings([Setting(OPTION_BY_KEY[key], value, "test") for key, value in given.items()], SFT)[0]


class Examples(CountingPrompts):
    """Prompts with what follows them."""

    def next_prompts(self, n: int) -> list[Prompt]:
        return [replace(one, label="[[7,3],[1,0]]") for one in super().next_prompts(n)]

    def __len__(self) -> int:
        return 4


class Learner(RecordingRole):
    """Trains on examples as they are; the held-out loss falls by 1 with each step."""

    def train(self, handle: BatchHandle, plan: StepPlan, learning_rates: Sequence[float]) -> list[Stats]:
        return super().train(replace(handle, parts=("log-probs", "advantages")), plan, learning_rates)

    def compute_log_probs(self, handle: BatchHandle) -> tuple[BatchHandle, Stats]:
        assert not isinstance(handle.batch, int)
        num_tokens = int(self.batches[-1].loss_mask.sum())
        self.log_prob_stats = Stats()
        self.log_prob_stats.add_mean("nll", (9.0 - len(self.plans)) * num_tokens, num_tokens)
        return super().compute_log_probs(handle)


class Run:
    """A loop, and what it has done."""

    def __init__(
        self, config: Config, *, saves: bool = False, stop: StopRequest | None = None, progress: Progress | None = None
    ) -> None:
        self.journal: list[str] = []
        self.actor, self.tracker = Learner("actor", self.journal), RecordingTracker(self.journal)
        self.examples, self.clock = Examples(), RunClock(SFT_PHASES)
        self.progress = progress or Progress.start(config.ppo, self.examples.state_dict())
        parts = SftParts(
            actor=self.actor,
            turns=DeviceTurns({"actor": self.actor}, offload=config.offloads, on_time=self.clock.add),
            examples=self.examples,
            held_out=HELD_OUT,
            tracker=self.tracker,
            clock=self.clock,
            saver=make_saver(config, journal=self.journal) if saves else None,
            stop=stop or StopRequest(),
        )
        self.trainer = SftTrainer(config, parts, self.progress)


def test_run_trains_batch_by_batch_at_the_scheduled_rate_and_measures_held_out_loss() -> None:
    run = Run(small(optimizer__lr_warmup_iters=2, sft__eval_interval=2))
    run.trainer.run()
    measured = ["actor log-probs"] * 3  # five examples in batches of two
    trained = ["actor train", "log"]
    assert run.journal == [*measured, *trained, *trained, *measured, *trained, "actor train", *measured, "log"]
    assert [rates for [rates] in run.actor.rates] == [5e-4, 1e-3, 1e-3, 1e-3]
    assert [plan.rollout_id for plan in run.actor.plans] == [0, 1, 2, 3]
    assert all([step.rows.tolist() for step in plan.steps] == [[0, 1]] for plan in run.actor.plans)
    assert [one.metrics.get("eval/nll") for one in run.tracker.records] == [9.0, None, 7.0, 5.0]
    assert run.tracker.records[0].metrics["eval/perplexity"] == pytest.approx(np.exp(9))
    assert [one.metrics["train/epoch"] for one in run.tracker.records] == [0.5, 1.0, 1.5, 2.0]
    assert (run.progress.rollout_id, run.progress.version, run.progress.prompts) == (4, 4, run.examples.state_dict())


def test_run_saves_as_ppo_does_and_ends_saved_when_asked_to(tmp_path: Path) -> None:
    config, stop = small(run__save=str(tmp_path), checkpoint__save_interval=3), StopRequest()
    whole = Run(config, saves=True)
    whole.trainer.run()
    assert [line for line in whole.journal if line.startswith("save")] == [
        "save actor as iter_0000003.partial",
        "save actor as iter_0000004.partial",
    ]
    asked = Run(small(run__save=str(tmp_path / "asked")), saves=True, stop=stop)
    asked.actor.outcomes = lambda rollout_id, step: _request(stop, rollout_id == 1)
    with pytest.raises(Preempted):
        asked.trainer.run()
    assert [line for line in asked.journal if line.startswith("save")] == ["save actor as iter_0000002.partial"]
    assert asked.progress.prompts == asked.examples.state_dict()


def test_run_that_is_resumed_trains_the_batches_that_are_left() -> None:
    config = small()
    begun = Progress.start(config.ppo, {"drawn": 6})
    run = Run(config, progress=replace(begun, rollout_id=3, version=2))
    run.trainer.run()
    assert [plan.rollout_id for plan in run.actor.plans] == [3]
    assert (run.progress.rollout_id, run.progress.version) == (4, 3)


def test_run_that_saves_in_the_background_reports_the_time_and_has_it_when_the_next_batch_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = PlayedTime()
    monkeypatch.setattr("slime_ppo.tracking.clock.time", played)
    config = small(run__save=str(tmp_path), checkpoint__save_interval=2, checkpoint__async_save=True, sft__eval_interval=2)
    run = Run(config, saves=True)
    saver = run.trainer.parts.saver
    assert saver is not None
    [saved] = saver._groups.values()
    monkeypatch.setattr(saved, "finish_save", played.slow(saved.finish_save, seconds=7.0))
    run.trainer.run()
    assert run.tracker.metric("perf/save_time") == pytest.approx([0, 0, 7, 0], abs=0.01)

    def measure_once(handle: BatchHandle) -> tuple[BatchHandle, Stats]:
        if len(cut.actor.plans) == 2:
            raise NumericsError("not finite")
        return measure(handle)

    cut = Run(replace(config, run=replace(config.run, save=str(tmp_path / "cut"))), saves=True)
    measure = cut.actor.compute_log_probs
    cut.actor.compute_log_probs = measure_once  # type: ignore[method-assign]
    with pytest.raises(NumericsError, match="not finite"):
        cut.trainer.run()
    state = RunState.read(tmp_path / "cut")
    assert state is not None and [one.rollout_id for one in state.checkpoints] == [2]


def _request(stop: StopRequest, when: bool) -> Stats:
    stop.requested = stop.requested or when
    return step_stats(loss=1.0)


def test_run_stops_after_ten_steps_that_changed_nothing() -> None:
    outcomes: Callable[[int, int], Stats] = lambda rollout_id, step: step_stats(skipped=rollout_id != 1)  # noqa: E731
    run = Run(small(run__num_rollout=20))
    run.actor.outcomes = outcomes
    with pytest.raises(NumericsError, match="10 optimizer steps in a row were skipped"):
        run.trainer.run()
    assert len(run.tracker.records) == 12 and run.progress.version == 1


def test_batch_line_shows_losses_and_is_called_a_batch() -> None:
    run = Run(small(run__num_rollout=1))
    run.actor.outcomes = lambda rollout_id, step: step_stats(loss=2.5, grad_norm=0.5)
    run.trainer.run()
    record = replace(run.tracker.records[0], phases={"actor train": 0.5})
    record = replace(record, metrics={**record.metrics, "train/loss": 2.5})
    line = rollout_line(record, num_rollout=1, previous_reward=None, eta_s=None, unit="batch")
    assert line == "batch 0/1  nll 2.5000  held-out nll 8.0000  gnorm 0.50  len 2 | actor 0.50s"
