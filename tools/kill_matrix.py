"""Kills a training run at chosen and at random moments, resumes it, and compares it with the run that was left alone, bit for bit.

    python tools/kill_matrix.py
    python tools/kill_matrix.py --moments "in the actor's file" "before run_state.json is replaced" --random 0
    python tools/kill_matrix.py --keep runs/kill_matrix

Every run is scripts/train_ppo.py without Ray, in a process that is forked from one that has imported everything, so that twenty
moments take a few minutes. SIGKILL comes from inside, where a function that the moment names is called, or after a random time. The
run is then started again with --load and --save in its folder, once, and must end with the same weights and optimizer states
(the files of the last checkpoint), the same metrics and samples, and the same state of the loop. Exit code 1 when one does not.
"""

import argparse
import importlib
import json
import os
import random
import re
import runpy
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

NUM_ROLLOUT, INTERVAL = 6, 2
FLAGS = (
    "--config", "configs/quickstart_cpu.yaml", "--launcher", "local", "--num-rollout", str(NUM_ROLLOUT),
    "--rollout-batch-size", "8", "--global-batch-size", "8", "--micro-batch-size", "8", "--rollout-max-response-len", "8",
    "--num-critic-only-steps", "1", "--eval-interval", "3", "--save-interval", str(INTERVAL), "--keep-checkpoints", "1",
    "--no-overwrite", "--kl-controller", "adaptive", "--kl-target", "0.1", "--kl-horizon", "64", "--log-sample-interval", "1",
)  # fmt: skip
# once, before anything is forked: a process in which torch's threads have run must not be
IMPORTED = (
    "slime_ppo.launch",
    "slime_ppo.backends.megatron.actor",
    "slime_ppo.backends.megatron.critic",
    "slime_ppo.backends.megatron.checkpoint",
    "slime_ppo.rollout.embedded.engine",
    "torch._inductor.config",  # by torch itself, in the deterministic mode
)
TIMEOUT_S = 300.0

Condition = Callable[..., bool]


def kill() -> None:
    """What a lost node looks like to the files."""
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Moment:
    """SIGKILL at the `call`-th call of `function` ("module:Class.name") for which `condition` holds of the arguments, before it or
    `after` it. `resuming`: not in the first run, which is killed in its generation, but in the one that resumes it."""

    name: str
    function: str
    call: int = 1
    condition: Condition = lambda *_, **__: True
    after: bool = False
    flags: tuple[str, ...] = ()
    resuming: bool = False

    def plant(self) -> None:
        """In the process that is to die."""
        owner, name = owner_of(self.function)
        original = getattr(owner, name)
        calls = 0

        def planted(*arguments: Any, **named: Any) -> Any:
            nonlocal calls
            due = False
            if self.condition(*arguments, **named):
                calls += 1
                due = calls == self.call
            if due and not self.after:
                kill()
            result = original(*arguments, **named)
            if due:
                kill()
            return result

        setattr(owner, name, planted)


def owner_of(function: str) -> tuple[Any, str]:
    """What a function is an attribute of, and its name there. Raises AttributeError when there is none."""
    module, _, path = function.partition(":")
    *owners, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for one in owners:
        owner = getattr(owner, one)
    getattr(owner, name)
    return owner, name


def target(suffix: str | tuple[str, ...]) -> Condition:
    """The second argument is a path that ends so."""
    return lambda _, path, *__, **___: str(path).endswith(suffix)


def first(suffix: str) -> Condition:
    """The first argument is a path that ends so."""
    return lambda path, *_, **__: str(path).endswith(suffix)


def role(name: str) -> Condition:
    """A command to this role of a rank."""
    return lambda _, given, *__: given == name


