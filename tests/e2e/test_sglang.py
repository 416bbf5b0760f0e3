"""Whole runs with SGLang's servers: a fault of a server costs no sample and changes no number, and neither launcher, sync path nor
whose server it is matters."""

import json
import os
import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from slime_ppo.rollout.sglang.server import LocalServer
from tests.e2e.conftest import Runs, alive, metrics_of, wait_for_line
from tests.helpers.sglang_servers import KEY, NOTICED_S, SERVING_AGAIN_S, load

SGLANG = ("--rollout-engine", "sglang", "--rollout-top-p", "0.9", "--sglang-deterministic")
GAP = 5e-5
NUM_ROLLOUTS = 2
# 16 samples of 120 tokens of a tiny random model are under way for some seconds, so that a fault can meet them
LONG = (
    "--num-rollout", str(NUM_ROLLOUTS), "--rollout-batch-size", "16", "--global-batch-size", "16", "--micro-batch-size", "16",
    "--rollout-max-prompt-len", "64", "--rollout-max-response-len", "120", "--num-critic-only-steps", "0", "--eval-interval", "0",
    "--no-save-hf", "--no-save-checkpoints", "--custom-rm-path", "tests.helpers.reward_functions.lower_case",
)  # fmt: skip
START_LINE = re.compile(r"=== start (\d+): .*--port (\d+)")


@pytest.fixture(scope="module")
def undisturbed(
    local_runs: Runs, sglang_server: LocalServer, tiny_folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, float]]:
    """The metrics of LONG without Ray and without a fault, on a server that is not the run's own, weights by files."""
    save = tmp_path_factory.mktemp("undisturbed")
    key_file = save / "key"
    key_file.write_text(KEY, encoding="utf-8")
    external = ("--sglang-server-urls", sglang_server.start().url, "--sglang-api-key-file", str(key_file))
    runs = replace(local_runs, model=tiny_folders[0])
    code, output = runs.finish(save, *SGLANG, *LONG, *external, "--launcher", "local", "--weight-sync", "disk")
    assert code == 0, output
    assert not list((save / "weight_sync").glob("version_*")), "the folders of the weights are removed at the end"
    assert sglang_server.problem() is None
    return metrics_of(save)


def test_server_that_is_killed_in_mid_generation_costs_no_sample_and_changes_no_number(
    undisturbed: list[dict[str, float]], joined_runs: Runs, tiny_folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """The process group dies: the run goes on, with the samples and the numbers of an undisturbed one, and leaves no server behind.

    Weights by broadcast, supports of top-p 0.9: in both runs log-probs agree on the support and over the whole vocabulary.
    """
    driver = replace(joined_runs, model=tiny_folders[0]).start(tmp_path, *SGLANG, *LONG, "--weight-sync", "distributed")
    log = tmp_path / "logs" / "sglang-server-0.log"
    try:
        first = _server_in_generation(driver, log, incarnation=1)
        os.killpg(first.pid, signal.SIGKILL)
        killed_at, busy = time.monotonic(), load()
        output = wait_for_line(driver, "warning: the rollout engine was lost while it generated")
        assert time.monotonic() - killed_at < NOTICED_S
        _server_in_generation(driver, log, incarnation=2)
        assert time.monotonic() - killed_at < SERVING_AGAIN_S * max(busy, load())
        output += driver.communicate(timeout=300)[0]
    finally:
        driver.kill()
    assert driver.returncode == 0, output
    starts = START_LINE.findall(log.read_text(encoding="utf-8"))
    assert [number for number, _ in starts] == ["1", "2"]
    assert alive([first, *_listening([port for _, port in starts])], wait_s=10) == []
    found = metrics_of(tmp_path)
    assert len(found) == len(undisturbed) == NUM_ROLLOUTS
    for one in (*found, *undisturbed):
        assert one["rollout/num_samples"] == 16
        assert one["rollout/logprob_gap_max"] < GAP
        assert one["rollout/logprob_gap_full_max"] < GAP
        assert one["train/rollout_ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    for ours, expected in zip(found, undisturbed, strict=True):
        assert ours["rollout/raw_reward"] == expected["rollout/raw_reward"]
        for name in ("rollout/entropy", "train/critic-value_loss", "train/grad_norm"):
            assert ours[name] == pytest.approx(expected[name], rel=1e-4), name


def test_argument_that_sglang_does_not_have_ends_the_run_before_any_device(local_runs: Runs, tmp_path: Path) -> None:
    code, output = local_runs.finish(tmp_path / "run", *SGLANG, "--sglang-mem-fraction-statc", "0.5")
    assert code == 2
    assert "did you mean --mem-fraction-static?" in output
    assert not (tmp_path / "run").exists()


def _server_in_generation(driver: "subprocess.Popen[str]", log: Path, *, incarnation: int) -> psutil.Process:
    """The HTTP process of the run's server, once this incarnation has requests under way."""
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        assert driver.poll() is None, driver.communicate()[0]
        starts = START_LINE.findall(log.read_text(encoding="utf-8")) if log.exists() else []
        if len(starts) == incarnation and _num_running(int(starts[-1][1])) > 0:
            [server] = _listening([starts[-1][1]])
            return server
        time.sleep(0.05)
    raise AssertionError(f"server {incarnation} had no request under way within 240 s")


def _listening(ports: Sequence[str]) -> list[psutil.Process]:
    """The HTTP processes of servers at these ports."""
    sockets = [one for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN and one.pid is not None]
    return [psutil.Process(one.pid) for one in sockets if str(one.laddr.port) in ports]


def _num_running(port: int) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/loads", timeout=5) as answer:
            return sum(load["num_running_reqs"] for load in json.loads(answer.read())["loads"])
    except OSError:
        return 0
