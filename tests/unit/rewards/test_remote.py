"""Rewards of an HTTP server: a real one, in this process."""

import asyncio
import json
import math
import socket
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime_ppo.errors import RewardError
from slime_ppo.rewards.base import RewardFailure, RewardInput, RewardResult, RewardSpec
from slime_ppo.rewards.remote import RemoteReward
from slime_ppo.rewards.runner import RewardRunner
from slime_ppo.types.sample import FinishReason, Prompt, Sample, one_version
from tests.helpers.reward_services import RewardService, reward_service


def inputs(num: int) -> list[RewardInput]:
    ids = np.ones(2, np.int32)
    return [
        RewardInput(index, f"prompt {index}", f"response {index}", f"label {index}", {"row": index}, FinishReason.STOP, ids, ids)
        for index in range(num)
    ]


def ask(
    url: str,
    num: int,
    *,
    api_key_file: str | None = None,
    timeout_s: float = 10.0,
    max_attempts: int = 3,
    requests_s: float = 20.0,
    concurrency: int = 8,
) -> list[Any]:
    reward = RemoteReward(
        url=url,
        api_key_file=api_key_file,
        timeout_s=timeout_s,
        max_attempts=max_attempts,
        requests_s=requests_s,
        concurrency=concurrency,
    )
    return asyncio.run(reward(inputs(num)))


def test_remote_posts_each_sample_and_takes_numbers_and_objects_in_order() -> None:
    def respond(path: str, body: Any) -> tuple[int, str]:
        index = body["sample_id"]
        time.sleep(0.02 * (3 - index))  # the last one answers first
        return 200, json.dumps(0.5 * index if index != 1 else {"reward": 7, "process_rewards": [0.1, 0.2], "why": "good"})

    with reward_service(respond) as service:
        assert ask(f"{service.url}/score?v=2", 3) == [0.0, RewardResult(7, process_rewards=[0.1, 0.2]), 1.0]
    assert {path for path, _, _ in service.asked} == {"/score?v=2"}
    expected = {
        "sample_id": 2,
        "prompt": "prompt 2",
        "response": "response 2",
        "label": "label 2",
        "metadata": {"row": 2},
        "finish": "stop",
    }
    assert expected in service.bodies()
    assert len(service.asked) == 3


def test_remote_sends_the_key_of_the_file_and_nothing_without_one(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret-1\n", encoding="utf-8")
    with reward_service(lambda path, body: (200, "1")) as service:
        ask(service.url, 1, api_key_file=str(tmp_path / "key"))
        ask(service.url, 1)
    assert [key for _, _, key in service.asked] == ["Bearer secret-1", None]


@pytest.mark.parametrize("status", [500, 503, 429, 408])
def test_remote_status_that_may_pass_is_tried_again(status: int) -> None:
    answers = iter([(status, "busy"), (status, "busy"), (200, "0.25")])
    with reward_service(lambda path, body: next(answers)) as service:
        assert ask(service.url, 1) == [0.25]
    assert len(service.asked) == 3


def test_remote_status_that_stays_is_a_failure_after_the_last_attempt() -> None:
    with reward_service(lambda path, body: (500, "no\nluck")) as service:
        [failure] = ask(service.url, 1, max_attempts=2)
    assert failure == RewardFailure(f"POST {service.url} got status 500: no luck (attempt 2 of at most 2)")
    assert len(service.asked) == 2


@pytest.mark.parametrize("status", [400, 404, 422])
def test_remote_refused_sample_is_not_tried_again_and_others_keep_their_rewards(status: int) -> None:
    def respond(path: str, body: Any) -> tuple[int, str]:
        return (status, "cannot judge this") if body["sample_id"] == 1 else (200, "1.5")

    with reward_service(respond) as service:
        first, refused, last = ask(service.url, 3)
    assert (first, last) == (1.5, 1.5)
    assert refused == RewardFailure(f"POST {service.url} got status {status}: cannot judge this (attempt 1 of at most 3)")
    assert len(service.asked) == 3


def test_remote_redirect_is_not_followed() -> None:
    with reward_service(lambda path, body: (200, "1")) as other, reward_service(lambda path, body: (307, other.url)) as service:
        [failure] = ask(service.url, 1)
    assert "got status 307" in failure.reason
    assert other.asked == []


def test_remote_slow_request_ends_at_its_time_limit_and_is_tried_again() -> None:
    woken, calls = threading.Event(), iter([True, False])

    def respond(path: str, body: Any) -> tuple[int, str]:
        if next(calls):
            woken.wait(20)
        return 200, "1"

    with reward_service(respond) as service:
        assert ask(service.url, 1, timeout_s=0.3) == [1]
        woken.set()


def test_remote_all_requests_end_within_the_time_of_the_call() -> None:
    """One at a time, the second has no time left: both are named with their cause, no later than the limit."""
    woken = threading.Event()

    def respond(path: str, body: Any) -> tuple[int, str]:
        woken.wait(20)
        return 200, "1"

    with reward_service(respond) as service:
        start = time.monotonic()
        slow, unsent = ask(service.url, 2, timeout_s=5.0, requests_s=0.6, concurrency=1, max_attempts=9)
        took_s = time.monotonic() - start
        woken.set()
    assert took_s < 3
    assert slow.reason == f"POST {service.url} got no answer within 0.6 s (attempt 1 of at most 9)"
    assert "was not sent: the requests before it took the time of the call (--reward-timeout-s)" in unsent.reason


def test_remote_nobody_listening_is_a_failure_after_the_last_attempt() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    [failure] = ask(f"http://127.0.0.1:{port}", 1, max_attempts=2)
    assert "failed, ClientConnectorError" in failure.reason and "(attempt 2 of at most 2)" in failure.reason


def test_remote_sends_no_more_than_its_concurrency_at_a_time() -> None:
    lock, under_way, most = threading.Lock(), 0, 0

    def respond(path: str, body: Any) -> tuple[int, str]:
        nonlocal under_way, most
        with lock:
            under_way += 1
            most = max(most, under_way)
        time.sleep(0.03)
        with lock:
            under_way -= 1
        return 200, "1"

    with reward_service(respond) as service:
        assert ask(service.url, 12, concurrency=3) == [1] * 12
    assert most == 3


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"score": 1}', "answered {'score': 1}, expected a number or an object with `reward`"),
        ("<html>hello</html>", "got '<html>hello</html>', expected JSON"),
        ("", "got '', expected JSON"),
    ],
)
def test_remote_answer_of_another_form_is_a_failure(text: str, reason: str) -> None:
    with reward_service(lambda path, body: (200, text)) as service:
        [failure] = ask(service.url, 1)
    assert reason in failure.reason
    assert len(service.asked) == 1


