import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tools import bench_ppo_utils as tool
from tools.bench import balancing, gae, linear, measure, supports, vocab, whitening
from tools.bench.measure import Candidate, Case, Figures, Limit

ROOT = Path(__file__).parents[3]


def results(case: Case) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
    """What each candidate computes, cloned: candidates may reuse memory."""
    for candidate in case.candidates:
        if candidate.before is not None:
            candidate.before()
        found = candidate.run()
        yield candidate.name, tuple(x.clone() for x in (found if isinstance(found, tuple) else (found,)))


def assert_equal(case: Case, names: list[str] | None = None) -> None:
    """Every candidate computes what the first one does, or rounds logits to bfloat16 (8 bits) where it does not."""
    _, expected = next(results(case))
    tolerance = 3e-2 if any(x.dtype == torch.bfloat16 for x in expected) else 2e-5
    for name, found in results(case):
        if names is None or name in names:
            for x, y in zip(found, expected, strict=True):
                torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("section", [vocab, linear, supports], ids=["vocab", "linear", "supports"])
def test_candidates_of_a_section_compute_the_same(section: Any) -> None:
    cases = list(section.cases("small"))
    assert len(cases) in (2, 4)
    for case in cases:
        assert_equal(case)


def test_candidates_gae_agree_and_the_scan_is_wrong_where_tokens_are_masked() -> None:
    plain, masked = gae.cases("small")
    assert_equal(plain)
    assert_equal(masked, ["loop", "generalized_advantages"])
    assert dict((c.name, masked.error(c.run())) for c in masked.candidates)["scan"] > 1.0


def test_candidates_whitening_agree_until_the_mean_is_large() -> None:
    """At mean 1000, std 0.01 the squares cancel in float32."""
    plain, far = whitening.cases("small")
    assert_equal(plain)
    one_pass, ours = (far.error(candidate.run()) for candidate in far.candidates)
    assert ours < 6e-7 and not one_pass < 1.0


def test_candidates_balancing_hold_every_sample_once() -> None:
    for case, num_samples in zip(balancing.cases("small"), (64, 64, 500, 64), strict=True):
        for candidate in case.candidates:
            found = candidate.run()
            assert sorted(int(position) for members in found for position in members) == list(range(num_samples))


def test_karmarkar_karp_of_five_numbers_by_hand() -> None:
    """8, 7, 6, 5, 4: differences 1, 6, 5, 4 -> 1, 1, 4 -> 3, 1 -> 2: sums of 16 and 14, as in the paper."""
    lens = np.array([8, 7, 6, 5, 4])
    assert sorted(int(lens[list(members)].sum()) for members in balancing.karmarkar_karp(lens, 2)) == [14, 16]


def test_karmarkar_karp_equal_gives_equal_counts() -> None:
    groups = balancing.karmarkar_karp_equal(np.arange(1, 25), 4)
    assert [len(members) for members in groups] == [6] * 4


def test_first_fit_decreasing_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """10 to a bin, longest first: 6 alone, 5 alone, 4 to the 6, 3 to the 5, 2 to the 5: three more go nowhere else."""
    monkeypatch.setattr(balancing, "MAX_TOKENS", 10)
    assert [sorted(members) for members in balancing.first_fit_decreasing(np.array([3, 6, 5, 4, 2]))] == [[1, 3], [0, 2, 4]]


def test_least_imbalance_is_that_of_the_longest_with_the_shortest() -> None:
    """Counts of 2, sums 26 over 2 groups: at best 20 + 1 against 3 + 2, 21 / 13 - 1."""
    assert balancing.least_imbalance(np.array([2, 20, 3, 1]), 2) == pytest.approx(21 / 13 - 1)


def test_peak_bytes_counts_what_is_alive_at_a_time() -> None:
    """4000 and 8000 bytes together, then the first is dropped before 6000 come: 14000 at most; 6000 without the given 8000."""

    def run() -> Tensor:
        first = torch.empty(1000)
        second = torch.empty(2000)
        del first
        torch.empty(1500)
        return second

    assert measure.peak_bytes(run, lambda _: ())[1] == 14000
    assert measure.peak_bytes(run, lambda second: [second])[1] == 6000


