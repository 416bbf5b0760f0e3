"""Section `data`: the prompt file."""

from dataclasses import dataclass
from typing import Literal

from slime_ppo.config.fields import option


@dataclass(frozen=True)
class DataConfig:
    """Which prompts are drawn, and what happens to unusable ones."""

    prompt_data: str = option(help="prompt file: JSON Lines, one object a line", unit="file")
    input_key: str = option("prompt", help="key of the prompt text in a line")
    label_key: str | None = option(None, help="key of the label handed to the reward function", default_text="no label")
    shuffle: bool = option(True, flag="--rollout-shuffle", help="draw prompts in an order shuffled anew each epoch over the file")
    rollout_max_prompt_len: int = option(1024, help="longest prompt that is accepted", unit="tokens", at_least=1)
    overlong_prompt: Literal["error", "drop"] = option(
        "error", help="a prompt above --rollout-max-prompt-len: stop before the run, or leave it out and count it"
    )
