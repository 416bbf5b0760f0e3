import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from slime_ppo.errors import ConfigError, ParallelError, RewardError
from slime_ppo.rewards.base import RewardSpec
from slime_ppo.rewards.runner import RewardRunner, _Watch
from slime_ppo.types.sample import FinishReason, Prompt, Sample, one_version

FUNCTIONS = "tests.helpers.reward_functions"


def sample(sample_id: int, wish: str = "-", response: str = "xx") -> Sample:
    return Sample(
        sample_id=sample_id,
        group_id=sample_id,
        trajectory_id=sample_id,
        prompt=Prompt(
            sample_id, f"prompt {sample_id}", np.array([4, 5, 6], np.int32), label=f"label {sample_id}", metadata={"wish": wish}
        ),
        response_ids=np.ones(2, np.int32),
        response_text=response,
        rollout_log_probs=np.zeros(2, np.float32),
        support=None,
        loss_mask=np.ones(2, np.bool_),
        finish=FinishReason.STOP,
        weight_versions=one_version(0, 2),
    )


def runner(
    name: str, *, on_bad_sample: Literal["error", "drop"] = "error", timeout_s: float = 1.0, log_file: Path | None = None
) -> RewardRunner:
    spec = RewardSpec(f"{FUNCTIONS}.{name}", "--custom-rm-path")
    return RewardRunner(spec, num_workers=1, batch_size=3, timeout_s=timeout_s, on_bad_sample=on_bad_sample, log_file=log_file)


def num_workers_alive() -> int:
    return sum(child.name == "pebble_pool_worker" for child in multiprocessing.active_children())


@pytest.fixture(scope="module")
def strict() -> Iterator[RewardRunner]:
    with runner("by_metadata") as made:
        made.start()
        yield made


@pytest.fixture(scope="module")
def dropping() -> Iterator[RewardRunner]:
    with runner("by_metadata", on_bad_sample="drop") as made:
        made.start()
        yield made


def test_score_several_batches_keeps_the_order(strict: RewardRunner) -> None:
    samples = [sample(index, response="x" * index) for index in range(8)]
    outcome = strict.score(samples)
    assert [scored.reward for scored in outcome.samples] == [float(index) for index in range(8)]
    assert [scored.sample_id for scored in outcome.samples] == list(range(8))
    assert (outcome.num_dropped, outcome.reasons) == (0, {})
    assert samples[0].reward is None


def test_score_process_rewards_cross_the_process_border_to_their_sample() -> None:
    with runner("process_rewards") as made:
        outcome = made.score([sample(0), sample(1, "list"), sample(2)])
        first, paid, last = outcome.samples
        assert (first.reward, paid.reward) == (1.0, 1.0)
        assert first.process_rewards is None and last.process_rewards is None
        assert paid.process_rewards is not None and paid.process_rewards.tolist() == [1.0, 1.0]
        with pytest.raises(
            RewardError, match=r"returned 3 process rewards for 2 response tokens, scoring sample 5 .*one per response"
        ):
            made.score([sample(5, "array")])


def test_score_nothing_is_nothing(strict: RewardRunner) -> None:
    assert strict.score([]).samples == ()


@pytest.mark.parametrize(
    ("wish", "problem"),
    [
        ("raise", "raised ValueError: cannot judge this at "),
        ("None", "returned None"),
        ("NaN", "returned nan"),
        ("inf", "returned inf"),
        ("text", "returned 'good' (a str)"),
        ("die", "ended its worker process with exit code 7"),
        ("sleep", "took longer than 1 s (--reward-timeout-s)"),
    ],
)
def test_score_bad_sample_is_an_error_that_names_it(strict: RewardRunner, wish: str, problem: str) -> None:
    samples = [sample(10), sample(11), sample(12), sample(13), sample(14, wish), sample(15)]
    with pytest.raises(RewardError) as error:
        strict.score(samples)
    text = str(error.value)
    assert text.startswith(f"reward function {FUNCTIONS}.by_metadata (--custom-rm-path) {problem}")
    assert "scoring sample 14 (prompt row 14: 'prompt 14', response 'xx'); expected one finite number (" in text
    assert "--on-bad-sample drop" in text and ("--on-reward-timeout zero" in text) == (wish == "sleep")


