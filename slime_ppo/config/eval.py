"""Section `eval`: responses to held-out prompts, with a sampler of their own."""

import re
from dataclasses import dataclass

from slime_ppo.config.fields import option

ONE_SET = "heldout"
"""The name of the data set when --eval-prompt-data is just a path."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# eval/<name> would be another data set's metric
_SUFFIXES = ("_response_len", "_truncated_ratio", "_num_reward_timeouts")
_LIST = "several data sets are written name=path,name2=path2"


@dataclass(frozen=True)
class EvalConfig:
    """When, on what and how the actor is evaluated. Nothing of it is taken from the sampler of the rollouts."""

    eval_interval: int = option(
        0, help="evaluate every so many rollouts, before the first and after the last too; 0 = never", unit="rollouts", at_least=0
    )
    eval_prompt_data: str | None = option(
        None,
        help="held-out prompt file, same keys as --prompt-data; or several data sets as name=path,name2=path2. Metrics are "
        f"eval/NAME, eval/{ONE_SET} for a path alone",
        default_text="no file",
    )
    eval_n_samples_per_prompt: int = option(
        1, help="answers to each held-out prompt; more than one gives eval/NAME_pass@k", unit="samples per prompt", at_least=1
    )
    eval_temperature: float = option(0.0, help="temperature of held-out answers; 0 = greedy", at_least=0)
    eval_top_p: float = option(1.0, help="nucleus sampling of held-out answers; 1 = off", above=0, at_most=1)
    eval_top_k: int = option(0, help="held-out answers are sampled among the k likeliest tokens; 0 or -1 = off", at_least=-1)
    eval_min_p: float = option(
        0.0,
        help="held-out answers are sampled among tokens with at least this share of the likeliest one's probability; 0 = off",
        at_least=0,
        at_most=1,
    )
    eval_max_response_len: int | None = option(
        None,
        help="a held-out response is cut after this many tokens",
        unit="tokens",
        default_text="same as --rollout-max-response-len",
        at_least=1,
    )

    @property
    def data_sets(self) -> dict[str, str]:
        """Name -> path of every data set, in the order given. Raises ValueError for a broken list."""
        return {} if self.eval_prompt_data is None else _data_sets(self.eval_prompt_data)

    @property
    def restrictions(self) -> tuple[str, ...]:
        """The options that restrict the sampler; none of them does when it is greedy."""
        on = {"eval_top_p": self.eval_top_p < 1, "eval_top_k": self.eval_top_k > 0, "eval_min_p": self.eval_min_p > 0}
        return tuple(name for name, restricts in on.items() if restricts and self.eval_temperature > 0)


def _data_sets(text: str) -> dict[str, str]:
    if "=" not in text:
        return {ONE_SET: text}
    found: dict[str, str] = {}
    for entry in text.split(","):
        name, separator, path = (part.strip() for part in entry.partition("="))
        if not separator or not path:
            raise ValueError(f"the entry {entry!r} is not name=path; {_LIST}, with no comma in any path")
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"the data set name {name!r} is to be letters, digits, '.', '_' and '-' after a letter or digit; {_LIST}, and "
                f"one path with '=' in it is written {ONE_SET}=path"
            )
        if name.endswith(_SUFFIXES):
            raise ValueError(
                f"the data set name {name!r} ends like a metric of a data set ({', '.join(_SUFFIXES)}); choose another"
            )
        if name in found:
            raise ValueError(f"the data set name {name!r} is there twice, for {found[name]} and {path}; names are unique")
        found[name] = path
    return found
