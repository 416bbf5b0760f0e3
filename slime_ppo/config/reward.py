"""Section `reward`: what scores a response."""

from dataclasses import dataclass
from typing import Literal

from slime_ppo.config.fields import option

# built-in rewards that ask a server
SERVED_REWARDS = ("remote", "reward_model")
# of --reward-timeout-s: requests end by themselves, with their cause, before the call that waits for them is killed
_SHARE_OF_REQUESTS = 0.9


@dataclass(frozen=True)
class RewardConfig:
    """The reward function and the worker processes it runs in."""

    rm_type: str | None = option(
        "vader",
        help="name of a built-in reward: math (the answer agrees with the label), vader, remote (your HTTP server) or reward_model "
        "(a classification model on an SGLang server); not used when --custom-rm-path is given",
    )
    rm_url: str | None = option(
        None,
        help="remote: where each sample is posted to; reward_model: address of the server, as in http://127.0.0.1:30000",
        default_text="no server",
    )
    rm_input: Literal["ids", "text"] = option(
        "ids",
        help="what a reward model scores: ids, the policy's own tokens, for a model with the policy's tokenizer (checked); text, "
        "the prompt as the policy reads it and the response without special tokens, which the server tokenizes in its own way",
    )
    rm_timeout_s: float | None = option(
        None,
        help="a request to --rm-url that takes longer has failed; failed ones are repeated while --reward-timeout-s lasts",
        unit="seconds",
        above=0,
        default_text="0.9 x reward_timeout_s",
    )
    rm_max_attempts: int = option(
        3,
        help="tries of a request to --rm-url that fails by connection, time limit or status 408, 429 or 5xx",
        unit="tries",
        at_least=1,
    )
    rm_concurrency: int = option(
        64, help="remote: requests under way at a time from each worker process", unit="requests", at_least=1
    )
    rm_api_key_file: str | None = option(
        None, help="file with the key that --rm-url asks for, sent as a bearer token", default_text="no key"
    )
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

    on_reward_timeout: Literal["error", "drop", "zero"] | None = option(
        None,
        help="a sample whose reward alone takes longer than --reward-timeout-s: stop and name it, drop and count it, or give it "
        "the reward 0 and count it",
        default_text="zero with --rm-type math, otherwise as --on-bad-sample",
    )

    @property
    def timeout_policy(self) -> Literal["error", "drop", "zero"]:
        """--on-reward-timeout, default resolved: an answer that math-verify cannot settle in time is no right one."""
        if self.on_reward_timeout is not None:
            return self.on_reward_timeout
        return "zero" if self.rm_type == "math" and self.custom_rm_path is None else self.on_bad_sample

    @property
    def served_by(self) -> str | None:
        """The built-in reward that asks the server of --rm-url, None when another function scores."""
        return self.rm_type if self.custom_rm_path is None and self.rm_type in SERVED_REWARDS else None

    @property
    def requests_s(self) -> float:
        """Seconds in which all requests of one reward call must be over, repetitions and pauses included."""
        return _SHARE_OF_REQUESTS * self.reward_timeout_s

    @property
    def request_timeout_s(self) -> float:
        """Seconds for one request, default resolved."""
        return self.requests_s if self.rm_timeout_s is None else self.rm_timeout_s
