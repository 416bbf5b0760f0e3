"""scripts/launch_ray.sh with a `ray` that starts plain processes: whose processes it ends, and what it hands on."""

import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[3]

# notes its arguments and environment; `start` leaves two processes behind
FAKE_RAY = """#!/usr/bin/env bash
printf '%s\\n' "$*" >>"$FAKE/calls"
case "$1 ${2:-}" in
  "start --disable-usage-stats")
    (exec -a gcs_server sleep 300) & gcs=$!
    echo $gcs >>"$FAKE/pids"
    # a process that needs the first one to the end
    gcs=$gcs bash -c 'trap "kill -0 $gcs && touch $FAKE/in_order; exit" TERM; while kill -0 $gcs; do sleep 0.1; done' 2>/dev/null &
    # fails as often as the file has lines
    if [[ -s "$FAKE/failures" ]]; then sed -i 1d "$FAKE/failures"; echo "the port is taken"; exit 1; fi
    ;;
  "get-auth-token --generate") mkdir -p "$HOME/.ray"; echo secret | tee "$HOME/.ray/auth_token" ;;
esac
"""
FAKE_PYTHON = """#!/usr/bin/env bash
cat >/dev/null
printf 'python %s\\n' "$*" >>"$FAKE/calls"
echo 7
"""


@dataclass(frozen=True)
class Launch:
    """Runs the script in a home of its own."""

    folder: Path

    def __call__(self, *words: str, script: str = "launch_ray.sh") -> subprocess.CompletedProcess[str]:
        known = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        own = {"PATH": f"{self.folder}/bin:{os.environ['PATH']}", "HOME": str(self.folder / "home"), "FAKE": str(self.folder)}
        return subprocess.run(
            [str(ROOT / "scripts" / script), *words], env=known | own, capture_output=True, text=True, timeout=60, check=False
        )

    @property
    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()

    @property
    def started(self) -> list[int]:
        """Pids of what the fake `ray start` has left behind, in order."""
        return [int(pid) for pid in (self.folder / "pids").read_text().split()]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    for name, text in (("ray", FAKE_RAY), ("python", FAKE_PYTHON)):
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    one = Launch(tmp_path)
    yield one
    for pid in one.started if (tmp_path / "pids").exists() else ():
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGKILL)


def _alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_stop_ends_the_processes_of_its_own_state_and_no_others(launch: Launch, tmp_path: Path) -> None:
    for name in ("a", "b"):
        done = launch("head", "--port", "1234", "--state", str(tmp_path / name))
        assert done.returncode == 0, done.stderr
    ours, others = launch.started
    assert launch("stop", "--state", str(tmp_path / "a")).returncode == 0
    assert (_alive(ours), _alive(others)) == (False, True)
    assert (tmp_path / "in_order").exists()
    again = launch("stop", "--state", str(tmp_path / "a"))
    assert again.returncode == 0 and "nothing to stop" in again.stdout and _alive(others)
    assert launch("stop", "--state", str(tmp_path / "b")).returncode == 0
    assert not _alive(others)


def test_head_listens_on_loopback_makes_a_token_once_and_hands_arguments_on(launch: Launch, tmp_path: Path) -> None:
    state = ("--state", str(tmp_path / "a"))
    done = launch("head", "--host", "10.0.0.1", *state, "--", "--num-gpus=2")
    assert done.returncode == 0 and "10.0.0.1:6379" in done.stdout
    assert "every machine of the cluster needs a copy" in done.stdout and "secret" not in done.stdout
    assert launch.calls == [
        "get-auth-token --generate",
        "start --disable-usage-stats --head --node-ip-address=10.0.0.1 --port=6379 --dashboard-host=127.0.0.1 "
        "--dashboard-port=8265 --num-gpus=2",
    ]
    second = launch("head", *state)
    assert second.returncode == 2 and "still runs here" in second.stderr and len(launch.started) == 1
    assert launch("stop", *state).returncode == 0
    assert launch("head", *state).returncode == 0
    assert launch.calls[-1].startswith("start --disable-usage-stats --head --node-ip-address=127.0.0.1 ")
    assert launch.calls.count("get-auth-token --generate") == 1


def test_head_that_fails_twice_shows_why_and_leaves_nothing_behind(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "failures").write_text("1\n2\n")
    done = launch("head", "--state", str(tmp_path / "a"))
    assert done.returncode == 2 and "the port is taken" in done.stderr and "start.log" in done.stderr
    assert [_alive(pid) for pid in launch.started] == [False, False]
    assert not (tmp_path / "a" / "cluster").exists()


def test_head_that_fails_once_is_started_anew(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "failures").write_text("1\n")
    done = launch("head", "--state", str(tmp_path / "a"))
    assert done.returncode == 0 and "once more" in done.stderr
    assert [_alive(pid) for pid in launch.started] == [False, True]


def test_join_needs_an_address_and_the_token_of_the_head(launch: Launch, tmp_path: Path) -> None:
    state = ("--state", str(tmp_path / "a"))
    assert "IP:PORT" in launch("join").stderr
    refused = launch("join", "10.0.0.1:6379", *state)
    assert refused.returncode == 2 and "Copy that file" in refused.stderr and not (tmp_path / "calls").exists()
    (tmp_path / "home/.ray").mkdir(parents=True)
    (tmp_path / "home/.ray/auth_token").write_text("secret")
    assert launch("join", "10.0.0.1:6379", *state).returncode == 0
    assert launch.calls == ["start --disable-usage-stats --address=10.0.0.1:6379"]


def test_submit_uploads_the_repository_and_ends_with_the_exit_code_of_the_job(launch: Launch, tmp_path: Path) -> None:
    state = ("--state", str(tmp_path / "a"))
    assert "no cluster was started here" in launch("submit", *state, "--", "--seed", "1").stderr
    assert launch("head", "--dashboard-port", "9000", *state).returncode == 0
    assert launch("submit", *state, "--", "--config", "a b.yaml").returncode == 7
    submitted, asked = launch.calls[-2:]
    head, _, tail = submitted.partition(" --submission-id ")
    name, _, tail = tail.partition(" ")
    assert head == "job submit --address http://127.0.0.1:9000"
    assert tail == f"--working-dir {ROOT} -- python scripts/train_ppo.py --config a b.yaml --ray-address 127.0.0.1:6379"
    assert asked == f"python - http://127.0.0.1:9000 {name}"
    assert "behind --" in launch("submit", *state).stderr
    assert launch("submit", "--address", "http://10.0.0.1:1", *state, "--", "--seed", "1").returncode == 7
    assert launch.calls[-2].startswith("job submit --address http://10.0.0.1:1 ") and "--ray-address" not in launch.calls[-2]
    assert launch("submit", *state, "--", "--ray-address", "10.0.0.2:1").returncode == 7
    assert launch.calls[-2].endswith("train_ppo.py --ray-address 10.0.0.2:1")


@pytest.mark.parametrize("words", [(), ("start",), ("head", "--ports", "1"), ("head", "--port"), ("stop", "now")])
def test_unknown_words_are_refused_before_anything_starts(launch: Launch, tmp_path: Path, words: tuple[str, ...]) -> None:
    done = launch(*words)
    assert done.returncode == 2 and done.stderr.startswith("error: ")
    assert not (tmp_path / "calls").exists()


def test_help_shows_an_example(launch: Launch) -> None:
    done = launch("--help")
    assert done.returncode == 0 and "submit -- --config configs/" in done.stdout
    assert launch("head", "--help").stdout == done.stdout
