"""Weights of a trainer on four ranks (tensor- and pipeline-parallel) in a server with two: the same bits by every path, and pushes
that meet a server that hangs or dies. The ranks are the pool's, commanded as in a run without Ray; the server is stock SGLang."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import psutil
import pytest

from slime_ppo.config.ppo import PpoConfig
from slime_ppo.parallel.layout import ParallelLayout
from slime_ppo.parallel.worker_settings import BatchSettings
from slime_ppo.rollout.sglang.server import LocalServer, ServerAddress
from tests.dist.backends.cases import Case
from tests.helpers.rank_pool import RankPool
from tests.helpers.sglang_servers import NOTICED_S
from tests.helpers.tiny_llama import make_tiny_llama

TIMEOUT_S = 8.0


@pytest.fixture
def setup(rank_pool: RankPool, sglang_server_of_two_ranks: LocalServer, tmp_path: Path) -> Any:
    rank_pool.preload("tests.sglang.sync_ranks")
    from tests.sglang.sync_ranks import Setup

    folder = str(make_tiny_llama(tmp_path / "actor", tie=False, seed=5))  # the shape of what is served, other weights
    case = Case(folder, folder, None, PpoConfig()).on(ParallelLayout(4, tp_size=2, pp_size=2), BatchSettings(1, None), tmp_path)
    return Setup(case, (sglang_server_of_two_ranks.start(),), str(tmp_path), timeout_s=TIMEOUT_S)


def test_every_path_brings_the_bits_that_our_checksums_and_a_load_of_the_exported_folder_give(
    rank_pool: RankPool, setup: Any
) -> None:
    found = rank_pool.run("tests.sglang.sync_ranks:run", world=4, timeout_s=180, setup=setup, scenario="paths_agree")[0]
    start, once, doubled = found.pop("start"), found["broadcast, once"], found["broadcast, doubled"]
    [[first_rank, second_rank]] = once
    assert first_rank != second_rank and len(first_rank) == 15
    for name in first_rank:
        held = [servers[0][0][name] for servers in (start, once, doubled)]
        assert len(set(held)) == 3, f"{name} was not changed by a push"
    for name, checksums in found.items():
        assert checksums == (doubled if name.endswith("doubled") else once), name


def test_push_that_meets_a_hung_or_dead_server_or_a_full_disk_fails_alone_and_the_next_succeeds(
    rank_pool: RankPool, sglang_server_of_two_ranks: LocalServer, setup: Any
) -> None:
    group_pid, scheduler_pid = _pids(setup.addresses[0])
    with ThreadPoolExecutor(1) as pool:
        ranks = pool.submit(
            rank_pool.run,
            "tests.sglang.sync_ranks:run",
            world=4,
            timeout_s=240,
            setup=setup,
            scenario="faults",
            group_pid=group_pid,
            scheduler_pid=scheduler_pid,
        )
        _start_again_when_killed(sglang_server_of_two_ranks, Path(setup.scratch), ranks.done)
        told = ranks.result()[0]
    assert told["versions"] == [0, 2, 5]
    hung, seconds = told["hung"]
    assert "of version 1 failed" in hung or "broke" in hung
    assert TIMEOUT_S <= seconds < 2 * TIMEOUT_S + 5
    killed, seconds = told["killed"]
    assert "of version 3 failed" in killed
    assert seconds < NOTICED_S
    assert "pausing the servers failed" in told["still dead"][0]
    disk = told["disk"]
    assert disk["versions"] == [6, 8]
    assert "version_7 (--weight-sync-folder)" in disk["full"] and "File too large" in disk["full"]
    assert disk["left"] == ["version_6"]


def _pids(address: ServerAddress) -> tuple[int, int]:
    """The server's process group, and one of its schedulers."""
    port = int(address.url.rsplit(":", 1)[1])
    mine = psutil.Process().children(recursive=True)
    [main] = [one for one in mine if any(link.laddr.port == port for link in one.net_connections("tcp") if link.status == "LISTEN")]
    schedulers = [one.pid for one in main.children(recursive=True) if "sglang::scheduler" in " ".join(one.cmdline())]
    return os.getpgid(main.pid), schedulers[-1]


def _start_again_when_killed(server: LocalServer, scratch: Path, is_over: Any) -> None:
    while not (scratch / "killed").exists():
        if is_over():
            return
        sleep(0.1)
    deadline = monotonic() + NOTICED_S
    while server.problem() is None and monotonic() < deadline:
        sleep(0.05)
    (scratch / "word").write_text(server.start().url)
    (scratch / "word").rename(scratch / "restarted")
