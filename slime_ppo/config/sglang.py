"""Section `sglang`: SGLang's servers, when they are the rollout engine."""

import shlex
from dataclasses import dataclass
from typing import Literal

from slime_ppo.config.fields import option
from slime_ppo.errors import ConfigError

ServerArgument = tuple[str, tuple[str, ...]]
"""Name and values; a switch has none."""


@dataclass(frozen=True)
class SglangConfig:
    """SGLang's servers: where they run, what they are started with, how long their clients wait."""

    deterministic: bool = option(
        False,
        flag="--sglang-deterministic",
        help="honour the seed of every sample, so that the same run gives the same tokens; turns the servers' prefix cache off",
    )
    pause_mode: Literal["abort", "retract"] = option(
        "abort",
        flag="--sglang-pause-mode",
        help="what a weight update does to requests that are under way: abort gives them back as they are, retract lets them go on "
        "with the new weights",
    )
    host: str = option(
        "127.0.0.1", flag="--sglang-host", help="address the servers listen on; engines on several nodes need one that others reach"
    )
    port: int | None = option(
        None,
        flag="--sglang-port",
        help="port of the first server, the next one's is one higher",
        default_text="any free port",
        at_least=1,
        at_most=65535,
    )
    api_key_file: str | None = option(
        None,
        flag="--sglang-api-key-file",
        help="file with a key that servers then demand, and that all our requests carry",
        default_text="no key",
    )
    server_urls: str | None = option(
        None,
        flag="--sglang-server-urls",
        help="use these servers, which somebody else has started and restarts, instead of our own: http://host:port,...",
        default_text="start our own",
    )
    router_url: str | None = option(
        None,
        flag="--sglang-router-url",
        help="send prompts through this router, not to the server with the fewest outstanding ones; refused when it loses fields. "
        "Needs servers whose addresses stay: --sglang-server-urls, or --sglang-port",
        default_text="no router",
    )
    max_concurrency: int | None = option(
        None,
        flag="--sglang-max-concurrency",
        help="requests under way at one time, over all servers",
        unit="samples",
        default_text="the whole rollout",
        at_least=1,
    )
    max_attempts: int = option(
        3, flag="--sglang-max-attempts", help="times that a request is sent before the run gives up", unit="attempts", at_least=1
    )
    request_timeout_s: float = option(
        1200.0,
        flag="--sglang-request-timeout-s",
        help="a server that takes longer for one response counts as hung",
        unit="seconds",
        above=0,
    )
    start_timeout_s: float = option(
        900.0, flag="--sglang-start-timeout-s", help="wait for a server to load its model", unit="seconds", above=0
    )
    max_restarts: int = option(
        8,
        flag="--sglang-max-restarts",
        help="servers started again after their death, in the whole run",
        unit="restarts",
        at_least=0,
    )
    server_args: str | None = option(
        None,
        flag="--sglang-server-args",
        help="further arguments for the servers, as `sglang serve` takes them: `--name value --switch --list 1 2`; a flag "
        "`--sglang-name value` adds one",
        default_text="none",
    )

    @property
    def further_args(self) -> tuple[ServerArgument, ...]:
        """`server_args` one by one. Raises ConfigError for a text that is no list of arguments."""
        return () if self.server_args is None else parse_server_args(self.server_args)


def parse_server_args(text: str) -> tuple[ServerArgument, ...]:
    """(name, values) of each argument in `--name value --switch --list 1 2`; names with underscores.

    Raises ConfigError for a value without a name, or quotes that do not close.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"--sglang-server-args {text!r}: {error}") from error
    found: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--"):
            name, *value = word[2:].split("=", 1)
            found.append((name.replace("-", "_"), value))
        elif found:
            found[-1][1].append(word)
        else:
            raise ConfigError(f"--sglang-server-args {text!r}: {word!r} belongs to no argument, expected `--name value --switch`")
    return tuple((name, tuple(values)) for name, values in found)