def test_remote_values_that_are_no_numbers_come_back_for_the_workers_check() -> None:
    texts = iter(["null", '"good"', "[1.0]"])
    with reward_service(lambda path, body: (200, next(texts))) as service:
        assert ask(service.url, 3, concurrency=1) == [None, "good", [1.0]]
    with reward_service(lambda path, body: (200, "NaN")) as service:
        assert math.isnan(ask(service.url, 1)[0])


def sample(sample_id: int) -> Sample:
    ids = np.ones(2, np.int32)
    return Sample(
        sample_id=sample_id,
        group_id=sample_id,
        trajectory_id=sample_id,
        prompt=Prompt(sample_id, f"prompt {sample_id}", ids, label=None, metadata={}),
        response_ids=ids,
        response_text="xx",
        rollout_log_probs=np.zeros(2, np.float32),
        support=None,
        loss_mask=np.ones(2, np.bool_),
        finish=FinishReason.STOP,
        weight_versions=one_version(0, 2),
    )


def whole_way(service: RewardService, *, drop: bool) -> RewardRunner:
    arguments: tuple[tuple[str, str | int | float | None], ...] = (
        ("url", service.url), ("api_key_file", None), ("timeout_s", 5.0), ("requests_s", 9.0),
        ("max_attempts", 2), ("concurrency", 8),
    )  # fmt: skip
    spec = RewardSpec("slime_ppo.rewards.remote.RemoteReward", "--rm-type remote", arguments)
    return RewardRunner(spec, num_workers=1, batch_size=4, timeout_s=10.0, on_bad_sample="drop" if drop else "error")


def test_remote_through_the_runner_names_the_one_sample_that_fails_or_drops_it() -> None:
    """In worker processes; bad answers of all kinds, each among good ones, which are not asked for again."""
    bad = {3: (500, "out of memory"), 5: (200, "null"), 6: (200, "NaN"), 9: (200, '{"reward": "good"}')}
    with reward_service(lambda path, body: bad.get(body["sample_id"], (200, "2.5"))) as service:
        with whole_way(service, drop=True) as runner:
            runner.start()
            outcome = runner.score([sample(index) for index in range(12)])
        asked = [body["sample_id"] for body in service.bodies()]
        with whole_way(service, drop=False) as runner, pytest.raises(RewardError) as error:
            runner.score([sample(index) for index in range(4)])
    assert [scored.sample_id for scored in outcome.samples] == [0, 1, 2, 4, 7, 8, 10, 11]
    assert {scored.reward for scored in outcome.samples} == {2.5}
    assert outcome.reasons == {
        3: f"POST {service.url} got status 500: out of memory (attempt 2 of at most 2)",
        5: "returned None",
        6: "returned nan",
        9: "returned 'good' (a str)",
    }
    assert sorted(asked) == sorted([*range(12), 3])
    text = str(error.value)
    assert text.startswith("reward function slime_ppo.rewards.remote.RemoteReward (--rm-type remote) POST http://127.0.0.1:")
    assert "scoring sample 3 (prompt row 3: 'prompt 3', response 'xx')" in text