def test_score_after_errors_still_works(strict: RewardRunner) -> None:
    assert [scored.reward for scored in strict.score([sample(1)]).samples] == [2.0]


def test_score_dropped_samples_are_counted_with_reasons(dropping: RewardRunner) -> None:
    """Each bad one shares its batch with good ones, which keep their rewards."""
    wishes = ["-", "raise", "-", "NaN", "-", "None", "sleep", "-", "-", "-", "die", "-"]
    outcome = dropping.score([sample(index, wish) for index, wish in enumerate(wishes)])
    assert [scored.sample_id for scored in outcome.samples] == [0, 2, 4, 7, 8, 9, 11]
    assert {scored.reward for scored in outcome.samples} == {2.0}
    assert outcome.num_dropped == 5
    assert sorted(outcome.reasons) == [1, 3, 5, 6, 10]
    assert outcome.reasons[3] == "returned nan"
    assert outcome.reasons[6].startswith("took longer than 1 s")


@pytest.mark.parametrize("wish", ["return too few", "return None", "return a number"])
def test_score_answer_of_wrong_length_is_an_error_also_when_dropping(dropping: RewardRunner, wish: str) -> None:
    with pytest.raises(RewardError, match=r"returned .* for 3 samples \(sample 0, 1, 2\); expected a list with one finite number"):
        dropping.score([sample(0), sample(1, wish), sample(2)])


def test_score_after_an_idle_worker_was_killed_starts_new_ones(dropping: RewardRunner) -> None:
    (worker,) = [child for child in multiprocessing.active_children() if is_worker_of(child, dropping)]
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    worker.join(timeout=10)
    assert [scored.reward for scored in dropping.score([sample(1)]).samples] == [2.0]


def is_worker_of(child: multiprocessing.process.BaseProcess, made: RewardRunner) -> bool:
    pool = made._pool
    assert pool is not None
    return child.pid in pool._pool_manager.worker_manager.workers


def test_score_batch_that_fails_only_as_a_whole_is_scored_one_by_one(caplog: pytest.LogCaptureFixture) -> None:
    with runner("only_alone") as made:
        outcome = made.score([sample(0), sample(1)])
    assert [scored.reward for scored in outcome.samples] == [1.0, 1.0]
    assert "raised RuntimeError: one at a time please" in caplog.text


def test_score_function_sees_every_field() -> None:
    with runner("all_fields") as made:
        assert [scored.reward for scored in made.score([sample(0), sample(1)]).samples] == [1.0, 0.0]


def test_score_prints_of_the_function_go_to_the_log_file(tmp_path: Path) -> None:
    with runner("noisy", log_file=tmp_path / "rewards.log") as made:
        made.score([sample(0)])
    assert (tmp_path / "rewards.log").read_text(encoding="utf-8") == "a word from the worker\n"


def test_start_function_that_does_not_import_is_a_config_error() -> None:
    before = num_workers_alive()
    made = RewardRunner(
        RewardSpec("no_such_module.score", "--custom-rm-path"), num_workers=1, batch_size=1, timeout_s=1.0, on_bad_sample="error"
    )
    with pytest.raises(ConfigError, match="--custom-rm-path: no_such_module.score cannot be used.*ModuleNotFoundError"):
        made.start()
    assert num_workers_alive() == before


def test_start_module_that_ends_its_process_is_a_config_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ends_on_import.py").write_text("import os\nos._exit(9)\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    spec = RewardSpec("ends_on_import.score", "--custom-rm-path")
    made = RewardRunner(spec, num_workers=1, batch_size=1, timeout_s=1.0, on_bad_sample="error")
    with pytest.raises(ConfigError, match="ends_on_import.score cannot be used, importing it ended its worker process"):
        made.start()


def test_close_in_the_middle_of_a_call_leaves_no_worker() -> None:
    before = num_workers_alive()
    made = runner("by_metadata")
    made.start()
    made._call([sample(0, "sleep")], _Watch(None))
    assert num_workers_alive() == before + 1
    made.close()
    made.close()
    assert num_workers_alive() == before
    with pytest.raises(RewardError, match="the workers of .*by_metadata were closed; score samples before close"):
        made.score([sample(0)])


