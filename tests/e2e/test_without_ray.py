"""The same run without Ray: on one rank alone, on torchrun's ranks, and how it ends when something is wrong."""

import re
import signal
import time
from pathlib import Path

import pytest

from tests.e2e.conftest import SMALL, Runs, alive, descendants, metrics_of, wait_for_line

ENDS_WITHIN_S = 15.0
TWO_RANKS = ("--actor-num-gpus-per-node", "2")
TP2 = (*TWO_RANKS, "--tensor-model-parallel-size", "2")
PP2 = (*TWO_RANKS, "--pipeline-model-parallel-size", "2")


def assert_same_run(ours: Path, theirs: Path) -> None:
    """The same rewards in all rollouts, and every metric to 1e-5; beside 0 to float32's grain, per token."""
    for found, expected in zip(metrics_of(ours), metrics_of(theirs), strict=True):
        assert found.keys() == expected.keys()
        assert found["rollout/raw_reward"] == expected["rollout/raw_reward"]
        for name, value in expected.items():
            num_tokens = 16 if name == "rollout/kl_trajectory" else 1  # a sum over a response of small differences
            assert found[name] == pytest.approx(value, rel=1e-5, abs=2e-6 * num_tokens), name


def test_one_rank_alone_gives_the_numbers_of_ray(alone: tuple[Path, str], one_rank: Path) -> None:
    save, output = alone
    assert "launcher: local, 1 rank, no Ray" in output
    assert not re.search(r"Traceback|Warning|bundle", output)
    assert_same_run(save, one_rank)


# test_resume.py has TP2
@pytest.mark.parametrize("layout", [pytest.param(TWO_RANKS, id="DP2"), pytest.param(PP2, id="PP2")])
def test_two_ranks_of_torchrun_give_the_numbers_of_ray(
    local_runs: Runs, one_rank: Path, tmp_path: Path, layout: tuple[str, ...]
) -> None:
    driver = local_runs.torchrun(tmp_path / "run", 2, *SMALL, *layout, "--save-hf")
    output = driver.communicate(timeout=300)[0]
    assert driver.returncode == 0, output
    assert output.count("launcher: local, 2 ranks by torchrun, no Ray") == 1
    assert output.count("rollout 3/4") == 1, "only rank 0 prints"
    assert_same_run(tmp_path / "run", one_rank)
    assert all((tmp_path / "run" / folder / "config.json").is_file() for folder in ("hf", "critic/hf"))


def test_rank_that_raises_ends_all_ranks_with_its_message(local_runs: Runs, tmp_path: Path) -> None:
    driver = local_runs.torchrun(tmp_path / "run", 2, *SMALL, *TWO_RANKS, script="tests/e2e/driver_with_failing_rank.py")
    wait_for_line(driver, "4 rollouts into")
    children = descendants(driver.pid)
    output = driver.communicate(timeout=120)[0]
    assert driver.returncode == 1
    [error] = [line for line in output.splitlines() if line.startswith("error:")]
    assert "rollout 0, critic train: ValueError: planted on rank 1 [rank 1, critic training]" in error
    assert "ValueError: planted on rank 1" in (tmp_path / "run" / "logs" / "rank-1.log").read_text()
    assert alive(children, ENDS_WITHIN_S) == []


def test_signal_to_torchrun_has_the_run_saved_and_ends_all_ranks(local_runs: Runs, tmp_path: Path) -> None:
    driver = local_runs.torchrun(tmp_path / "run", 2, *SMALL, *TWO_RANKS, "--num-rollout", "500", "--save-checkpoints")
    wait_for_line(driver, "rollout 1/500")
    children = descendants(driver.pid)
    start = time.monotonic()
    driver.send_signal(signal.SIGTERM)
    output = driver.communicate(timeout=60)[0]
    assert re.search(r"stopped by SIGTERM in rollout \d+.*; saved after \d+ rollouts: go on with --load", output)
    assert (tmp_path / "run" / "run_state.json").is_file()
    assert alive(children, max(0.0, start + ENDS_WITHIN_S - time.monotonic())) == []
    assert (tmp_path / "run" / "report.html").is_file()


def test_other_number_of_ranks_than_asked_for_is_refused_with_both_numbers(local_runs: Runs, tmp_path: Path) -> None:
    code, output = local_runs.finish(tmp_path / "run", *SMALL, *TWO_RANKS, "--launcher", "local")
    assert code == 2
    assert "asks for 2 ranks" in output and "there is 1" in output
    driver = local_runs.torchrun(tmp_path / "run", 2, *SMALL)
    output = driver.communicate(timeout=120)[0]
    assert "asks for 1 ranks" in output and "torchrun has started 2" in output
    assert re.search(r"exitcode *: 2", output)
    assert not (tmp_path / "run").exists()
