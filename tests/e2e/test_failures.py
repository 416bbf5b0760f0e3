"""A run that cannot go on says why in one place, ends with the right code in time, and leaves nothing behind."""

import shutil
import signal
import time
from pathlib import Path

from safetensors.numpy import load_file, save_file

from tests.e2e.conftest import CPUS_OF_CLUSTER, SMALL, Runs, alive, descendants, wait_for_line

ENDS_WITHIN_S = 15.0


def test_ctrl_c_ends_a_local_run_cleanly(local_runs: Runs, tmp_path: Path) -> None:
    driver = local_runs.start(tmp_path / "run", *SMALL, "--num-rollout", "500")
    wait_for_line(driver, "rollout 1/500")
    children = descendants(driver.pid)
    start = time.monotonic()
    driver.send_signal(signal.SIGINT)
    output = driver.communicate(timeout=60)[0]
    assert driver.returncode == 130
    assert "stopped by SIGINT in rollout" in output
    assert "Traceback" not in output
    assert alive(children, max(0.0, start + ENDS_WITHIN_S - time.monotonic())) == []
    assert (tmp_path / "run" / "report.html").is_file()


def test_killed_rank_ends_a_local_run_with_role_rank_and_phase(local_runs: Runs, tmp_path: Path) -> None:
    driver = local_runs.start(tmp_path / "run", *SMALL, "--num-rollout", "500")
    wait_for_line(driver, "rollout 1/500")
    children = descendants(driver.pid)
    victim = [p for p in children if (tmp_path / "run" / "logs" / "critic-0.log") in {Path(f.path) for f in p.open_files()}]
    start = time.monotonic()
    victim[0].kill()
    output = driver.communicate(timeout=60)[0]
    assert driver.returncode == 1
    [error] = [line for line in output.splitlines() if line.startswith("error:")]
    assert "critic rank 0 died during" in error and "rollout" in error
    assert "Traceback" not in output and "raylet" not in output
    assert alive(children, max(0.0, start + ENDS_WITHIN_S - time.monotonic())) == []


def test_nan_weights_of_the_critic_name_role_rank_and_sample(joined_runs: Runs, tmp_path: Path) -> None:
    broken = tmp_path / "nan-critic"
    shutil.copytree(joined_runs.model, broken)
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"][:] = float("nan")
    save_file(weights, broken / "model.safetensors")
    code, output = joined_runs.finish(tmp_path / "run", *SMALL, "--critic-load", str(broken))
    assert code == 1
    [error] = [line for line in output.splitlines() if line.startswith("error:")]
    assert "values of sample 0 is nan" in error and "critic rank 0" in error and "rollout 0, values" in error
    assert "Traceback" not in output
    assert "NumericsError" in (tmp_path / "run" / "logs" / "critic-0.log").read_text()


def test_reward_that_returns_none_names_the_sample(joined_runs: Runs, tmp_path: Path) -> None:
    code, output = joined_runs.finish(
        tmp_path / "run", *SMALL, "--custom-rm-path", "tests.helpers.reward_functions.none_for_the_third"
    )
    assert code == 1
    [error] = [line for line in output.splitlines() if line.startswith("error:")]
    assert "rollout 0, reward" in error and "returned None" in error and "sample 2" in error and "--on-bad-sample" in error


def test_more_ranks_than_the_cluster_has_cpus_is_refused_with_both_numbers(joined_runs: Runs, tmp_path: Path) -> None:
    asked = 2 * CPUS_OF_CLUSTER  # divides the batch of SMALL
    code, output = joined_runs.finish(tmp_path / "run", *SMALL, "--actor-num-gpus-per-node", str(asked))
    assert code == 2
    assert f"asks for {asked} CPUs" in output and f"the cluster has {CPUS_OF_CLUSTER}" in output


def test_weight_push_left_out_is_caught_by_the_log_prob_gap(joined_runs: Runs, tmp_path: Path) -> None:
    # the other tests here run with the same limit, the quickstart's, and pass it
    flags = (*SMALL, "--num-critic-only-steps", "0")
    code, output = joined_runs.finish(tmp_path / "run", *flags, script="tests/e2e/driver_without_second_push.py")
    assert code == 1
    [error] = [line for line in output.splitlines() if line.startswith("error:")]
    assert "rollout 1" in error and "more than --max-logprob-gap 0.0001" in error
