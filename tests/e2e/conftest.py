"""Whole runs of scripts/train_ppo.py: most join one Ray cluster that lasts for the test run."""

import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
CPUS_OF_CLUSTER = 4
QUICKSTART = "configs/quickstart_cpu.yaml"

# small and quick: 4 rollouts of 16 samples, one of them critic only, two optimizer steps each
SMALL = (
    "--num-rollout", "4", "--rollout-batch-size", "16", "--global-batch-size", "16", "--micro-batch-size", "16",
    "--num-critic-only-steps", "1", "--eval-interval", "0", "--no-save-hf", "--no-save-checkpoints",
)  # fmt: skip


@dataclass(frozen=True)
class Runs:
    """Starts drivers. `environment` decides between the shared cluster and one of their own; `cluster` is the --state of
    launch_ray.sh for the shared one."""

    model: Path
    environment: Mapping[str, str] = field(repr=False)
    cluster: Path | None = None

    def start(
        self, save: Path, *flags: str, script: str = "scripts/train_ppo.py", config: str = QUICKSTART
    ) -> subprocess.Popen[str]:
        command = [
            sys.executable, script, "--config", config,
            # relative: the workers of a joined cluster stand in another directory
            "--hf-checkpoint", os.path.relpath(self.model, ROOT), "--save", os.path.relpath(save, ROOT), *flags,
        ]  # fmt: skip
        return subprocess.Popen(
            command, cwd=ROOT, env=dict(self.environment), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def finish(
        self,
        save: Path,
        *flags: str,
        script: str = "scripts/train_ppo.py",
        config: str = QUICKSTART,
        timeout_s: float = 300,
    ) -> tuple[int, str]:
        """(exit code, output) of a whole run."""
        driver = self.start(save, *flags, script=script, config=config)
        output, _ = driver.communicate(timeout=timeout_s)
        return driver.returncode, output

    def submit(self, *flags: str, timeout_s: float = 300) -> tuple[int, str]:
        """(exit code, output) of a job on the shared cluster; paths in `flags` are absolute."""
        command = [str(ROOT / "scripts/launch_ray.sh"), "submit", "--state", str(self.cluster), "--", *flags]
        done = subprocess.run(
            command, env=dict(self.environment), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout_s,
            check=False,
        )  # fmt: skip
        return done.returncode, done.stdout

    def torchrun(self, save: Path, num_ranks: int, *flags: str, script: str = "scripts/train_ppo.py") -> subprocess.Popen[str]:
        """A driver and its ranks without Ray, in processes that torchrun starts."""
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks), script,
            "--config", QUICKSTART, "--hf-checkpoint", str(self.model), "--save", str(save), *flags,
        ]  # fmt: skip
        return subprocess.Popen(
            command, cwd=ROOT, env=dict(self.environment), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )


def wait_for_line(driver: subprocess.Popen[str], text: str) -> str:
    """Read the driver's output until a line holds `text`."""
    assert driver.stdout is not None
    seen = ""
    for line in driver.stdout:
        seen += line
        if text in line:
            return seen
    raise AssertionError(f"the run ended before {text!r}:\n{seen}")


def metrics_of(save: Path) -> list[dict[str, float]]:
    """One mapping per rollout: metrics, without times and rates."""
    lines = (save / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{k: v for k, v in json.loads(line).items() if "/" in k and not k.startswith("perf/")} for line in lines]


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def alive(processes: list[psutil.Process], wait_s: float) -> list[psutil.Process]:
    """Those that are still running after at most `wait_s`."""
    return psutil.wait_procs(processes, timeout=wait_s)[1]


@pytest.fixture(scope="session")
def glass_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "glass-en"
    subprocess.run([sys.executable, "tools/convert_glass_to_hf.py", str(folder)], cwd=ROOT, check=True)
    return folder


@pytest.fixture(scope="session")
def local_runs(glass_model: Path) -> Runs:
    """Drivers that start a Ray cluster of their own."""
    return Runs(glass_model, {k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | {"PYTHONPATH": str(ROOT)})


@pytest.fixture(scope="session")
def alone(local_runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The run folder of SMALL on one rank without Ray, with its rollouts in <folder>/dumps and its weights, and the output."""
    save = tmp_path_factory.mktemp("alone")
    flags = ("--launcher", "local", "--save-hf", "--save-debug-rollout-data", str(save / "dumps"))
    code, output = local_runs.finish(save, *SMALL, *flags)
    assert code == 0, output
    return save, output


@pytest.fixture(scope="session")
def joined_runs(local_runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """Drivers that join one cluster of CPUS_OF_CLUSTER CPUs, which scripts/launch_ray.sh starts and ends."""
    environment = dict(local_runs.environment) | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
    }
    state = tmp_path_factory.mktemp("ray")

    def launch(verb: str) -> list[str]:
        return [str(ROOT / "scripts/launch_ray.sh"), verb, "--state", str(state)]

    port, dashboard, agent = _free_ports(3)
    further = (
        f"--dashboard-agent-listen-port={agent}", f"--num-cpus={CPUS_OF_CLUSTER}", f"--object-store-memory={200 * 2**20}",
    )  # fmt: skip
    started = subprocess.run(
        [*launch("head"), "--port", str(port), "--dashboard-port", str(dashboard), "--", *further],
        cwd="/", env=environment, text=True, capture_output=True, check=False,
    )  # fmt: skip
    assert started.returncode == 0, started.stdout + started.stderr
    # ends the cluster when its standard input closes, also should this process be killed
    guard = subprocess.Popen(
        ["sh", "-c", 'cat >/dev/null; exec "$@"', "sh", *launch("stop")], env=environment, text=True, stdin=subprocess.PIPE
    )
    assert guard.stdin is not None
    yield Runs(local_runs.model, environment | {"RAY_ADDRESS": f"127.0.0.1:{port}"}, state)
    guard.stdin.close()
    assert guard.wait(timeout=60) == 0


def _free_ports(number: int) -> list[int]:
    """Ports of loopback that nobody listens on now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    try:
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


@pytest.fixture(scope="session")
def one_rank(joined_runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of SMALL on one rank under Ray, which others are compared with."""
    save = tmp_path_factory.mktemp("one-rank")
    code, output = joined_runs.finish(save, *SMALL)
    assert code == 0, output
    return save
