"""Rank 0 of a run without Ray: handles, the errors it tells, and how it lets the others go. The ranks' channel is played."""

import signal
from collections.abc import Iterator
from itertools import count
from typing import Any
from unittest.mock import patch

import pytest
from torch.distributed import HashStore

from slime_ppo.config.launcher import RankPlace
from slime_ppo.errors import ConfigError, NumericsError, ParallelError
from slime_ppo.orchestration.interrupts import Interrupted
from slime_ppo.orchestration.local import LocalRanks, LocalTrainGroup, server_gpus
from slime_ppo.orchestration.local_ranks import Command
from slime_ppo.orchestration.local_world import LocalWorld, RankStart
from slime_ppo.orchestration.protocols import BatchHandle
from slime_ppo.types.stats import Stats
from slime_ppo.types.step_plan import StepPlan

SYNC: Any = {"bucket_bytes": 8, "sync_host": "127.0.0.1", "sync_timeout_s": 1.0}


class Batch:
    """A rollout that remembers the parts it was given."""

    def __init__(self, *parts: object) -> None:
        self.parts = parts

    def with_parts(self, parts: list[object]) -> "Batch":
        return Batch(*self.parts, *parts)


class Channel:
    """Two ranks, of which the second answers what rank 0 does, or raises `breaks`."""

    def __init__(self, world: LocalWorld, _: RankStart) -> None:
        self.place = world.place
        self.commands: list[str | None] = []
        self.breaks: BaseException | None = None
        self.closed = False

    def command(self, command: Command | None) -> None:
        self.commands.append(None if command is None else command.method)

    def answers(self, value: object) -> list[Any]:
        if self.breaks is not None:
            raise self.breaks
        return [value, value]

    def everywhere(self, value: object) -> list[Any]:
        return [value, f"{value} of rank 1"]

    def close(self) -> None:
        self.closed = True


class Role:
    """What RankRole would be."""

    def compute_log_probs(self, batch: Batch) -> tuple[str, Stats]:
        return "log-probs", self._stats()

    def compute_advantages(self, batch: Batch, kl_coef: float) -> tuple[str, Stats]:
        return f"advantages at {kl_coef}", self._stats()

    def train(self, batch: Batch, plan: StepPlan, learning_rates: tuple[float, ...]) -> list[Stats]:
        return [self._stats() for _ in learning_rates]

    def resident_bytes(self) -> int:
        return 5

    def wake(self) -> None:
        raise NumericsError("bad weights")

    def _stats(self) -> Stats:
        stats = Stats()
        stats.add_total("loss", 1.0)
        return stats


@pytest.fixture
def worlds() -> list[LocalWorld]:
    made = [LocalWorld(RankPlace(rank, 2, rank, started_by_torchrun=True)) for rank in range(2)]
    store = HashStore()
    for world in made:
        world._store = store
    return made


@pytest.fixture
def ranks(worlds: list[LocalWorld]) -> Iterator[Any]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with patch("slime_ppo.orchestration.local.RankChannel", Channel), patch("slime_ppo.orchestration.local_world._SETTLE_S", 0.0):
        made: Any = LocalRanks(worlds[0], RankStart("logs", "cpu", timeout_s=1.0))
        made._own._roles = {"actor": Role(), "critic": Role()}
        yield made
    made._watch.stop()
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_train_group_every_stage_adds_the_columns_of_all_ranks_under_a_new_handle(ranks: Any) -> None:
    numbers = count()
    actor, critic = (LocalTrainGroup(ranks, role, numbers, **SYNC) for role in ("actor", "critic"))
    put: Any = Batch()
    first = actor.put(put)
    second, stats = actor.compute_log_probs(first)
    third, _ = critic.compute_advantages(second, 0.5)
    assert stats.result() == {"loss": 2.0}
    seen: Any = [actor.fetch(handle) for handle in (first, second, third)]
    log_probs = ("log-probs", "log-probs of rank 1")
    assert [batch.parts for batch in seen] == [(), log_probs, (*log_probs, "advantages at 0.5", "advantages at 0.5 of rank 1")]
    assert [step.result() for step in critic.train(third, StepPlan(0, ()), [0.1, 0.2])] == [{"loss": 2.0}] * 2
    assert critic.resident_bytes() == 10
    actor.put(put)
    assert len(ranks._own.batches) == 1, "the rollout of before is let go"


def test_train_group_handle_of_another_group_is_refused(ranks: Any) -> None:
    with pytest.raises(TypeError, match="its batch is str, expected a number"):
        LocalTrainGroup(ranks, "actor", count(), **SYNC).fetch(BatchHandle("elsewhere"))


def test_call_error_of_rank_0_is_told_with_rank_and_phase_and_signals_do_not_hide_it(ranks: Any) -> None:
    with pytest.raises(NumericsError, match=r"bad weights \[rank 0, actor wake\]"):
        LocalTrainGroup(ranks, "actor", count(), **SYNC).wake()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_finish_save_after_a_call_that_was_broken_off_is_refused_at_once(ranks: Any) -> None:
    group = LocalTrainGroup(ranks, "actor", count(), **SYNC)
    with pytest.raises(NumericsError):
        group.wake()
    asked = len(ranks._channel.commands)
    with pytest.raises(ParallelError, match="out of step"):
        group.finish_save()
    assert len(ranks._channel.commands) == asked, "a rank would take it for something else, or wait for ever"


@pytest.mark.parametrize("broken", [RuntimeError("gloo: Connection closed by peer"), Interrupted(signal.SIGTERM)])
def test_call_error_of_another_rank_is_told_whatever_stopped_rank_0(
    ranks: Any, worlds: list[LocalWorld], broken: BaseException
) -> None:
    worlds[1].report(ValueError("planted"))
    ranks._channel.breaks = broken
    with pytest.raises(ParallelError, match=r"ValueError: planted \[rank 1, actor memory\]"):
        ranks.call("actor memory", "resident_bytes", "actor")


def test_call_signal_without_a_failure_stays_a_signal(ranks: Any) -> None:
    ranks._channel.breaks = Interrupted(signal.SIGTERM)
    with pytest.raises(Interrupted):
        ranks.call("actor memory", "resident_bytes", "actor")


def test_close_commands_the_end_only_to_ranks_that_are_in_step(ranks: Any, worlds: list[LocalWorld]) -> None:
    ranks.call("actor memory", "resident_bytes", "actor")
    ranks._channel.breaks = Interrupted(signal.SIGTERM)
    with pytest.raises(Interrupted):
        ranks.call("actor memory", "resident_bytes", "actor")
    ranks.close(143)
    assert ranks._channel.commands == ["resident_bytes", "resident_bytes"] and not ranks._channel.closed
    assert worlds[1].exit_code() == 143


def test_close_between_commands_lets_the_ranks_go(ranks: Any, worlds: list[LocalWorld]) -> None:
    ranks.close(0)
    assert ranks._channel.commands == [None] and ranks._channel.closed
    assert worlds[1].exit_code() == 0


def test_server_gpus_are_those_that_the_run_was_given() -> None:
    assert server_gpus(None, range(2, 4)) == (2, 3)
    assert server_gpus("4,5,6,7", range(2, 4)) == ("6", "7")
    assert server_gpus("GPU-a, GPU-b", range(1, 2)) == ("GPU-b",)
    with pytest.raises(ConfigError, match="need 4 GPUs .* CUDA_VISIBLE_DEVICES names 1: 4"):
        server_gpus("4", range(2, 4))
