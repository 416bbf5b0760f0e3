"""Waiting for real Ray processes that fail, hang and die: what ends the wait, and which cause is told."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
Outcomes = dict[str, list[object]]


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    """What `gather` raised ([type, message]) or returned (["", results]) in each scenario of tests/helpers/ray_scenarios.py."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.ray_scenarios"],
        cwd=ROOT, env=environment | {"PYTHONPATH": str(ROOT)}, check=False, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: Outcomes = json.loads(done.stdout.splitlines()[-1])
    return found


def test_gather_results_come_in_the_order_of_the_calls(outcomes: Outcomes) -> None:
    assert outcomes["results_in_order"] == ["", [2, 1]]


def test_gather_failure_in_the_same_poll_as_a_success_is_raised_with_its_type_role_rank_and_phase(outcomes: Outcomes) -> None:
    assert outcomes["failure_beside_success"] == ["NumericsError", "values of sample 3 is nan [critic rank 1, critic values]"]


def test_gather_failure_ends_the_wait_for_a_rank_that_hangs(outcomes: Outcomes) -> None:
    kind, message = outcomes["failure_while_another_hangs"]
    assert kind == "ParallelError"
    assert str(message).startswith("actor rank 1 failed during actor training: ZeroDivisionError: division by zero.")


def test_gather_error_of_its_own_beats_the_echo_on_other_ranks(outcomes: Outcomes) -> None:
    assert outcomes["own_error_beats_echo"] == [
        "NumericsError",
        "values of sample 3 is nan [actor rank 1, actor training] (then failed too: actor rank 0)",
    ]


def test_gather_python_error_beats_a_broken_collective(outcomes: Outcomes) -> None:
    kind, message = outcomes["own_error_beats_broken_collective"]
    assert kind == "ParallelError"
    assert "actor rank 1 failed during actor training (then failed too: actor rank 0): ZeroDivisionError" in str(message)


def test_gather_timeout_names_who_is_missing_and_only_them(outcomes: Outcomes) -> None:
    kind, message = outcomes["timeout"]
    assert kind == "ParallelError"
    assert message == "actor training took longer than 0.5 s (--call-timeout-s): no answer from actor rank 0"


def test_gather_watched_process_that_dies_ends_the_wait(outcomes: Outcomes) -> None:
    kind, message = outcomes["watched_process_dies"]
    assert kind == "ParallelError"
    assert str(message).startswith("rollout engine died during actor training: its process ended without a Python error")


def test_gather_dead_process_beats_python_error_and_echo(outcomes: Outcomes) -> None:
    kind, message = outcomes["death_beats_error_and_echo"]
    assert kind == "ParallelError"
    assert str(message).startswith("rollout engine died during actor training (then failed too: actor rank 0, actor rank 1):")


def test_side_by_side_ranks_of_both_roles_train_at_once_and_each_end_is_told(outcomes: Outcomes) -> None:
    steps = {"critic": [0.25, 0.5], "actor": [1.0, 2.0]}
    assert outcomes["side_by_side"] == ["", [steps, ["actor", "critic"]]]


def test_side_by_side_failure_of_one_role_ends_the_wait_for_the_other(outcomes: Outcomes) -> None:
    kind, message = outcomes["side_by_side_failure"]
    assert kind == "NumericsError"
    assert str(message).startswith("values of sample 3 is nan [actor rank ")
    assert "critic and actor training side by side]" in str(message)


def test_placement_more_bundles_than_the_cluster_has_is_refused_with_both_numbers(outcomes: Outcomes) -> None:
    kind, message = outcomes["too_many_bundles"]
    cpus = int(str(outcomes["cpus"][1]).removesuffix(".0"))
    assert kind == "ConfigError"
    assert f"the run asks for {cpus + 3} CPUs" in str(message) and f"the cluster has {cpus}:" in str(message)


def test_placement_bundles_that_others_hold_end_the_wait_with_asked_and_free(outcomes: Outcomes) -> None:
    kind, message = outcomes["bundles_held_by_others"]
    cpus = int(str(outcomes["cpus"][1]).removesuffix(".0"))
    assert kind == "ConfigError"
    assert "no placement within 1 s (--placement-timeout-s)" in str(message)
    assert f"CPU: {cpus} asked, {cpus - 2} free" in str(message)


def test_cluster_local_is_started_although_ray_would_find_another(outcomes: Outcomes) -> None:
    assert outcomes["device"][0] == "" and int(float(str(outcomes["cpus"][1]))) == max(os.cpu_count() or 1, 2)


def test_cluster_is_left_when_its_block_ends(outcomes: Outcomes) -> None:
    assert outcomes["connected_after"] == ["", False]
