import io
from dataclasses import replace

import pytest

from slime_ppo.tracking.base import RolloutRecord, RunInfo
from slime_ppo.tracking.console import ConsoleTracker, duration, percent, rollout_line, short_number, step_line

# the two lines that ARCHITECTURE ("Errors and logs") shows
ROLLOUT_EXAMPLE = (
    "rollout 21/3000  reward 0.412 (+0.018)  len 812 (2.3% cut)  gap 0.011"
    " | gen 38.2s  critic 9.1s  actor 12.4s  sync 2.9s | eta 2d 04h"
)
STEP_EXAMPLE = "  step 21  pg -0.0031  kl 0.0004  clip 0.7%  ent 0.41  gnorm 0.83  lr 1.0e-06 | critic vf 0.092  ev 0.63  gnorm 1.4"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_rollout_line_of_the_example_is_exact() -> None:
    metrics = {
        "rollout/raw_reward": 0.412,
        "rollout/response_len/mean": 812.4,
        "rollout/truncated_ratio": 0.023,
        "rollout/logprob_gap_max": 0.0112,
        "train/pg_loss": -0.0031,
    }
    phases = {"generate": 38.21, "reward": 1.0, "critic train": 9.1, "actor train": 12.4, "weight sync": 2.9, "other": 0.1}
    line = rollout_line(
        RolloutRecord(21, metrics, (), phases), num_rollout=3000, previous_reward=0.394, eta_s=2 * 86400 + 4 * 3600 + 59
    )
    assert line == ROLLOUT_EXAMPLE


def test_step_line_of_the_example_is_exact(records: tuple[RolloutRecord, ...]) -> None:
    assert step_line({**records[1].steps[0], "step": 21.0}) == STEP_EXAMPLE


def test_step_line_of_a_critic_only_step_has_no_policy_part(records: tuple[RolloutRecord, ...]) -> None:
    assert step_line(records[0].steps[0]) == "  step 0  critic vf 0.092  ev 0.63  gnorm 1.4"


def test_rollout_line_of_a_critic_only_rollout_says_so_and_shows_a_reward_per_data_set(records: tuple[RolloutRecord, ...]) -> None:
    line = rollout_line(records[0], num_rollout=4, previous_reward=None, eta_s=None)
    assert line == (
        "rollout 0/4 (critic only)  reward 0.250  math 0.300  code 0.500  len 812 (2.3% cut)  gap 5.1e-06"
        " | gen 2.5s  critic 12.5s  actor 15.0s  sync 17.5s"
    )


def test_rollout_line_without_any_metric_names_the_rollout() -> None:
    assert rollout_line(RolloutRecord(3, {}, (), {}), num_rollout=4, previous_reward=None, eta_s=None) == "rollout 3/4"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.41, "0.41"),
        (-0.00312, "-0.0031"),
        (0.00042, "0.0004"),
        (5.12e-06, "5.1e-06"),
        (4e-9, "4.0e-09"),
        (1.42, "1.4"),
        (12.3, "12"),
        (812.4, "812"),
        (3.2e6, "3.2e+06"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
    ],
)
def test_short_number_has_two_significant_digits(value: float, text: str) -> None:
    assert short_number(value) == text


def test_percent_has_one_decimal_but_at_the_ends() -> None:
    assert [percent(share) for share in (0.0, 0.007, 0.9996, 1.0)] == ["0%", "0.7%", "100.0%", "100%"]


def test_duration_has_the_two_largest_units() -> None:
    assert [duration(seconds) for seconds in (12, 59.6, 270, 11520, 187200)] == ["12s", "1m 00s", "4m 30s", "3h 12m", "2d 04h"]


def test_console_tracker_estimates_from_recent_rollouts_and_shows_the_change(
    run: RunInfo, records: tuple[RolloutRecord, ...]
) -> None:
    stream = io.StringIO()
    tracker = ConsoleTracker(stream)
    tracker.start(run)
    tracker.log(records[0])
    slow = RolloutRecord(1, {**records[1].metrics, "perf/step_time": 120.0}, records[1].steps, records[1].phases)
    tracker.log(slow)
    tracker.close()
    lines = stream.getvalue().splitlines()
    assert lines[0] == f"A small run: 4 rollouts into {run.run_dir}"
    assert lines[1] == "note: A lexicon reward is easily flattered."
    assert lines[2].endswith("| eta 3m 00s")  # 3 left at 60 s
    assert "reward 0.268 (+0.018)" in lines[4]
    assert lines[4].endswith("| eta 3m 00s")  # 2 left at (60 + 120) / 2 s
    assert len(lines) == 6


def test_console_tracker_shows_a_bar_on_a_terminal_only(run: RunInfo, records: tuple[RolloutRecord, ...]) -> None:
    outputs = []
    for stream in (Terminal(), io.StringIO()):
        tracker = ConsoleTracker(stream)
        tracker.start(replace(run, start_rollout=2))
        tracker.log(records[2])
        tracker.close()
        outputs.append(stream.getvalue())
    on_terminal, in_file = outputs
    assert "2/4" in on_terminal and "\r" in on_terminal
    assert "\r" not in in_file
    for line in in_file.splitlines():
        assert line in on_terminal
