"""What SGLang costs against the embedded engine: seconds per phase of a rollout, tokens per second, a timeline of one iteration.

    python tools/bench_rollout.py
    python tools/bench_rollout.py --rollouts 12 --weight-sync tensor distributed disk
    python tools/bench_rollout.py --model FOLDER --flags "--rollout-batch-size 64"

The engines run the quickstart's job in turn, on the same machine in the same minutes, so ratios mean something on a noisy one. The
first rollouts (start-up effects, critic only) are left out. The figures are those of metrics.jsonl; the timeline is the log of the
driver, from the first change of hands of the last rollout on.
"""

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

WARM_UP = 4  # the first rollout that updates the policy is the fourth
PHASES = (
    "rollout_time", "reward_time", "log_probs_time", "values_time", "critic_train_time", "actor_train_time",
    "update_weights_time", "wake_time", "offload_time", "other_time", "step_time",
)  # fmt: skip


@dataclass(frozen=True)
class Timing:
    """Medians over the rollouts after the warm-up; `events` are (seconds since the first, what) of the last rollout."""

    seconds: dict[str, float]
    tokens_per_s: float
    gap: float
    events: list[tuple[float, str]]


def run_engine(flags: Sequence[str], *, model: str, rollouts: int) -> Timing:
    """One run of the product with an engine's flags."""
    with tempfile.TemporaryDirectory() as save:
        command = [
            sys.executable, "scripts/train_ppo.py", "--config", "configs/quickstart_cpu.yaml", "--hf-checkpoint", model,
            "--save", save, "--num-rollout", str(rollouts), "--eval-interval", "0", "--no-save-hf", "--no-save-checkpoints", *flags,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{shlex.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        lines = (Path(save) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        events = _timeline((Path(save) / "logs" / "driver.log").read_text(encoding="utf-8"))
    found = [row for row in map(json.loads, lines) if "perf/step_time" in row][WARM_UP:]
    generated = [row["rollout/num_samples"] * row["rollout/response_len/mean"] / row["perf/rollout_time"] for row in found]
    return Timing(
        seconds={phase: statistics.median(row[f"perf/{phase}"] for row in found) for phase in PHASES},
        tokens_per_s=statistics.median(generated),
        gap=max(row["rollout/logprob_gap_max"] for row in found),
        events=events,
    )


def _timeline(log: str) -> list[tuple[float, str]]:
    """Changes of hands since the last time that the engine woke before a rollout."""
    changes = [(line[:23], line.split(" ", 3)[3]) for line in log.splitlines() if "orchestration.turns" in line]
    starts = [index for index, (_, what) in enumerate(changes) if what.startswith("wake rollout")]
    chosen = changes[max(0, starts[-1] - 2) :] if starts else []
    stamps = [datetime.strptime(stamp, "%Y-%m-%d %H:%M:%S,%f").timestamp() for stamp, _ in chosen]
    return [(stamp - stamps[0], what) for stamp, (_, what) in zip(stamps, chosen, strict=True)]


def table(timings: dict[str, Timing]) -> str:
    """Markdown: a row per phase, a column per engine, and the ratio to the first."""
    names = list(timings)
    first = timings[names[0]]
    lines = ["| seconds per rollout | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    lines += [
        f"| {phase.removesuffix('_time')} | " + " | ".join(f"{timings[name].seconds[phase]:.3f}" for name in names) + " |"
        for phase in PHASES
    ]
    ratios = [timings[name].seconds["step_time"] / first.seconds["step_time"] for name in names]
    lines.append(f"| whole rollout, x {names[0]} | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |")
    lines.append("| response tokens per second | " + " | ".join(f"{timings[name].tokens_per_s:.0f}" for name in names) + " |")
    lines.append("| largest log-prob gap | " + " | ".join(f"{timings[name].gap:.1e}" for name in names) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=10, help=f"rollouts of each run, the first {WARM_UP} are left out")
    parser.add_argument("--weight-sync", nargs="+", default=["distributed"], help="paths of the weights to SGLang")
    parser.add_argument("--model", default="runs/models/glass-en", help="folder of the model")
    parser.add_argument("--flags", default="--rollout-top-p 0.9", help="further flags of all runs")
    options = parser.parse_args()
    if options.rollouts <= WARM_UP:
        parser.error(f"--rollouts {options.rollouts}: expected more than the {WARM_UP} that are left out")
    shared = shlex.split(options.flags)
    runs = {"embedded": shared} | {
        f"SGLang, {path}": [*shared, "--rollout-engine", "sglang", "--weight-sync", path] for path in options.weight_sync
    }
    timings = {name: run_engine(flags, model=options.model, rollouts=options.rollouts) for name, flags in runs.items()}
    print(table(timings))
    name, timing = list(timings.items())[-1]
    print(f"\nOne iteration with {name}, seconds since its first change of hands:")
    for seconds, what in timing.events:
        print(f"{seconds:8.3f}  {what}")


if __name__ == "__main__":
    main()
