"""Section `data`: the prompt file."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from slime_ppo.config.fields import option

# what the renderer itself hands to a template
_TAKEN_NAMES = ("messages", "tools", "documents", "add_generation_prompt")


@dataclass(frozen=True)
class DataConfig:
    """Which prompts are drawn, and what happens to unusable ones."""

    prompt_data: str = option(
        help="prompt file: JSON Lines (one object a line), or parquet where the name ends in .parquet; or a folder of shards of "
        "either; some of the rows, counted from 0, as path@[start:end]",
        unit="file",
    )
    input_key: str = option(
        "prompt", help="key of the prompt: a text, or with --apply-chat-template a list of messages or the text of a user's message"
    )
    label_key: str | None = option(None, help="key of the label handed to the reward function", default_text="no label")
    apply_chat_template: bool = option(False, help="render prompts by the chat template of --hf-checkpoint, ready for the answer")
    chat_template: str | None = option(
        None, help="chat template to use instead, a Jinja file", unit="file", default_text="that of --hf-checkpoint"
    )
    apply_chat_template_kwargs: str | None = option(
        None, help='variables for the chat template as a JSON object, as in {"enable_thinking": false}', default_text="none"
    )
    tool_key: str | None = option(
        None, help="key of the tools the chat template shows: a list of JSON schemas", default_text="no tools"
    )
    shuffle: bool = option(True, flag="--rollout-shuffle", help="draw prompts in an order shuffled anew each epoch over the file")
    rollout_max_prompt_len: int = option(1024, help="longest prompt that is accepted", unit="tokens", at_least=1)
    overlong_prompt: Literal["error", "drop"] = option(
        "error", help="a prompt above --rollout-max-prompt-len: stop before the run, or leave it out and count it"
    )
    broken_row: Literal["error", "skip"] = option(
        "error", help="a row that cannot be read or holds no prompt: stop before the run and name it, or leave it out and count it"
    )

    @property
    def template_variables(self) -> Mapping[str, object]:
        """What --apply-chat-template-kwargs says. Raises ValueError where it is no JSON object, or sets what a row does."""
        if self.apply_chat_template_kwargs is None:
            return {}
        try:
            variables = json.loads(self.apply_chat_template_kwargs)
        except ValueError as error:
            raise ValueError(f"no JSON, {error}") from error
        if not isinstance(variables, dict):
            raise ValueError(f"a JSON {type(variables).__name__}, expected an object")
        taken = [name for name in variables if name in _TAKEN_NAMES]
        if taken:
            raise ValueError(f"{taken[0]!r} comes from the prompt file and cannot be set")
        return variables
