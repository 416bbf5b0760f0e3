"""Section `reward`: what scores a response."""

from dataclasses import dataclass
from typing import Literal

from slime_ppo.config.fields import option


@dataclass(frozen=True)
class RewardConfig:
    """The reward function and the worker processes it runs in."""

    rm_type: str | None = option("vader", help="name of a built-in reward; not used when --custom-rm-path is given")
    custom_rm_path: str | None = option(
        None, help="your own reward function as package.module.function; takes the place of --rm-type", default_text="no function"
    )
    pass_threshold: float = option(
        1.0, help="a response with at least this reward passes: what passrate/pass@k and eval/NAME_pass@k count"
    )
    reward_timeout_s: float = option(30.0, help="a reward call that takes longer is killed", unit="seconds", above=0)
    reward_num_workers: int = option(1, help="processes that run the reward function", unit="processes", at_least=1)
    reward_batch_size: int = option(64, help="samples handed to one reward call", unit="samples", at_least=1)
    on_bad_sample: Literal["error", "drop"] = option(
        "error", help="a sample without a finite reward or without a response: stop and name it, or drop and count it"
    )
