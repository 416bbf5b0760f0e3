"""What ranks leave for each other in the store, and which of several failures is told."""

import os
from unittest.mock import patch

import pytest
from torch.distributed import HashStore

from slime_ppo.config.launcher import RankPlace
from slime_ppo.errors import EchoedError, NumericsError, ParallelError
from slime_ppo.orchestration.local_world import FailureWatch, LocalWorld, RankStart, own_device_only


def worlds(num_ranks: int) -> list[LocalWorld]:
    """One per rank, over one store."""
    made = [LocalWorld(RankPlace(rank, num_ranks, rank, started_by_torchrun=True)) for rank in range(num_ranks)]
    store = HashStore()
    for world in made:
        world._store = store
    return made


def test_wait_for_start_gives_what_rank_0_said() -> None:
    first, second = worlds(2)
    start = RankStart("logs", "cpu", timeout_s=5.0)
    first.start(start)
    assert second.wait_for_start() == start


def test_wait_for_start_of_a_run_that_ended_before_it_began_is_none() -> None:
    first, second = worlds(2)
    assert second.exit_code() is None
    first.end(2)
    first.end(0)  # the first call counts
    assert second.wait_for_start() is None
    assert second.exit_code() == 2


def test_most_telling_prefers_another_ranks_own_error_to_the_broken_collective_here() -> None:
    first, second, third = worlds(3)
    third.report(RuntimeError("gloo: Connection closed by peer"))
    second.report(NumericsError("values of sample 3 is nan"))
    found = first.most_telling(RuntimeError("gloo: Connection closed by peer"), "critic values")
    assert type(found) is NumericsError
    assert str(found) == "values of sample 3 is nan [rank 1, critic values] (then failed too: rank 0, rank 2)"


def test_most_telling_keeps_an_error_of_this_rank() -> None:
    first, second = worlds(2)
    second.report(EchoedError("another data-parallel rank has stopped"))
    found = first.most_telling(ValueError("bad"), "actor training")
    assert type(found) is ParallelError
    assert str(found) == "ValueError: bad [rank 0, actor training] (then failed too: rank 1)"


def test_most_telling_of_a_broken_collective_that_nobody_explains_says_that_a_rank_died() -> None:
    with patch("slime_ppo.orchestration.local_world._SETTLE_S", 0.0):
        found = worlds(2)[0].most_telling(RuntimeError("gloo: Connection reset by peer"), "actor training")
    assert type(found) is ParallelError
    assert "a rank died or hangs: actor training broke off on rank 0" in str(found) and "rank-<n>.log" in str(found)


def test_wait_for_ranks_returns_when_all_are_ready_and_names_those_that_are_late() -> None:
    first, second, _ = worlds(3)
    second.ready()
    with pytest.raises(ParallelError, match=r"longer than 0.1 s .*no word from rank 2 of 3"):
        first.wait_for_ranks(0.1)
    worlds_of_two = worlds(2)
    worlds_of_two[1].ready()
    worlds_of_two[0].wait_for_ranks(0.1)


def test_wait_for_ranks_raises_the_error_of_one_that_failed_at_once() -> None:
    first, second = worlds(2)
    second.report(ImportError("no megatron here"))
    with pytest.raises(ParallelError, match=r"ImportError: no megatron here \[rank 1\]"):
        first.wait_for_ranks(60.0)


@pytest.mark.parametrize("noticed", [False, True])
def test_failure_watch_ends_a_rank_that_does_not_notice_and_says_why(noticed: bool, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = worlds(2)
    codes: list[int] = []
    with patch("slime_ppo.orchestration.local_world._WATCH_S", 0.01):
        watch = FailureWatch(first, grace_s=0.2, end=codes.append)
        second.report(NumericsError("values of sample 3 is nan"))
        if noticed:
            watch.stop()
        watch._thread.join(timeout=10)
    assert not watch._thread.is_alive()
    assert codes == ([] if noticed else [1])
    assert ("error: values of sample 3 is nan [rank 1]" in capsys.readouterr().err) is not noticed


@pytest.mark.parametrize(("before", "after"), [(None, "1"), ("4,5,6", "5"), ("7", "7")])
def test_own_device_only_leaves_the_gpu_of_the_local_rank(before: str | None, after: str) -> None:
    given = {} if before is None else {"CUDA_VISIBLE_DEVICES": before}
    with patch.dict(os.environ, given, clear=True):
        own_device_only(RankPlace(3, 4, 1, started_by_torchrun=True))
        assert os.environ["CUDA_VISIBLE_DEVICES"] == after
        del os.environ["CUDA_VISIBLE_DEVICES"]
        own_device_only(RankPlace())
        assert "CUDA_VISIBLE_DEVICES" not in os.environ
