"""Every function of ppo_utils that costs time, against the ways it is usually done: time, memory, error, distance to the limit.

    python tools/bench_ppo_utils.py                              all sections, a few minutes, 6 GB of memory
    python tools/bench_ppo_utils.py --only 3 4 --repeats 20
    python tools/bench_ppo_utils.py --scale small                seconds; proves that it runs, says nothing about speed

The candidates of a case take turns in one process, on one thread; times are the least CPU times, so that ratios hold on a noisy
machine. `peak` is memory alive at a time during forward and backward (tools/bench/measure.py), `error` the largest difference
to float64 unless the case says otherwise, `x limit` the time over that of what the machine cannot avoid. `reach` lists the
figures to reach, marked + or, where missed, -.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.bench import balancing, gae, linear, supports, vocab, whitening
from tools.bench.measure import Case, Figures, Measured, Scale, keep_freed_memory, measure


@dataclass(frozen=True)
class Section:
    """`kept_bytes` is the memory its full cases take turns in."""

    title: str
    cases: Callable[[Scale], Iterator[Case]]
    kept_bytes: int


SECTIONS = {
    "1": Section("log-probs over the vocabulary", vocab.cases, 2 << 30),
    "2": Section("log-probs from hidden states", linear.cases, 2 << 30),
    "3": Section("generalised advantages", gae.cases, 1 << 28),
    "4": Section("log-probs over the support", supports.cases, 3 << 30),
    "5": Section("balancing and packing", balancing.cases, 1 << 26),
    "6": Section("whitening", whitening.cases, 1 << 26),
}


def table(measured: Measured) -> Iterator[str]:
    """The lines of one case."""
    case, all_ = measured.case, measured.figures
    yield f"\n{case.title}; error: {case.error_is}"
    bases = "".join(f"{'x ' + base:>23}" for base in case.bases)
    yield f"{'':<24}{'ms':>10}{bases}{'peak':>8}{'error':>10}{'x limit':>9}  reach"
    for candidate in case.candidates:
        own = all_[candidate.name]
        ratios = "".join(f"{own.ms / all_[base].ms:>23.4f}" for base in case.bases)
        peak = "-" if own.peak is None else f"{own.peak:.2f}"
        distance = "-" if measured.limit_ms is None else f"{own.ms / measured.limit_ms:.1f}"
        reach = ", ".join(f"{text} {'+' if met else '-'}" for text, met in judged(measured, candidate.name))
        yield f"{candidate.name:<24}{own.ms:>10.2f}{ratios}{peak:>8}{own.error:>10.1e}{distance:>9}  {reach}".rstrip()
    if case.limit is not None:
        yield f"{'limit':<24}{measured.limit_ms:>10.2f}  {case.limit.name}"


def judged(measured: Measured, name: str) -> Iterator[tuple[str, bool]]:
    """The figures a candidate has to reach, and whether it does."""
    [candidate] = [candidate for candidate in measured.case.candidates if candidate.name == name]
    own: Figures = measured.figures[name]
    for reach in candidate.reach:
        yield reach.text, reach.met(own, measured.figures)


def without_reach(case: Case) -> Case:
    """At small sizes launches are all that is timed."""
    return replace(case, candidates=tuple(replace(candidate, reach=()) for candidate in case.candidates))


def run(sections: list[str], *, scale: Scale, repeats: int) -> int:
    """Print all tables and what was missed; how many figures were."""
    verdicts: list[tuple[str, bool]] = []
    for name in sections:
        if scale == "full":
            keep_freed_memory(SECTIONS[name].kept_bytes)
        verdicts += run_section(SECTIONS[name], scale=scale, repeats=repeats)
    missed = [text for text, met in verdicts if not met]
    if verdicts:
        print(f"\nreached {len(verdicts) - len(missed)} of {len(verdicts)} figures", *missed, sep="\n  missed  ")
    return len(missed)


def run_section(section: Section, *, scale: Scale, repeats: int) -> list[tuple[str, bool]]:
    """Print a section's tables; each figure to reach, and whether it is."""
    verdicts = []
    for case in section.cases(scale):
        measured = measure(case if scale == "full" else without_reach(case), repeats=repeats)
        print("\n".join(table(measured)), flush=True)
        for candidate in case.candidates:
            what = f"{case.title.split(';')[0]}: {candidate.name.strip()}"
            verdicts += [(f"{what}, {text}", met) for text, met in judged(measured, candidate.name)]
    return verdicts


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    sections = ", ".join(f"{name} {section.title}" for name, section in SECTIONS.items())
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS), help=f"sections: {sections}")
    parser.add_argument("--scale", choices=["small", "full"], default="full")
    parser.add_argument("--repeats", type=int, default=3, help="rounds in which the candidates take turns")
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error(f"--repeats is {options.repeats}; expected at least 1")
    torch.set_num_threads(1)
    run(options.only, scale=options.scale, repeats=options.repeats)
    return 0


if __name__ == "__main__":
    sys.exit(main())
