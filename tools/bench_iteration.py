"""What a PPO iteration costs: CPU seconds over all processes, against a single-process loop on the same recipe.

    python tools/bench_iteration.py                          one rank, DP2 and TP2, two rounds
    python tools/bench_iteration.py --rounds 1 --layouts one --rollouts 8
    python tools/bench_iteration.py --baseline "python my_loop.py"

Both sides run in turn on the same machine in the same minutes, so ratios mean something on a noisy one. A rollout's cost is
the CPU time that driver, Ray daemons, ranks, engine and reward workers used between two rollout lines of the console; the
first rollouts (start-up effects, critic only) are left out on both sides.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

LAYOUTS = {
    "one": (),
    "dp2": ("--actor-num-gpus-per-node", "2", "--critic-num-gpus-per-node", "1"),
    "tp2": (
        "--actor-num-gpus-per-node", "2", "--tensor-model-parallel-size", "2",
        "--critic-num-gpus-per-node", "1", "--critic-tensor-model-parallel-size", "1",
    ),
}  # fmt: skip
WARM_UP = 4  # the first rollout that updates the policy is the fourth
PROMPTS = "configs/data/openers_train.jsonl"


@dataclass(frozen=True)
class Cost:
    """CPU seconds per rollout in all, and by kind of process; wall seconds per phase."""

    cpu_s: float
    by_process: dict[str, float]
    by_phase: dict[str, float]


def cpu_times(pid: int) -> dict[str, float]:
    """CPU seconds so far of a process and its descendants, by kind."""
    root = psutil.Process(pid)
    found: dict[str, float] = {}
    for process in [root, *root.children(recursive=True)]:
        try:
            times, words = process.cpu_times(), process.cmdline()
        except psutil.Error:
            continue
        kind = _kind(process.pid == pid, " ".join(words))
        found[kind] = found.get(kind, 0.0) + times.user + times.system
    return found


def _kind(is_driver: bool, command: str) -> str:
    if is_driver:
        return "driver"
    for mark, kind in (("RankProcess", "ranks"), ("EngineProcess", "engine"), ("multiprocessing", "reward worker")):
        if mark in command:
            return kind
    return "Ray daemons"


def run_layout(layout: str, model: str, rollouts: int) -> Cost:
    """One run of the product; its console lines mark the rollouts."""
    with tempfile.TemporaryDirectory() as save:
        command = [
            sys.executable, "scripts/train_ppo.py", "--config", "configs/quickstart_cpu.yaml", "--hf-checkpoint", model,
            "--save", save, "--num-rollout", str(rollouts), "--eval-interval", "0", "--no-save-hf",
            "--no-save-checkpoints", *LAYOUTS[layout],
        ]  # fmt: skip
        driver = subprocess.Popen(command, text=True, stdout=subprocess.PIPE)
        assert driver.stdout is not None
        marks = [cpu_times(driver.pid) for line in driver.stdout if line.startswith("rollout ")]
        if driver.wait() or len(marks) != rollouts:
            raise SystemExit(f"the run of layout {layout} failed with exit code {driver.returncode}")
        lines = [json.loads(line) for line in (Path(save) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    first, last, count = marks[WARM_UP - 1], marks[-1], rollouts - WARM_UP
    by_process = {kind: (last[kind] - first.get(kind, 0.0)) / count for kind in last}
    phases = [name for name in lines[-1] if name.startswith("perf/") and name.endswith("_time")]
    by_phase = {
        name.removeprefix("perf/").removesuffix("_time"): statistics.mean(x[name] for x in lines[WARM_UP:]) for name in phases
    }
    return Cost(sum(by_process.values()), by_process, by_phase)


def run_baseline(command: Sequence[str], rollouts: int) -> float:
    """CPU seconds per rollout of the single-process loop: a line of JSON with cpu_s per iteration."""
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, check=True)
    costs = [json.loads(line)["cpu_s"] for line in done.stdout.splitlines() if line.startswith("{")]
    if len(costs) != rollouts:
        raise SystemExit(f"the baseline printed {len(costs)} iterations, expected {rollouts}")
    return statistics.mean(costs[WARM_UP:])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="runs/models/glass-en", help="folder made by tools/convert_glass_to_hf.py")
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--rollouts", type=int, default=12, help=f"per run; the first {WARM_UP} are left out")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--baseline", help="command of another single-process loop, which prints a JSON line with cpu_s per iteration"
    )
    options = parser.parse_args()
    if options.rollouts <= WARM_UP:
        parser.error(f"--rollouts must be more than the {WARM_UP} warm-up rollouts")
    os.environ["OMP_NUM_THREADS"] = "1"
    own = [
        sys.executable,
        "tools/single_process_ppo.py",
        options.model,
        "--prompts",
        PROMPTS,
        "--iterations",
        str(options.rollouts),
    ]
    baseline = shlex.split(options.baseline) if options.baseline else own
    costs: dict[str, list[Cost]] = {layout: [] for layout in options.layouts}
    ratios: dict[str, list[float]] = {layout: [] for layout in options.layouts}
    for number in range(options.rounds):
        for layout in options.layouts:
            base, cost = run_baseline(baseline, options.rollouts), run_layout(layout, options.model, options.rollouts)
            costs[layout].append(cost)
            ratios[layout].append(cost.cpu_s / base)
            print(
                f"round {number}  {layout}: {cost.cpu_s:.2f} CPU s a rollout, single process just before {base:.2f}: "
                f"{cost.cpu_s / base:.2f}x",
                flush=True,
            )
    for layout, found in costs.items():
        best = min(found, key=lambda cost: cost.cpu_s)
        spread = f"{min(ratios[layout]):.2f} to {max(ratios[layout]):.2f}"
        print(f"\n{layout}: {statistics.mean(ratios[layout]):.2f}x the single process ({spread})")
        print("  CPU s by process  " + "  ".join(f"{kind} {seconds:.3f}" for kind, seconds in sorted(best.by_process.items())))
        print("  wall s by phase   " + "  ".join(f"{phase} {seconds:.3f}" for phase, seconds in best.by_phase.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
