"""Proof that the tests watch every ruling of the PPO semantics: break each one in a copy of the repository, and see a test fail.

    python tools/check_mutations.py                          every mutation, about two seconds each, those over ranks longer
    python tools/check_mutations.py --only "policy_loss"     those whose section, ruling or file contains the text
    python tools/check_mutations.py --list                   only say what there is
    python tools/check_mutations.py --jobs 4                 four copies at a time

tools/mutations/*.yaml hold the mutations: a text that occurs exactly once in a file, what it is replaced by, the ruling that is
broken so, and the tests that must notice. First these tests run on the untouched copy and must pass. Then each mutation is

    caught      a test failed: what is wanted
    survived    all tests passed: the ruling is not tested, or the mutation changes nothing
    broken      the code does not run at all: it proves nothing about the test
    timed out   no answer in time

and the exit code is 0 only if all were caught. The checkout itself is never written to.

One process imports torch, computes nothing, and forks a child per mutation that runs pytest on the copy. The package under test
is imported in the child alone, which takes the ranks of its tests down with it.
"""

import argparse
import importlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "runs", "build")
# sympy is what torch imports when a gradient is first taken
PRELOAD = "torch.distributed,sympy,hypothesis"
# Of these a crash is made, not another result; in a rank of a test they stand in the text of another error.
CRASHED = re.compile(
    r"^E\s+(NameError|UnboundLocalError|SyntaxError|IndentationError|ImportError|ModuleNotFoundError):", re.MULTILINE
)


@dataclass(frozen=True)
class Mutation:
    """`old`, found once in `file`, becomes `new`: this breaks `ruling` of SEMANTICS `section` (0: of none), which `tests` must
    notice."""

    section: int
    ruling: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def title(self) -> str:
        return f"{self.section:>2}  {self.ruling}  [{self.file}]"


@dataclass(frozen=True)
class Outcome:
    """`verdict`: caught, survived, broken or timed out; `detail`: the test that failed first, or what else there is to say."""

    verdict: str
    detail: str
    seconds: float


def load_mutations(folder: Path) -> list[Mutation]:
    """The mutations of all tables in `folder`, in the order of file names. Raises ValueError on a table of another form."""
    found = []
    for path in sorted(folder.glob("*.yaml")):
        for group in yaml.safe_load(path.read_text(encoding="utf-8")):
            if set(group) != {"section", "file", "tests", "mutations"}:
                raise ValueError(f"{path.name}: a group has the keys {sorted(group)}; expected section, file, tests, mutations")
            for one in group["mutations"]:
                if set(one) != {"ruling", "old", "new"}:
                    raise ValueError(f"{path.name}: a mutation has the keys {sorted(one)}; expected ruling, old, new")
                found.append(Mutation(group["section"], file=group["file"], tests=tuple(group["tests"]), **one))
    return found


def defects(root: Path, mutations: Sequence[Mutation]) -> list[str]:
    """What makes mutations unfit for the repository at `root`, one line each; empty when all can be tried."""
    lines = []
    for mutation, count in Counter(mutations).items():
        if count > 1:
            lines.append(f"{mutation.title}: is there {count} times")
        source = root / mutation.file
        lines += [f"{mutation.title}: no test file {test}" for test in mutation.tests if not (root / test.split("::")[0]).is_file()]
        if not source.is_file():
            lines.append(f"{mutation.title}: no such file")
            continue
        text = source.read_text(encoding="utf-8")
        if text.count(mutation.old) != 1:
            lines.append(f"{mutation.title}: the old text occurs {text.count(mutation.old)} times, expected once: {mutation.old!r}")
            continue
        if mutation.new == mutation.old:
            lines.append(f"{mutation.title}: new and old text are the same")
        try:
            compile(text.replace(mutation.old, mutation.new), mutation.file, "exec")
        except SyntaxError as error:
            lines.append(f"{mutation.title}: the new text is no Python ({error})")
    return lines


@dataclass(frozen=True)
class Trial:
    """One run of `tests` on the copy, with `mutation` applied (None: as it is)."""

    mutation: Mutation | None
    tests: tuple[str, ...]


@dataclass(frozen=True)
class _Running:
    trial: Trial
    copy: Path
    process: BaseProcess
    started: float


