"""Whole runs with SGLang's servers: they learn, no fault of a server costs a sample, and neither launcher nor sync path matters."""

import json
import os
import re
import signal
import subprocess
import time
import urllib.request
from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import Runs, alive, metrics_of

SGLANG = ("--rollout-engine", "sglang", "--rollout-top-p", "0.9")
GAP = 5e-5
# 32 samples of 90 tokens are under way for some seconds, so that a fault can meet them
LONG = (
    "--sglang-deterministic", "--num-rollout", "3", "--rollout-batch-size", "32", "--global-batch-size", "32",
    "--micro-batch-size", "32", "--rollout-max-response-len", "90", "--num-critic-only-steps", "0", "--eval-interval", "0",
    "--no-save-hf", "--no-save-checkpoints", "--num-epochs-per-rollout", "1",
)  # fmt: skip
START_LINE = re.compile(r"=== start (\d+): .*--port (\d+)")


def test_sglang_learns_and_agrees_with_the_trainer_in_every_rollout(joined_runs: Runs, tmp_path: Path) -> None:
    """Weights by broadcast, supports of top-p 0.9: log-probs agree on the support and over the whole vocabulary."""
    code, output = joined_runs.finish(
        tmp_path / "run", *SGLANG, "--weight-sync", "distributed", "--eval-interval", "0", "--no-save-hf", timeout_s=600
    )
    assert code == 0, output
    rollouts = metrics_of(tmp_path / "run")
    assert len(rollouts) == 25
    assert sum(one["rollout/raw_reward"] for one in rollouts[-5:]) / 5 >= 0.75
    for one in rollouts:
        assert one["rollout/logprob_gap_max"] < GAP
        assert one["rollout/logprob_gap_full_max"] < GAP
        assert one["train/rollout_ratio_mean"] == pytest.approx(1.0, abs=1e-5)
        assert one["rollout/num_samples"] == 128


@pytest.fixture(scope="module")
def undisturbed(local_runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """The metrics of LONG without Ray and without a fault, weights by files."""
    save = tmp_path_factory.mktemp("undisturbed")
    code, output = local_runs.finish(save, *SGLANG, *LONG, "--launcher", "local", "--weight-sync", "disk")
    assert code == 0, output
    assert not list((save / "weight_sync").glob("version_*")), "the folders of the weights are removed at the end"
    return metrics_of(save)


def test_servers_that_are_killed_cost_no_sample_and_change_no_number(
    undisturbed: list[dict[str, float]], joined_runs: Runs, tmp_path: Path
) -> None:
    """The group dies in mid-generation, later the detokenizer alone: the run goes on, with the samples of an undisturbed one, and
    leaves no server behind."""
    driver = joined_runs.start(tmp_path, *SGLANG, *LONG)
    log = tmp_path / "logs" / "sglang-server-0.log"
    try:
        first = _server_in_generation(driver, log, incarnation=1)
        os.killpg(first.pid, signal.SIGKILL)
        second = _server_in_generation(driver, log, incarnation=2)
        next(one for one in second.children(recursive=True) if "detokenizer" in " ".join(one.cmdline())).kill()
        output, _ = driver.communicate(timeout=300)
    finally:
        driver.kill()
    assert driver.returncode == 0, output
    assert output.count("warning: the rollout engine was lost while it generated") >= 1
    assert "=== start 3:" in log.read_text(encoding="utf-8")
    found = metrics_of(tmp_path)
    assert len(found) == len(undisturbed) == 3
    for ours, expected in zip(found, undisturbed, strict=True):
        assert ours["rollout/num_samples"] == 32
        assert ours["rollout/raw_reward"] == expected["rollout/raw_reward"]
        for name in ("rollout/entropy", "train/critic-value_loss", "train/grad_norm"):
            assert ours[name] == pytest.approx(expected[name], rel=1e-4), name
    assert alive([first, second], wait_s=10) == []


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
            port = starts[-1][1]
            return next(one for one in psutil.process_iter(["cmdline"]) if _serves(one.info["cmdline"] or [], port))
        time.sleep(0.05)
    raise AssertionError(f"server {incarnation} had no request under way within 240 s")


def _serves(command: list[str], port: str) -> bool:
    return "slime_ppo.rollout.sglang.serve" in command and port in command


def _num_running(port: int) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/loads", timeout=5) as answer:
            return sum(load["num_running_reqs"] for load in json.loads(answer.read())["loads"])
    except OSError:
        return 0
