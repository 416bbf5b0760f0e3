"""From a row of a prompt file to the text of a prompt, its label and its metadata."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from slime_ppo.data.chat import ChatTemplate
from slime_ppo.data.row import BrokenRow, RawRow
from slime_ppo.errors import DataError

_SHOWN_KEYS = 20


@dataclass(frozen=True)
class PromptRow:
    """What a row says: `given` as it stands under the input key, `tools` (None: no tools), `text` as the policy will read it."""

    index: int
    place: str
    given: object
    tools: Sequence[object] | None
    text: str
    label: str | None
    metadata: Mapping[str, object]

    @property
    def identity(self) -> bytes:
        """What makes it this row, for a fingerprint: all of it but the rendered text, which may hold today's date."""
        said = [self.index, self.given, self.tools, self.label, self.metadata]
        return json.dumps(said, ensure_ascii=True, separators=(",", ":")).encode()


@dataclass(frozen=True)
class RowFormat:
    """Where in a row the prompt is, and its label and tools if there are any; all other keys are metadata.

    Without `chat_template` the prompt is a text. With it, it is a list of messages ({"role": ..., "content": ...}) or a text, which
    is then a user's message; tools are a list of JSON schemas, or a text that holds one.
    """

    input_key: str
    label_key: str | None = None
    tool_key: str | None = None
    chat_template: ChatTemplate | None = None

    def read(self, row: RawRow) -> PromptRow:
        """Raises BrokenRow for a row that holds no prompt."""
        content = row_content(row, self.input_key)
        given = value_of(content, self.input_key, "--input-key")
        tools = None
        if self.chat_template is None:
            text = _plain_text(given, self.input_key)
        else:
            messages = _asked(given, self.input_key)
            if self.tool_key is not None:
                tools = tools_of(value_of(content, self.tool_key, "--tool-key"), self.tool_key)
            if row.is_padded:
                messages, tools = unpadded(messages, tools)
            text = rendered(self.chat_template, messages, tools)
        encodable(text, self.input_key, "--input-key")
        label = None if self.label_key is None else _label(value_of(content, self.label_key, "--label-key"), self.label_key)
        own = (self.input_key, self.label_key, self.tool_key)
        metadata = {key: value for key, value in content.items() if key not in own}
        return PromptRow(row.index, row.place, given, tools, text, label, metadata)


def row_content(row: RawRow, input_key: str) -> Mapping[str, object]:
    """The row's object. Raises BrokenRow, as the functions below, where there is none."""
    if row.problem:
        raise BrokenRow(row.problem)
    if not isinstance(row.content, dict):
        raise BrokenRow(f"found a JSON {type(row.content).__name__}, expected an object with the key {input_key!r}")
    return row.content


def value_of(content: Mapping[str, object], key: str, flag: str) -> object:
    """What is under a key that `flag` has named."""
    if key not in content:
        keys = sorted(content)
        more = f" and {len(keys) - _SHOWN_KEYS} more" if keys[_SHOWN_KEYS:] else ""
        raise BrokenRow(f"no key {key!r} ({flag}); the line has {keys[:_SHOWN_KEYS]}{more}. Fix the line or the flag")
    return content[key]


def encodable(text: str, key: str, flag: str) -> str:
    """The text, which a tokenizer can read: JSON can write halves of characters."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BrokenRow(f"{key!r} ({flag}) is no text: {error.reason}. Fix the line") from error
    return text


def _plain_text(value: object, key: str) -> str:
    if isinstance(value, str):
        return value
    hint = ", or messages with --apply-chat-template" if isinstance(value, list) else ""
    raise BrokenRow(f"{key!r} (--input-key) is {_shown(value)}; expected a string{hint}")


def _label(value: object, key: str) -> str:
    """The label's text. Files of sums have numbers: 72 is "72", 0.5 is "0.5" and 1e-7 is "0.0000001"."""
    if isinstance(value, str):
        return encodable(value, key, "--label-key")
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        # 1e-7 as Python writes it would be read as 1 times e minus 7
        return f"{Decimal(str(value)):f}"
    raise BrokenRow(
        f"{key!r} (--label-key) is {_shown(value)}; expected a string or a number. Without --label-key it is handed to the reward "
        "function as metadata"
    )


def messages_of(value: object, key: str) -> list[Mapping[str, object]]:
    """A list of messages; a text is one message of the user."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise BrokenRow(f"{key!r} (--input-key) is {_shown(value)}; expected messages, or the text of a user's message")
    messages: list[Mapping[str, object]] = []
    for number, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BrokenRow(
                f"message {number} of {key!r} (--input-key) is {_shown(message)}; expected an object with role and content"
            )
        said = {name: entry for name, entry in message.items() if entry is not None or name == "content"}
        if said.get("content") is None and "tool_calls" not in said:
            raise BrokenRow(f"message {number} of {key!r} (--input-key) has no content")
        if isinstance(said.get("content"), list) and not all(_is_text_part(part) for part in said["content"]):
            raise BrokenRow(
                f"message {number} of {key!r} (--input-key) has a part that is no text; expected a text as content, or parts "
                '{"type": "text", "text": ...}: a policy here reads no images'
            )
        messages.append(said)
    return messages


def _is_text_part(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _asked(value: object, key: str) -> list[Mapping[str, object]]:
    messages = messages_of(value, key)
    if messages[-1]["role"] == "assistant":
        raise BrokenRow(f"the last message of {key!r} (--input-key) is the assistant's, which the policy is to write. Leave it out")
    return messages


def tools_of(value: object, key: str) -> list[object] | None:
    """JSON schemas, one per tool; None for no tools."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise BrokenRow(f"{key!r} (--tool-key) is a text that is no JSON: {error}") from error
    if value is None or value == []:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise BrokenRow(f"{key!r} (--tool-key) is {_shown(value)}; expected a list of JSON schemas, one object per tool")
    return value


def unpadded(
    messages: Sequence[Mapping[str, object]], tools: Sequence[object] | None
) -> tuple[list[Mapping[str, object]], list[object] | None]:
    """Both without the keys under which is null: a template would show them. A message keeps its content."""
    return [_unpadded(one, kept="content") for one in messages], None if tools is None else [_unpadded(one) for one in tools]


def _unpadded(value: Any, kept: str | None = None) -> Any:
    if isinstance(value, Mapping):
        return {key: _unpadded(entry) for key, entry in value.items() if entry is not None or key == kept}
    return [_unpadded(entry) for entry in value] if isinstance(value, list) else value


def rendered(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, object]],
    tools: Sequence[object] | None,
    *,
    add_generation_prompt: bool = True,
) -> str:
    """The text of a conversation, as ChatTemplate.render."""
    try:
        text = template.render(messages, tools, add_generation_prompt=add_generation_prompt)
    except DataError as error:
        raise BrokenRow(str(error)) from error
    for number, message in enumerate(messages):
        parts = message.get("content")
        # a template that expects a text writes what Python shows of a list
        if isinstance(parts, list) and parts and str(parts) in text:
            raise BrokenRow(f"the chat template takes the content of message {number} for a text, and it is a list. Write a text")
    return text


def _shown(value: object) -> str:
    text = repr(value)
    return f"{text if len(text) <= 80 else text[:80] + '...'}, a {type(value).__name__}"
