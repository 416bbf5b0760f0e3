"""Examples for supervised fine-tuning: a prompt, the tokens that follow it, and which of these train.

An example travels as a Prompt, whose label holds what follows. The prompt is encoded as PPO encodes it, and what an assistant is to
write is encoded apart from it, as it is when it is generated: the model learns the tokens that it will have to choose.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from slime_ppo.data.chat import ChatTemplate
from slime_ppo.data.row import BrokenRow, RawRow
from slime_ppo.data.row_format import (
    PromptRow,
    RowFormat,
    encodable,
    messages_of,
    rendered,
    row_content,
    tools_of,
    unpadded,
    value_of,
)
from slime_ppo.data.tokenizer import TextTokenizer
from slime_ppo.types.rollout_batch import FINISH_CODES, RolloutBatch
from slime_ppo.types.sample import FinishReason, Prompt


@dataclass(frozen=True)
class ExampleFormat:
    """Where in a row prompt and response are. Rows are read as `prompts` reads those of PPO, and then there is the response:

    - a text under `response_key`, which trains, with the end of sequence behind it where `append_eos`;
    - with a chat template the same, as the assistant's next turn;
    - with a chat template, and messages of which the last is the assistant's: all of the assistant's turns train.

    A turn trains up to and with its first end-of-sequence token; what the template writes behind that is read only. What follows
    the prompt is at most `max_response_len` tokens; longer, the row is broken, or the first tokens are taken.
    """

    prompts: RowFormat
    response_key: str
    tokenizer: TextTokenizer
    max_response_len: int
    overlong_response: Literal["broken", "cut"]
    append_eos: bool

    @property
    def input_key(self) -> str:
        return self.prompts.input_key

    @property
    def chat_template(self) -> ChatTemplate | None:
        return self.prompts.chat_template

    def read(self, row: RawRow) -> PromptRow:
        """Raises BrokenRow for a row that holds no example."""
        content = row_content(row, self.input_key)
        template, given = self.chat_template, value_of(content, self.input_key, "--input-key")
        if template is None:
            prompt = self.prompts.read(row)
            ids, trained = self._plain(prompt.text, self._response(content))
            return self._row(row, given, None, prompt.text, ids, trained)
        messages = messages_of(given, self.input_key)
        turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if messages[-1]["role"] != "assistant":
            turns, messages = [len(messages)], [*messages, {"role": "assistant", "content": self._response(content)}]
        key = self.prompts.tool_key
        tools = None if key is None else tools_of(value_of(content, key, "--tool-key"), key)
        if row.is_padded:
            messages, tools = unpadded(messages, tools)
        (text, _), *pieces = _pieces(template, messages, tools, turns)
        for piece in (text, *(piece for piece, _ in pieces)):
            encodable(piece, self.input_key, "--input-key")
        ids, trained = self._turns(pieces)
        return self._row(row, given, tools, text, ids, trained)

    def _response(self, content: Mapping[str, object]) -> str:
        value = value_of(content, self.response_key, "--response-key")
        if not isinstance(value, str) or not value:
            raise BrokenRow(f"{self.response_key!r} (--response-key) is {value!r}; expected a text that is not empty")
        return encodable(value, self.response_key, "--response-key")

    def _plain(self, prompt: str, response: str) -> tuple[list[int], list[bool]]:
        """As the tokens of prompt and response together go on behind those of the prompt. Where there is a token that holds some of
        both, a model that is given the prompt cannot choose it: the response is then encoded alone."""
        alone, before, whole = self.tokenizer.encode_batch([response, prompt, prompt + response])
        joined = len(whole) > len(before) and np.array_equal(whole[: len(before)], before)
        ids = (whole[len(before) :] if joined else alone).tolist()
        ids += [self.tokenizer.eos_ids[0]] if self.append_eos else []
        return ids, [True] * len(ids)

    def _turns(self, pieces: Sequence[tuple[str, bool]]) -> tuple[list[int], list[bool]]:
        ids: list[int] = []
        trained: list[bool] = []
        for (_, trains), encoded in zip(pieces, self.tokenizer.encode_batch([text for text, _ in pieces]), strict=True):
            own = encoded.tolist()
            ends = (place + 1 for place, token in enumerate(own) if token in self.tokenizer.eos_ids)
            num_trained = next(ends, len(own)) if trains else 0
            ids += own
            trained += [place < num_trained for place in range(len(own))]
        return ids, trained

    def _row(
        self,
        row: RawRow,
        given: object,
        tools: Sequence[object] | None,
        text: str,
        ids: Sequence[int],
        trained: Sequence[bool],
    ) -> PromptRow:
        limit = self.max_response_len
        if len(ids) > limit and self.overlong_response == "broken":
            raise BrokenRow(
                f"{len(ids)} tokens follow the prompt, the limit is {limit} (--max-response-len). Raise it, train on the first "
                "tokens (--overlong-response cut), or leave such rows out (--broken-row skip)"
            )
        if not any(trained[:limit]):
            raise BrokenRow("holds no token that trains")
        label = json.dumps([list(ids[:limit]), [int(one) for one in trained[:limit]]], separators=(",", ":"))
        return PromptRow(row.index, row.place, given, tools, text, label, {})


def _pieces(
    template: ChatTemplate, messages: Sequence[Mapping[str, object]], tools: Sequence[object] | None, turns: Iterable[int]
) -> list[tuple[str, bool]]:
    """The rendered conversation up to the end of its last turn of `turns`, in pieces: what is read, and what the assistant writes
    in those turns (True). Each turn must stand in the whole as it would have been written at its time."""
    whole = rendered(template, messages, tools, add_generation_prompt=False)
    pieces: list[tuple[str, bool]] = []
    done = 0
    for turn in turns:
        if turn == 0:
            raise BrokenRow("begins with the assistant: there is nothing to answer")
        before = rendered(template, messages[:turn], tools, add_generation_prompt=True)
        after = rendered(template, messages[: turn + 1], tools, add_generation_prompt=False)
        if not (whole.startswith(after) and after.startswith(before)) or after == before:
            raise BrokenRow(
                f"the chat template renders message {turn} otherwise in the whole conversation than at its time (it may drop the "
                "thoughts of earlier turns), so that it cannot train there. Give each answer a row of its own, with --response-key"
            )
        pieces += [(whole[done : len(before)], False), (whole[len(before) : len(after)], True)]
        done = len(after)
    return pieces


def example_batch(rollout_id: int, examples: Sequence[Prompt]) -> RolloutBatch:
    """Examples that ExampleFormat has read, as the columns that training reads; a sample's id is its row in the file."""
    follows = [json.loads(example.label or "[[],[]]") for example in examples]
    num = len(examples)
    response_lens = np.array([len(ids) for ids, _ in follows], np.int64)
    num_tokens = int(response_lens.sum())
    return RolloutBatch(
        rollout_id=rollout_id,
        sample_ids=np.array([example.index for example in examples], np.int64),
        group_ids=np.arange(num),
        trajectory_ids=np.arange(num),
        prompt_lens=np.array([len(example.token_ids) for example in examples], np.int64),
        response_lens=response_lens,
        finish=np.full(num, FINISH_CODES.index(FinishReason.STOP), np.int8),
        rewards=np.zeros(num, np.float32),
        prompt_ids=np.concatenate([example.token_ids for example in examples]).astype(np.int32),
        response_ids=np.array([token for ids, _ in follows for token in ids], np.int32),
        loss_mask=np.array([trains for _, mask in follows for trains in mask], np.bool_),
        rollout_log_probs=np.zeros(num_tokens, np.float32),
    )
