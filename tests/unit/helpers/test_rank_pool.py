"""The pool of ranks itself: results by rank, failures with tracebacks, hangs and deaths that leave a usable pool."""

import os
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.helpers.rank_pool import RankError, RankPool

HERE = "tests.unit.helpers.test_rank_pool"


def report(offset: int) -> tuple[int, int, int]:
    gathered: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(gathered, dist.get_rank())
    return dist.get_rank() + offset, sum(gathered), os.getpid()


def misbehave(kind: str) -> None:
    if dist.get_rank() == 1:
        if kind == "raise":
            raise ValueError("rank one objects")
        if kind == "die":
            os._exit(7)
        time.sleep(600)
    dist.barrier()


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool() as created:
        yield created


def test_run_two_worlds_returns_results_by_rank_and_keeps_the_processes(pool: RankPool) -> None:
    first = pool.run(f"{HERE}:report", world=2, offset=10)
    second = pool.run(f"{HERE}:report", world=3, offset=0)
    assert [r[:2] for r in first] == [(10, 1), (11, 1)]
    assert [r[:2] for r in second] == [(0, 3), (1, 3), (2, 3)]
    assert [r[2] for r in first] == [r[2] for r in second[:2]]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("raise", r"\[rank 1\] Traceback[\s\S]*rank one objects"),
        ("die", r"\[rank 1\] died with exit code 7"),
        ("hang", r"\[rank 1\] gave no answer"),
    ],
)
def test_run_rank_that_fails_raises_and_the_next_call_works(pool: RankPool, kind: str, message: str) -> None:
    with pytest.raises(RankError, match=message):
        pool.run(f"{HERE}:misbehave", world=2, timeout_s=2.0, kind=kind)
    assert [r[:2] for r in pool.run(f"{HERE}:report", world=2, offset=0)] == [(0, 1), (1, 1)]


def test_preload_module_that_does_not_exist_names_it(pool: RankPool) -> None:
    with pytest.raises(RankError, match="no_such_module_here"):
        pool.preload("no_such_module_here")


def test_close_leaves_no_rank_behind() -> None:
    pool = RankPool()
    pids = [r[2] for r in pool.run(f"{HERE}:report", world=2, offset=0)]
    assert pool.rank_pids() == pids
    pool.close()
    deadline = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