RANK = "slime_ppo.orchestration.local_ranks:LocalRank"
SECOND = "iter_0000004"  # the checkpoint during which most moments lie; that after two rollouts is whole
ASYNC = ("--async-save",)
MOMENTS = (
    Moment("in the first training, nothing saved yet", f"{RANK}.train", call=1),
    Moment("in generation", "slime_ppo.rollout.embedded.decode:_end_rows", call=5 * 8 + 4),
    Moment("between generation and rewards", "slime_ppo.rewards.runner:RewardRunner.score", call=6),
    Moment("after the log-probs", f"{RANK}.compute_log_probs", call=4, after=True),
    Moment("after the critic's training", "slime_ppo.backends.megatron.critic:CriticRole.train", call=4, after=True),
    Moment("in the actor's training, second optimizer step", "slime_ppo.backends.megatron.host_adam:HostAdam.step", call=14),
    Moment("in weight sync", "slime_ppo.rollout.embedded.engine:EmbeddedEngine.load_bucket", call=4),
    Moment("after the training, before it is in metrics.jsonl", "slime_ppo.tracking.jsonl:record_line", call=4),
    Moment("in the actor's file", "slime_ppo.conversion.torch_dist_write:_on_host", call=120 + 124 + 60),
    Moment("between actor and critic", f"{RANK}.save_checkpoint", call=2, condition=role("critic")),
    Moment(
        "before the critic's table of contents",
        "slime_ppo.backends.megatron.checkpoint:write_metadata",
        condition=first(f"critic/{SECOND}.partial"),
    ),
    Moment("before the actor's rename", "os:rename", condition=target(f"actor/{SECOND}")),
    Moment("between both renames", "os:rename", condition=target(f"actor/{SECOND}"), after=True),
    Moment("after both renames", "os:rename", condition=target(f"critic/{SECOND}"), after=True),
    Moment("before run_state.json is replaced", "os:replace", call=2, condition=target("run_state.json")),
    Moment("after run_state.json is replaced", "os:replace", call=2, condition=target("run_state.json"), after=True),
    Moment("before the deletion of the older checkpoint", "shutil:rmtree", condition=first("critic/iter_0000002.old")),
    Moment("in the deletion of the older checkpoint", "os:unlink", condition=first("slime_ppo.json"), after=True),
    Moment("async: while the files are written", f"{RANK}.finish_save", call=3, flags=ASYNC),
    Moment("async: before run_state.json is replaced", "os:replace", call=2, condition=target("run_state.json"), flags=ASYNC),
    Moment("while a resume loads the critic", f"{RANK}.load_checkpoint", condition=role("critic"), resuming=True),
    Moment("while a resume cuts metrics.jsonl", "pathlib:Path.replace", condition=target("metrics.jsonl"), resuming=True),
    Moment("in the last checkpoint", "os:rename", condition=target("critic/iter_0000006")),
)


IN_GENERATION = MOMENTS[1]


@dataclass(frozen=True)
class RandomMoment:
    """SIGKILL so many seconds after the first rollout began."""

    seconds: float
    flags: tuple[str, ...] = ()
    resuming: bool = False

    @property
    def name(self) -> str:
        return f"{self.seconds:.2f} s after the first rollout began"

    def plant(self) -> None:
        from slime_ppo.trainer import PpoTrainer

        iterate = PpoTrainer.iterate

        def planted(trainer: PpoTrainer, rollout_id: int) -> None:
            if rollout_id == 0:
                threading.Timer(self.seconds, kill).start()
            iterate(trainer, rollout_id)

        PpoTrainer.iterate = planted  # type: ignore[method-assign]


@dataclass(frozen=True)
class Ended:
    """A run in a process of its own. `killed`: by SIGKILL, as was planned."""

    code: int
    killed: bool
    output: str

    @property
    def place(self) -> str:
        """The last rollout that it has reported."""
        reported = re.findall(r"^rollout (\d+)/", self.output, re.MULTILINE)
        return f"rollout {reported[-1]}" if reported else "no rollout"

    @property
    def start(self) -> str:
        """Where it says that it begins."""
        if "the run starts at its beginning" in self.output:
            return "the beginning"
        found = re.search(r"resumed from .* after (\d+) of", self.output)
        return f"{found.group(1)} rollouts" if found else "-"


def run_forked(arguments: Sequence[str], plant: Callable[[], None] | None = None) -> Ended:
    """scripts/train_ppo.py in a forked process, with `plant` called before it begins."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            _become_run(arguments, plant, output.fileno())
        status = _wait(pid)
        output.seek(0)
        text = output.read()
    if os.WIFSIGNALED(status):
        return Ended(-os.WTERMSIG(status), os.WTERMSIG(status) == signal.SIGKILL, text)
    return Ended(os.WEXITSTATUS(status), killed=False, output=text)


def _become_run(arguments: Sequence[str], plant: Callable[[], None] | None, output: int) -> None:
    """The child's life; it never returns."""
    code = 1
    try:
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.argv = ["scripts/train_ppo.py", *arguments]
        if plant is not None:
            plant()
        runpy.run_path("scripts/train_ppo.py", run_name="__main__")
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(pid: int) -> int:
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return status
        time.sleep(0.05)
    os.kill(pid, signal.SIGTERM)
    raise SystemExit(f"a run took longer than {TIMEOUT_S:g} s")


def differences(ours: Path, theirs: Path) -> list[str]:
    """In what two finished runs are not the same. Times are left out, and the table of contents of a checkpoint, which holds the
    time of its writing."""
    last = f"iter_{NUM_ROLLOUT:07d}"
    names = [f"{part}/{last}/{file}" for part in ("actor", "critic") for file in ("__0_0.distcp", "common.pt")]
    names += ["hf/model.safetensors", "critic/hf/model.safetensors", "samples.jsonl"]
    found = [name for name in names if (ours / name).read_bytes() != (theirs / name).read_bytes()]
    if _metrics(ours) != _metrics(theirs):
        found.append("metrics.jsonl")
    if _progress(ours) != _progress(theirs):
        found.append("the loop's state")
    extra = [path.name for part in ("actor", "critic") for path in (ours / part).glob("iter_*") if path.name != last]
    return found + [f"left over: {name}" for name in extra]