def run_trials(trials: Sequence[Trial], copies: Sequence[Path], *, timeout_s: float) -> Iterator[tuple[Trial, Outcome]]:
    """The outcome of each trial as it comes, one at a time in each of the `copies` of the repository."""
    waiting, free = list(trials), list(copies)
    running: dict[int, _Running] = {}
    try:
        while waiting or running:
            while waiting and free:
                one = _start(waiting.pop(0), free.pop(0))
                running[one.process.sentinel] = one
            oldest = min(one.started for one in running.values())
            ended = set(wait(list(running), timeout=max(0.0, oldest + timeout_s - time.monotonic())))
            late = {sentinel for sentinel, one in running.items() if time.monotonic() > one.started + timeout_s}
            for sentinel in [sentinel for sentinel in running if sentinel in ended | late]:
                one = running.pop(sentinel)
                _stop(one)
                free.append(one.copy)
                yield one.trial, _outcome(one, timed_out=sentinel not in ended)
    finally:
        for one in running.values():
            _stop(one)


def _start(trial: Trial, copy: Path) -> _Running:
    """Apply the mutation and fork a child that runs the tests."""
    (copy / "report.json").unlink(missing_ok=True)
    if trial.mutation is not None:
        path = copy / trial.mutation.file
        original = path.read_text(encoding="utf-8")
        (copy / "original").write_text(original, encoding="utf-8")
        path.write_text(original.replace(trial.mutation.old, trial.mutation.new), encoding="utf-8")
    process = get_context("fork").Process(target=_child, args=(copy, trial.tests))
    process.start()
    return _Running(trial, copy, process, time.monotonic())


def _stop(running: _Running) -> None:
    """End the child with all that it started, and undo the mutation."""
    pid = running.process.pid
    assert pid is not None
    for kill in (os.killpg, os.kill):  # it may not lead a group yet; until joined, its id is nobody else's
        try:
            kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue
    running.process.join()
    if running.trial.mutation is not None:
        shutil.move(running.copy / "original", running.copy / running.trial.mutation.file)


def _outcome(running: _Running, *, timed_out: bool) -> Outcome:
    seconds = time.monotonic() - running.started
    report = running.copy / "report.json"
    if timed_out:
        return Outcome("timed out", ", ".join(running.trial.tests), seconds)
    if not report.is_file():
        return Outcome("broken", f"the child died: {_tail(running.copy / 'output')}", seconds)
    found = json.loads(report.read_text(encoding="utf-8"))
    if found["code"] == pytest.ExitCode.OK:
        return Outcome("survived", ", ".join(running.trial.tests), seconds)
    if found["code"] != pytest.ExitCode.TESTS_FAILED or found["test"] is None:
        return Outcome("broken", f"pytest ended with {found['code']}: {found['reason']}", seconds)
    crash = CRASHED.search(found["reason"])
    return Outcome("broken" if crash else "caught", f"{found['test']} {crash.group(1) if crash else found['error']}", seconds)


