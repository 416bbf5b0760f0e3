"""Rewards of a classification model with one label, which an SGLang server scores."""

from collections.abc import Sequence
from typing import Literal

from slime_ppo.config.api_key import read_api_key
from slime_ppo.errors import RewardError
from slime_ppo.rewards.base import RewardFailure, RewardInput
from slime_ppo.rewards.classify import classify_url, parse_scores
from slime_ppo.rewards.http import JsonClient, NoAnswer, RequestLimits


class RewardModelReward:
    """The score that the model gives to prompt and response, read at their last token.

    With `sends` "ids" the model reads what the policy saw and wrote, token by token, the stop token included: for models that
    have the policy's tokenizer. With "text" it reads the prompt's text directly followed by the response's, both without
    special tokens; the server's tokenizer adds what it adds to any text, and nothing marks the end. A model that was trained
    on texts of another form (a chat template, say) needs a function of its own.

    transformers reads the score at the last token that is not the padding token. The two differ where a response ends with a
    stop token that is also the model's padding token: here it is a token like any other.

    The samples of a call go in one request. `max_tokens` is the longest input that the server takes, `vocab_size` the number
    of its token ids (None: not known); a sample beyond one of them is a RewardFailure.
    """

    def __init__(
        self,
        *,
        url: str,
        api_key_file: str | None,
        timeout_s: float,
        max_attempts: int,
        requests_s: float,
        sends: Literal["ids", "text"],
        max_tokens: int,
        vocab_size: int | None,
    ) -> None:
        self._url = classify_url(url)
        self._api_key = read_api_key(api_key_file, flag="--rm-api-key-file")
        self._limits = RequestLimits(timeout_s, max_attempts, requests_s)
        self._sends, self._max_tokens, self._vocab_size = sends, max_tokens, vocab_size

    async def __call__(self, inputs: Sequence[RewardInput]) -> list[object]:
        """Raises RewardError when the server refuses the request, which may be the fault of one sample."""
        failures = [self._failure(item) for item in inputs] if self._sends == "ids" else [None for _ in inputs]
        sent = [item for item, failure in zip(inputs, failures, strict=True) if failure is None]
        try:
            scores = await self._scores(sent) if sent else []
        except NoAnswer as error:
            if error.status is not None:
                raise RewardError(str(error)) from error
            # no server, no time: asking again for each sample alone would tell nothing new
            scores = [RewardFailure(str(error)) for _ in sent]
        remaining = iter(scores)
        return [next(remaining) if failure is None else failure for failure in failures]

    def _failure(self, item: RewardInput) -> RewardFailure | None:
        """Why the server cannot take the tokens of `item`: it would end over an unknown token, or cut what is too long."""
        num_prompt, num_response = len(item.prompt_ids), len(item.response_ids)
        if num_prompt + num_response > self._max_tokens:
            return RewardFailure(
                f"cannot send {num_prompt} prompt + {num_response} response tokens = {num_prompt + num_response}: the reward model "
                f"at {self._url} takes at most {self._max_tokens} (its context length less a reserve)"
            )
        largest = max((int(token) for ids in (item.prompt_ids, item.response_ids) for token in ids), default=0)
        if self._vocab_size is not None and largest >= self._vocab_size:
            return RewardFailure(f"cannot send token {largest}: the reward model at {self._url} has {self._vocab_size} tokens")
        return None

    async def _scores(self, inputs: Sequence[RewardInput]) -> list[object]:
        if self._sends == "ids":
            ids = [item.prompt_ids.tolist() + item.response_ids.tolist() for item in inputs]
            body: dict[str, object] = {"input_ids": ids}
            num_tokens: list[int | None] = [len(tokens) for tokens in ids]
        else:
            body = {"text": [item.prompt + item.response for item in inputs]}
            num_tokens = [None for _ in inputs]
        async with JsonClient(self._api_key, self._limits, concurrency=1) as client:
            answer = await client.post(self._url, body)
        return parse_scores(answer, num_tokens, self._url)
