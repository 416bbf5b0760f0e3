"""A run that is killed or asked to end goes on as if nothing had been: the same numbers to the bit, on other sizes to rounding."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.e2e.conftest import ROOT, SMALL, Runs, alive, descendants, metrics_of, wait_for_line
from tests.e2e.test_without_ray import TP2, assert_same_run

ENDS_WITHIN_S = 15.0
SAVED = (*SMALL, "--save-checkpoints", "--save-interval", "2")


def test_killed_run_goes_on_bit_for_bit(local_runs: Runs) -> None:
    """Some moments of tools/kill_matrix.py, which has all of them; each run is killed, resumed and compared there."""
    moments = (
        "in the actor's file",
        "between actor and critic",
        "before run_state.json is replaced",
        "async: while the files are written",
        "while a resume loads the critic",
    )
    command = [sys.executable, "tools/kill_matrix.py", "--model", str(local_runs.model), "--random", "1", "--moments", *moments]
    done = subprocess.run(
        command, cwd=ROOT, env=dict(local_runs.environment) | {"OMP_NUM_THREADS": "1"}, text=True, capture_output=True, check=False
    )
    rows = [line for line in done.stdout.splitlines() if line.endswith("| equal |")]
    assert done.returncode == 0 and len(rows) == len(moments) + 1, done.stdout + done.stderr[-3000:]
    assert [row.split(" | ")[2] for row in rows[:-1]] == ["2 rollouts"] * len(moments)


def test_run_ended_by_sigterm_goes_on_under_ray_and_on_other_sizes(
    local_runs: Runs, joined_runs: Runs, one_rank: Path, tmp_path: Path
) -> None:
    save = tmp_path / "run"
    driver = local_runs.start(save, *SAVED)
    before = wait_for_line(driver, "rollout 1/4")
    children = descendants(driver.pid)
    start = time.monotonic()
    driver.send_signal(signal.SIGTERM)
    output = before + driver.communicate(timeout=60)[0]
    assert driver.returncode == 3, output
    saved = re.search(r"stopped by SIGTERM in rollout .*; saved after ([23]) rollouts: go on with --load (\S+) --save \2", output)
    assert saved and "Traceback" not in output, output
    assert alive(children, max(0.0, start + ENDS_WITHIN_S - time.monotonic())) == []

    elsewhere = local_runs.torchrun(tmp_path / "tp2", 2, *SAVED, *TP2, "--load", str(save))
    output = elsewhere.communicate(timeout=300)[0]
    assert elsewhere.returncode == 0, output
    assert f"resumed from {save} after {saved.group(1)} of 4 rollouts" in output
    assert "new random states for the ranks of the actor and critic, whose layout or kind of device is another" in output
    assert_same_run(tmp_path / "tp2", one_rank)

    code, output = joined_runs.finish(save, *SAVED, "--load", str(save))
    assert code == 0, output
    assert metrics_of(save) == metrics_of(one_rank)
    code, output = joined_runs.finish(save, *SAVED, "--load", str(save))
    assert code == 2 and "has done 4 of --num-rollout 4" in output