def _tail(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")[-300:] if path.is_file() else "it wrote nothing"


class _Recorder:
    """Pytest plugin: the first test that failed, with what type of error, and why."""

    def __init__(self) -> None:
        self.test: str | None = None
        self.error = self.reason = ""

    def pytest_exception_interact(self, call: pytest.CallInfo[object]) -> None:
        if call.excinfo is not None and not self.error:
            self.error = call.excinfo.typename

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not self.reason:
            self.reason = report.longreprtext

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and self.test is None:
            self.test, self.reason = report.nodeid, report.longreprtext


def _child(copy: Path, tests: Sequence[str]) -> None:
    """Runs in the forked process: pytest on the copy, its verdict in a file."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setsid()
    with (copy / "output").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.chdir(copy)
    # bytecode is matched to its source by size and whole second: that of one mutation could be taken for the next one's;
    # plugins that happen to be installed take longer to load than most tests to run
    os.environ.update(PYTHONPATH=str(copy), PYTHONDONTWRITEBYTECODE="1", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(copy))
    recorder = _Recorder()
    try:
        code = int(pytest.main(["-x", "-q", *tests], plugins=[recorder]))
        foreign = [name for name in _top_packages(copy) if name in sys.modules and not _lies_in(name, copy)]
        if foreign:
            code, recorder.reason = -1, f"{', '.join(foreign)} was imported from elsewhere than the copy"
    except BaseException:
        code, recorder.reason = -1, traceback.format_exc()
    report = {"code": code, "test": recorder.test, "error": recorder.error, "reason": recorder.reason}
    (copy / "report.json").write_text(json.dumps(report), encoding="utf-8")


def _top_packages(copy: Path) -> list[str]:
    return [path.parent.name for path in copy.glob("*/__init__.py")]


def _lies_in(module: str, copy: Path) -> bool:
    return str(sys.modules[module].__file__).startswith(str(copy))


def _preload(names: str) -> None:
    """Import what every child needs, without computing anything: a process whose threads have run is not safe to fork."""
    for name in filter(None, names.split(",")):
        importlib.import_module(name)
    if "hypothesis" in sys.modules:
        from hypothesis import Phase, settings

        # the same examples for every mutation; a failing one need not be made small
        settings.register_profile("mutations", derandomize=True, database=None, phases=[Phase.explicit, Phase.generate])
        settings.load_profile("mutations")


def _line(trial: Trial, outcome: Outcome) -> str:
    title = trial.mutation.title if trial.mutation else "    as it is"
    return f"{outcome.verdict:<10} {title}  <-  {outcome.detail} ({outcome.seconds:.1f} s)"


def check(root: Path, mutations: Sequence[Mutation], *, jobs: int, timeout_s: float) -> int:
    """Print a line for each mutation as it is judged, and a summary. Returns the exit code: 0 when all were caught."""
    suites = list(dict.fromkeys(mutation.tests for mutation in mutations))
    verdicts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="mutations_") as folder:
        copies = [Path(folder).resolve() / str(index) for index in range(jobs)]
        for copy in copies:
            shutil.copytree(root, copy, ignore=NOT_COPIED)
        failing = []
        for trial, outcome in run_trials([Trial(None, tests) for tests in suites], copies, timeout_s=timeout_s):
            if outcome.verdict != "survived":
                failing.append(trial.tests)
                print(f"these tests do not pass without any mutation: {outcome.detail}", flush=True)
        print(f"{len(suites) - len(failing)} of {len(suites)} sets of tests pass on the copy as it is", flush=True)
        verdicts["not tried"] = sum(mutation.tests in failing for mutation in mutations)
        trials = [Trial(mutation, mutation.tests) for mutation in mutations if mutation.tests not in failing]
        for trial, outcome in run_trials(trials, copies, timeout_s=timeout_s):
            verdicts[outcome.verdict] += 1
            print(_line(trial, outcome), flush=True)
    counts = ", ".join(f"{verdicts[name]} {name}" for name in ("caught", "survived", "broken", "timed out", "not tried"))
    print(f"{len(mutations)} mutations: {counts}")
    return 0 if verdicts["caught"] == len(mutations) else 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="mutations whose section, ruling or file contains it")
    parser.add_argument("--list", action="store_true", help="print the mutations and run nothing")
    parser.add_argument("--jobs", type=int, default=1, help="mutations at a time, each in a copy of its own (default 1)")
    parser.add_argument(
        "--timeout", type=float, default=300.0, metavar="S", help="seconds for the tests of one mutation (default 300)"
    )
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository (default: this one)")
    parser.add_argument("--preload", default=PRELOAD, help=f"modules imported once for all mutations (default {PRELOAD})")
    options = parser.parse_args(argv)
    root = options.root.resolve()
    mutations = [one for one in load_mutations(root / "tools" / "mutations") if options.only in one.title]
    if options.list:
        print(*(mutation.title for mutation in mutations), f"{len(mutations)} mutations", sep="\n")
        return 0
    unfit = defects(root, mutations)
    if unfit or not mutations:
        print(*(unfit or ["no mutation to try"]), sep="\n")
        return 2
    # children lead groups of their own, which only run_trials ends
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.environ["OMP_NUM_THREADS"] = "1"
    _preload(options.preload)
    return check(root, mutations, jobs=options.jobs, timeout_s=options.timeout)


if __name__ == "__main__":
    sys.exit(main())
