"""A run that cannot go on says why in one place, ends with the right code in time, and leaves nothing behind."""

import signal
import time
from pathlib import Path

import pytest

from tests.e2e.conftest import SMALL, Runs, alive, descendants

ENDS_WITHIN_S = 15.0


def wait_for_line(driver: object, text: str) -> str:
    """Read the driver's output until a line holds `text`."""
    seen = ""
    for line in driver.stdout:  # type: ignore[attr-defined]
        seen += line
        if text in line:
            return seen
    raise AssertionError(f"the run ended before {text!r}:\n{seen}")




@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_a_local_run_cleanly(local_runs: Runs, tmp_path: Path, number: signal.Signals) -> None:
    driver = local_runs.start(tmp_path / "run", *SMALL, "--num-rollout", "500")
    wait_for_line(driver, "rollout 1/500")
    children = descendants(driver.pid)
    start = time.monotonic()
    driver.send_signal(number)
    output = driver.communicate(timeout=60)[0]
    assert driver.returncode == 128 + number
    assert f"stopped by {number.name} in rollout" in output
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
