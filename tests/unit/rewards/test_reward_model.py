"""The reward model's class against a server that answers as SGLang does; with SGLang itself: tests/sglang/test_reward_model.py."""

import asyncio
import json
from typing import Any, Literal

import numpy as np
import pytest

from slime_ppo.errors import RewardError
from slime_ppo.rewards.base import RewardFailure, RewardInput
from slime_ppo.rewards.reward_model import RewardModelReward
from slime_ppo.types.sample import FinishReason
from tests.helpers.reward_services import reward_service


def item(sample_id: int, prompt_ids: list[int], response_ids: list[int]) -> RewardInput:
    prompt, response = np.array(prompt_ids, np.int32), np.array(response_ids, np.int32)
    return RewardInput(sample_id, f"prompt {sample_id},", f" response {sample_id}", None, {}, FinishReason.STOP, prompt, response)


THREE = [item(0, [4, 5], [6, 3]), item(1, [4], [7, 8, 9]), item(2, [1], [2])]


def ask(url: str, items: list[RewardInput], *, sends: Literal["ids", "text"] = "ids", vocab_size: int | None = 10) -> list[object]:
    reward = RewardModelReward(
        url=url,
        api_key_file=None,
        timeout_s=5.0,
        max_attempts=2,
        requests_s=5.0,
        sends=sends,
        max_tokens=4,
        vocab_size=vocab_size,
    )
    return asyncio.run(reward(items))


def entry(score: object, num_tokens: int) -> dict[str, object]:
    return {"embedding": [score], "meta_info": {"prompt_tokens": num_tokens}}


def sums(path: str, body: Any) -> tuple[int, str]:
    """Each input scores the sum of its ids."""
    return 200, json.dumps([entry(float(sum(ids)), len(ids)) for ids in body["input_ids"]])


def test_reward_model_sends_prompt_and_response_ids_in_one_request() -> None:
    with reward_service(sums) as service:
        assert ask(f"{service.url}/", THREE) == [18.0, 28.0, 3.0]
    assert service.asked == [("/classify", {"input_ids": [[4, 5, 6, 3], [4, 7, 8, 9], [1, 2]]}, None)]


def test_reward_model_sends_texts_when_asked_to() -> None:
    with reward_service(lambda path, body: (200, json.dumps([entry(1.5, 99), entry(2.5, 98)]))) as service:
        assert ask(service.url, THREE[:2], sends="text") == [1.5, 2.5]
    assert service.bodies() == [{"text": ["prompt 0, response 0", "prompt 1, response 1"]}]


def test_reward_model_sample_that_is_too_long_or_has_an_unknown_token_fails_alone() -> None:
    items = [THREE[0], item(7, [1, 2], [3, 4, 5]), THREE[2], item(8, [1], [10])]
    with reward_service(sums) as service:
        first, long, third, unknown = ask(service.url, items)
        assert ask(service.url, [items[1]]) == [long]
        assert ask(service.url, [items[3]], vocab_size=None) == [11.0]
    assert (first, third) == (18.0, 3.0)
    assert isinstance(long, RewardFailure) and isinstance(unknown, RewardFailure)
    assert long.reason.startswith("cannot send 2 prompt + 3 response tokens = 5: the reward model at http://127.0.0.1:")
    assert "takes at most 4" in long.reason
    assert unknown.reason == f"cannot send token 10: the reward model at {service.url}/classify has 10 tokens"
    assert [len(body["input_ids"]) for body in service.bodies()] == [2, 1]


def test_reward_model_refusal_raises_so_that_the_runner_looks_for_the_sample() -> None:
    with reward_service(lambda path, body: (400, "too long for me")) as service, pytest.raises(RewardError) as error:
        ask(service.url, THREE)
    assert str(error.value) == f"POST {service.url}/classify got status 400: too long for me (attempt 1 of at most 2)"


def test_reward_model_without_a_server_fails_every_sample_without_asking_for_each() -> None:
    with reward_service(sums) as service:
        pass
    failures = ask(service.url, [*THREE, item(3, [1] * 3, [1] * 3)])
    assert [isinstance(failure, RewardFailure) for failure in failures] == [True] * 4
    assert "ClientConnectorError" in str(failures[0]) and failures[0] == failures[2]
    assert "takes at most 4" in str(failures[3])


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ({"embedding": [1.0]}, "answered {'embedding': [1.0]}, expected a list of 1 scores"),
        ([entry(1.0, 4), entry(1.0, 4)], "answered 2 entries, expected a list of 1 scores"),
        ([{"text": "hello"}], "answered {'text': 'hello'}, expected embedding and meta_info.prompt_tokens"),
        ([{"embedding": [0.5, 0.25], "meta_info": {"prompt_tokens": 4}}], "answered [0.5, 0.25], expected one label"),
        ([entry(1.0, 3)], "has read 3 of 4 tokens: start the server without --allow-auto-truncate"),
    ],
)
def test_reward_model_answer_of_another_form_is_an_error(answer: object, problem: str) -> None:
    with reward_service(lambda path, body: (200, json.dumps(answer))) as service, pytest.raises(RewardError) as error:
        ask(service.url, THREE[:1])
    assert problem in str(error.value)


def test_reward_model_score_that_is_no_number_is_left_to_the_workers_check() -> None:
    with reward_service(lambda path, body: (200, json.dumps([entry(None, 4)]))) as service:
        assert ask(service.url, THREE[:1]) == [None]