def _metrics(folder: Path) -> list[dict[str, object]]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [{name: value for name, value in row.items() if not name.startswith("perf/") and name != "phases"} for row in rows]


def _progress(folder: Path) -> object:
    listed = json.loads((folder / "run_state.json").read_text(encoding="utf-8"))["checkpoints"]
    return json.loads((folder / listed[-1]["state_file"]).read_text(encoding="utf-8"))["progress"]


def try_moment(moment: Moment | RandomMoment, arguments: Sequence[str], save: Path, reference: Path) -> tuple[bool, str]:
    """Kill, resume, compare: whether all went well, and the row of the table."""
    command = [*arguments, "--save", str(save), "--load", str(save), *moment.flags]
    if moment.resuming:
        run_forked(command, IN_GENERATION.plant)
    killed = run_forked(command, moment.plant)
    while isinstance(moment, RandomMoment) and came_too_late(killed, save):
        shutil.rmtree(save)
        moment = replace(moment, seconds=moment.seconds / 2)
        killed = run_forked(command, moment.plant)
    if not killed.killed:
        return False, f"| {moment.name} | not reached, exit code {killed.code}: {killed.output[-600:]!r} | | |"
    resumed = run_forked(command)
    if resumed.code:
        return False, f"| {moment.name} | {killed.place} | {resumed.start} | exit code {resumed.code}: {resumed.output[-600:]!r} |"
    found = differences(save, reference)
    return not found, f"| {moment.name} | {killed.place} | {resumed.start} | {', '.join(found) or 'equal'} |"


def came_too_late(killed: Ended, save: Path) -> bool:
    """Whether nothing was left for a resume, since the run was quicker than the reference: its last checkpoint is published."""
    if not (killed.killed or killed.code == 0) or not (save / "run_state.json").exists():
        return False
    listed = json.loads((save / "run_state.json").read_text(encoding="utf-8"))["checkpoints"]
    return any(one["rollout_id"] == NUM_ROLLOUT for one in listed)


def random_moments(reference: Path, count: int, seed: int) -> list[RandomMoment]:
    """Spread over the time that the rollouts of the reference took; on a machine that others use, the same ones may take less."""
    rows = map(json.loads, (reference / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    whole = sum(row["perf/step_time"] for row in rows)
    numbers = random.Random(seed)
    return [RandomMoment(numbers.uniform(0, whole)) for _ in range(count)]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    options = _parser().parse_args(arguments)
    chosen: list[Moment | RandomMoment] = [one for one in MOMENTS if options.moments is None or one.name in options.moments]
    if options.moments is not None and len(chosen) != len(options.moments):
        raise SystemExit(f"unknown moment; known: {', '.join(one.name for one in MOMENTS)}")
    for name in IMPORTED:
        if name.endswith("actor"):
            importlib.import_module("slime_ppo.backends.megatron.device").prepare_megatron("cpu")
        importlib.import_module(name)
    home = Path(options.keep or tempfile.mkdtemp(prefix="kill_matrix_"))
    flags = [*FLAGS, "--hf-checkpoint", options.model]
    began = time.monotonic()
    whole = run_forked([*flags, "--save", str(home / "reference")])
    if whole.code:
        sys.stderr.write(whole.output)
        return 1
    chosen += random_moments(home / "reference", options.random, options.seed)
    print("| SIGKILL | last report | resumed from | outcome |\n|---|---|---|---|", flush=True)
    num_failed = 0
    for number, moment in enumerate(chosen):
        save = home / f"run-{number}"
        good, row = try_moment(moment, flags, save, home / "reference")
        num_failed += not good
        print(row, flush=True)
        if good:
            shutil.rmtree(save)
    print(f"\n{len(chosen) - num_failed} of {len(chosen)} equal, {time.monotonic() - began:.0f} s")
    if options.keep is None and not num_failed:
        shutil.rmtree(home)
    return int(num_failed > 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Kill a training run at chosen and random moments, resume it, and compare it with one that was left alone.",
        epilog='example: python tools/kill_matrix.py --moments "between actor and critic" --random 0',
    )
    parser.add_argument("--moments", nargs="+", metavar="NAME", help="some of the chosen moments (default: all); see the table")
    parser.add_argument("--random", type=int, default=3, metavar="N", help="random moments besides (default: 3)")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments (default: 0)")
    parser.add_argument(
        "--model", default="runs/models/glass-en", metavar="FOLDER", help="model of the runs (default: the quickstart's)"
    )
    parser.add_argument("--keep", metavar="FOLDER", help="put the runs here and leave the reference, and those that failed")
    return parser


if __name__ == "__main__":
    sys.exit(main())
