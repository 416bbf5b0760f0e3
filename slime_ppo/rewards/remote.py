"""Rewards of an HTTP server of yours: one POST per sample."""

import asyncio
from collections.abc import Sequence

from slime_ppo.config.api_key import read_api_key
from slime_ppo.rewards.base import RewardFailure, RewardInput, RewardResult
from slime_ppo.rewards.http import JsonClient, NoAnswer, RequestLimits
from slime_ppo.rewards.server_words import shortened


class RemoteReward:
    """POSTs each sample to `url` and takes the number that comes back.

    The request's body is JSON, an object with `prompt`, `response` and `label` (the keys that slime's remote rewards send),
    `metadata` (the other keys of the prompt's line), `sample_id` and `finish` ("stop", "length" or "abort").
    The answer is JSON with status 2xx: a number, or an object with a number under `reward` and, if single tokens are to be
    paid, a list of one number per response token under `process_rewards`; other keys are not read.

    The samples of a call are sent side by side, `concurrency` at a time; `requests_s` is the time for all of them, repetitions
    included. A sample whose request fails does not disturb the others: its entry is a RewardFailure with the cause.
    """

    def __init__(
        self,
        *,
        url: str,
        api_key_file: str | None,
        timeout_s: float,
        max_attempts: int,
        requests_s: float,
        concurrency: int,
    ) -> None:
        self._url, self._concurrency = url, concurrency
        self._api_key = read_api_key(api_key_file, flag="--rm-api-key-file")
        self._limits = RequestLimits(timeout_s, max_attempts, requests_s)

    async def __call__(self, inputs: Sequence[RewardInput]) -> list[object]:
        async with JsonClient(self._api_key, self._limits, concurrency=self._concurrency) as client:
            return await asyncio.gather(*(self._score(client, item) for item in inputs))

    async def _score(self, client: JsonClient, item: RewardInput) -> object:
        """A reward as the server gave it, which may be no number: the worker checks that, as it does for every function."""
        body = {
            "sample_id": item.sample_id,
            "prompt": item.prompt,
            "response": item.response,
            "label": item.label,
            "metadata": dict(item.metadata),
            "finish": str(item.finish),
        }
        try:
            answer = await client.post(self._url, body)
        except NoAnswer as error:
            return RewardFailure(str(error))
        if not isinstance(answer, dict):
            return answer
        if "reward" not in answer:
            return RewardFailure(
                f"POST {self._url} answered {shortened(str(answer))}, expected a number or an object with `reward`"
            )
        return RewardResult(answer["reward"], answer.get("process_rewards"))