def test_peak_bytes_sees_buffers_inside_an_operation_of_autograd() -> None:
    """The gradient of x^2 summed: a square (4 kB) and its sum forward, 2 x and the product with the upstream gradient backward."""
    x = torch.ones(1000, requires_grad=True)
    assert measure.peak_bytes(lambda: torch.autograd.grad(x.square().sum(), x), lambda _: ())[1] >= 8000


def test_measure_restores_before_each_run_and_runs_a_slow_one_once_per_kind() -> None:
    """A slow candidate: once for its error and once for its time, whatever the repeats."""
    events: list[str] = []
    case = Case(
        title="case",
        candidates=(
            Candidate("slow", lambda: events.append("slow"), slow=True),
            Candidate("other", lambda: events.append("other"), before=lambda: events.append("restored")),
        ),
        bases=("slow",),
        error_is="nothing",
        error=lambda _: 0.5,
        limit=Limit("limit", lambda: None, factor=2.0),
        input_bytes=4,
    )
    measured = measure.measure(case, repeats=3)
    assert events.count("slow") == 2
    assert events.count("other") == events.count("restored") >= 4
    assert all(events[place - 1] == "restored" for place, event in enumerate(events) if event == "other")
    assert (measured.figures["slow"].peak, measured.figures["other"].peak, measured.figures["other"].error) == (None, 0.0, 0.5)


def test_reach_is_judged_by_the_figures() -> None:
    base, own = Figures(ms=100.0, peak=4.0, error=2e-6), Figures(ms=50.0, peak=1.0, error=1e-6)
    all_ = {"base": base, "own": own}
    reached = [
        measure.time_within(0.5, "base"),
        measure.peak_within(1.0),
        measure.peak_within_share(0.25, "base"),
        measure.error_within(1e-6),
        measure.error_no_worse("base"),
    ]
    missed = [
        measure.time_within(0.49, "base"),
        measure.peak_within(0.9),
        measure.peak_within_share(0.24, "base"),
        measure.error_within(9e-7),
    ]
    assert [reach.met(own, all_) for reach in reached] == [True] * 5
    assert [reach.met(own, all_) for reach in missed] == [False] * 4
    nan = Figures(ms=50.0, peak=None, error=float("nan"))
    assert [reach.met(nan, all_) for reach in reached[1:]] == [False] * 4


def test_tool_at_small_scale_prints_a_table_of_every_case(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sections with and without memory, slow candidates and limits. No figure is judged at small sizes."""
    monkeypatch.setattr(measure, "TURN_S", 0.0)
    assert tool.run(["3", "5"], scale="small", repeats=1) == 0
    printed = capsys.readouterr().out
    assert "figures" not in printed and " +" not in printed
    for case in [*gae.cases("small"), *balancing.cases("small")]:
        assert case.title in printed
        assert all(f"\n{candidate.name}" in printed for candidate in case.candidates)


def test_table_marks_what_is_reached_and_what_is_missed() -> None:
    [case, *_] = gae.cases("small")
    figures = {name: Figures(ms, 2.0, 1e-6) for name, ms in (("loop", 100.0), ("scan", 2.0), ("generalized_advantages", 1.9))}
    lines = list(tool.table(measure.Measured(case, figures, 0.5)))
    [own] = [line for line in lines if line.startswith("generalized_advantages")]
    assert own.split()[1:7] == ["1.90", "0.0190", "0.9500", "2.00", "1.0e-06", "3.8"]
    assert own.endswith("time 0.03x loop +, error 4e-06 +, time 0.75x scan -")


def test_tool_runs_as_a_script_and_refuses_no_repeats() -> None:
    command = [sys.executable, "tools/bench_ppo_utils.py", "--scale", "small", "--only", "6", "--repeats"]
    good, bad = (subprocess.run([*command, n], cwd=ROOT, capture_output=True, text=True, check=False) for n in ("1", "0"))
    assert good.returncode == 0 and "whiten_advantages" in good.stdout
    assert bad.returncode == 2 and "--repeats is 0; expected at least 1" in bad.stderr