def test_close_from_another_thread_ends_the_wait() -> None:
    made = runner("by_metadata", timeout_s=600.0)
    made.start()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(made.score, [sample(0, "sleep")])
        while not made._calls:
            time.sleep(0.01)
        made.close()
        with pytest.raises(RewardError, match="the workers of .*by_metadata were closed while they scored samples"):
            waiting.result(timeout=60)


def another_process_died() -> None:
    raise ParallelError("actor rank 0 died")


@pytest.mark.parametrize("wishes", [["sleep"], ["raise", "-", "sleep"]], ids=["batch", "one by one"])
def test_score_check_that_raises_ends_the_wait_and_runner_stays_usable(wishes: list[str]) -> None:
    """Without the check the sample would be left out, for the time limit."""
    before = num_workers_alive()
    made = runner("by_metadata", on_bad_sample="drop", timeout_s=30.0)
    made.start()
    with pytest.raises(ParallelError, match="actor rank 0 died"):
        made.score([sample(index, wish) for index, wish in enumerate(wishes)], check=another_process_died)
    assert not made._calls
    assert [scored.reward for scored in made.score([sample(1)]).samples] == [2.0]
    made.close()
    assert num_workers_alive() == before


def test_close_after_a_check_that_raised_leaves_no_worker() -> None:
    before = num_workers_alive()
    with pytest.raises(ParallelError), runner("by_metadata", timeout_s=30.0) as made:
        made.score([sample(0, "sleep"), *(sample(index) for index in range(1, 20))], check=another_process_died)
    assert num_workers_alive() == before


def test_score_check_is_called_also_when_every_single_call_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import time\ndef score(inputs):\n    time.sleep(0.1)\n    return [1.0] * len(inputs)\n"
    (tmp_path / "short_calls.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    spec = RewardSpec("short_calls.score", "--custom-rm-path")
    checks: list[float] = []
    with RewardRunner(spec, num_workers=1, batch_size=1, timeout_s=30.0, on_bad_sample="error") as made:
        made.start()
        outcome = made.score([sample(index) for index in range(8)], check=lambda: checks.append(time.monotonic()))
    assert [scored.reward for scored in outcome.samples] == [1.0] * 8
    assert checks


PRELUDE = """
import os, signal, threading
from slime_ppo.rewards.base import RewardSpec
from slime_ppo.rewards.runner import RewardRunner
"""


def run_script(body: str) -> subprocess.CompletedProcess[str]:
    """Run as a session of its own. Returns when every process that holds its output is gone, workers included."""
    spec = f"RewardSpec('{FUNCTIONS}.by_metadata', '--custom-rm-path')"
    make = f"runner = RewardRunner({spec}, num_workers=2, batch_size=3, timeout_s=600.0, on_bad_sample='error')\n"
    return subprocess.run(
        [sys.executable, "-c", PRELUDE + make + body],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        start_new_session=True,
    )


def test_interrupt_reaches_no_worker_and_runner_works_off_the_main_thread() -> None:
    """Ctrl-C goes to every process of the terminal: here many times, from before the first worker is up."""
    done = run_script("""
signal.signal(signal.SIGINT, lambda *_: None)
thread = threading.Thread(target=runner.start)
thread.start()
while thread.is_alive():
    os.killpg(0, signal.SIGINT)
    thread.join(0.02)
runner.start()
runner.close()
print("done")
""")
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_driver_killed_takes_a_busy_worker_along() -> None:
    """The worker sleeps for an hour; `run_script` returns only when it is gone."""
    done = run_script("""
import numpy as np
from slime_ppo.rewards.base import RewardInput
from slime_ppo.rewards.worker import score_batch
from slime_ppo.types.sample import FinishReason, one_version
runner.start()
busy = RewardInput(0, "", "", None, {"wish": "sleep"}, FinishReason.STOP, np.ones(1, np.int32), np.ones(2, np.int32))
task = runner._pool.schedule(score_batch, args=(runner._spec, [busy]))
while not task.running():
    pass
print("busy", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
""")
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "busy\n")
