"""Section `sft`: the responses that supervised fine-tuning learns, and those it is measured on."""

from dataclasses import dataclass
from typing import Literal

from slime_ppo.config.fields import option


@dataclass(frozen=True)
class SftConfig:
    """Responses of the training file, and held-out ones."""

    response_key: str = option(
        "response",
        help="key of the response to the prompt under --input-key. With --apply-chat-template the messages under --input-key may "
        "hold it, too: where the last one is the assistant's, all of the assistant's turns train and this key is not read",
    )
    max_response_len: int = option(
        1024, help="most tokens of an example after its prompt, the end of sequence included", unit="tokens", at_least=1
    )
    overlong_response: Literal["broken", "cut"] = option(
        "broken", help="a response above --max-response-len: its row is broken (--broken-row), or its first tokens train"
    )
    append_eos: bool = option(
        True, help="a response ends with the end-of-sequence token, which trains; chat templates write their own"
    )
    eval_data: str | None = option(
        None, flag="--eval-data", help="held-out examples, same keys as --prompt-data", unit="file", default_text="no file"
    )
    eval_interval: int = option(
        0,
        flag="--eval-interval",
        help="measure the loss on --eval-data every so many batches, before the first and after the last too; 0 = only those two",
        unit="batches",
        at_least=0,
    )
