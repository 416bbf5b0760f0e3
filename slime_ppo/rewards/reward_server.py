"""The server of --rm-url, asked at the start, before any device is used: is it there, and does it score what the run will send?"""

import json
import os
import socket
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.error import HTTPError
from urllib.parse import urlsplit

from tokenizers import Tokenizer

from slime_ppo.errors import CheckpointError, ConfigError, RewardError
from slime_ppo.rewards.classifier_folder import ClassifierConfig, lacks_score_bias, read_classifier_config
from slime_ppo.rewards.classify import classify_url, parse_scores
from slime_ppo.rewards.server_words import key_headers, shortened

# a server that has just started answers its first request slowly
_TIMEOUT_S = 60.0
_SERVE = "python scripts/serve_reward_model.py FOLDER"
# SGLang 0.5.23 calls min(context, KV cache) - 6 the limit. Of scoring requests it takes two tokens less than the minimum; one more
# than that would wait for ever where the KV cache is the smaller of the two.
_SAID_LIMIT, _BEYOND_IT = "max_req_input_len", 4


@dataclass(frozen=True)
class RewardServer:
    """A server that can score this run's samples: inputs of up to `max_tokens` tokens, with ids below `vocab_size` (None: not
    known). `warnings` say what could not be checked."""

    max_tokens: int
    vocab_size: int | None
    warnings: tuple[str, ...]


def check_listening(url: str) -> None:
    """Raises ConfigError when nobody accepts connections at the address of `url`."""
    parts = urlsplit(url)
    port = (443 if parts.scheme == "https" else 80) if parts.port is None else parts.port
    try:
        socket.create_connection((parts.hostname, port), timeout=_TIMEOUT_S).close()
    except OSError as error:
        raise ConfigError(
            f"--rm-url {url}: nobody answers at {parts.hostname}:{port} ({error}). Start the reward server before the run, or "
            "correct the address"
        ) from error


def inspect_reward_server(url: str, *, api_key: str | None, sends: Literal["ids", "text"], policy_folder: str) -> RewardServer:
    """Ask an SGLang server what it serves, and for one score.

    Its model and tokenizer folders are read where they can be read here. Raises ConfigError for no answer, a server that
    generates instead of scoring, more than one label, a score with the random bias that `classifier_folder` explains, and with
    `sends` "ids" for another tokenizer than that of `policy_folder`.
    """
    check_listening(url)
    served = _served_model(_asked(url, "/model_info", api_key), url)
    limit = _asked(url, "/server_info", api_key).get(_SAID_LIMIT)
    if not isinstance(limit, int):
        raise ConfigError(f"--rm-url {url}: /server_info tells {_SAID_LIMIT} {limit}, expected a number. Is it SGLang 0.5.23?")
    _check_one_score(url, api_key, sends)
    config, warnings = _checked_folder(served, url)
    if sends == "ids":
        warnings += _checked_tokenizer(served, url, policy_folder)
    limits = [limit + _BEYOND_IT] + ([] if config is None or config.max_positions is None else [config.max_positions])
    return RewardServer(min(limits), None if config is None else config.vocab_size, warnings)


@dataclass(frozen=True)
class _Served:
    """What /model_info says; folders as the server sees them."""

    model: Path
    tokenizer: Path


def _served_model(answer: dict[str, object], url: str) -> _Served:
    if answer.get("is_generation") is not False:
        raise ConfigError(
            f"--rm-url {url}: the server generates text (is_generation {answer.get('is_generation')}), expected one that was "
            f"started with --is-embedding. Start it with: {_SERVE}"
        )
    return _Served(Path(str(answer.get("model_path"))), Path(str(answer.get("tokenizer_path"))))


def _check_one_score(url: str, api_key: str | None, sends: Literal["ids", "text"]) -> None:
    """Token 0 is in every vocabulary."""
    body = {"input_ids": [[0, 0]]} if sends == "ids" else {"text": ["a"]}
    answer = _json(classify_url(url), api_key, json.dumps(body).encode())
    try:
        parse_scores(answer, [2 if sends == "ids" else None], classify_url(url))
    except RewardError as error:
        raise ConfigError(f"--rm-url {url} cannot be used for --rm-type reward_model: {error}") from error


def _checked_folder(served: _Served, url: str) -> tuple[ClassifierConfig | None, tuple[str, ...]]:
    """The model's config where it can be read, and what could not be checked."""
    if not _readable(served.model / "config.json"):
        return None, (
            f"--rm-url {url}: its model folder {served.model} cannot be read from here, so it is not known whether its score has "
            f"the random bias that SGLang gives to Qwen2 and Qwen3 classifiers without one. Serve it with: {_SERVE}",
        )
    try:
        config, lacks_bias = read_classifier_config(served.model), lacks_score_bias(served.model)
    except CheckpointError as error:
        raise ConfigError(f"--rm-url {url} serves {served.model}, which cannot be used: {error}") from error
    if lacks_bias:
        raise ConfigError(
            f"--rm-url {url} serves {served.model} with a random bias: its folder holds no score.bias, which SGLang builds for "
            f"{config.architecture} and leaves at its random start, so every reward is off by an unknown number. Serve it with: "
            f"python scripts/serve_reward_model.py {served.model}"
        )
    return config, ()


def _checked_tokenizer(served: _Served, url: str, policy_folder: str) -> tuple[str, ...]:
    """Raises ConfigError when an id means another token to the reward model than to the policy."""
    theirs = served.tokenizer / "tokenizer.json"
    if not _readable(theirs):
        return (
            f"--rm-url {url}: its tokenizer {theirs} cannot be read from here, so it is not known whether its token ids mean what "
            "the policy's do, and one that it does not have would end the server. If they differ, use --rm-input text",
        )
    ours_by_id, theirs_by_id = _tokens(Path(policy_folder) / "tokenizer.json"), _tokens(theirs)
    differing = sorted(token for token, text in ours_by_id.items() if theirs_by_id.get(token) != text)
    if differing:
        first = differing[0]
        raise ConfigError(
            f"--rm-url {url}: the tokenizer of {served.tokenizer} is not the policy's: {len(differing)} of {len(ours_by_id)} "
            f"tokens differ, token {first} is {theirs_by_id.get(first)!r} there and {ours_by_id[first]!r} in {policy_folder}. Use "
            "--rm-input text"
        )
    return ()


def _readable(file: Path) -> bool:
    """A relative path counts from where the server was started, and may name something else here."""
    return file.is_absolute() and os.access(file, os.R_OK)


def _tokens(file: Path) -> dict[int, str]:
    try:
        return {number: text for text, number in Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True).items()}
    except Exception as error:  # tokenizers raises nothing more specific
        raise ConfigError(f"{file} is no tokenizer that can be read ({error})") from error


def _asked(url: str, path: str, api_key: str | None) -> dict[str, object]:
    answer = _json(url.rstrip("/") + path, api_key, None)
    if not isinstance(answer, dict):
        raise ConfigError(f"--rm-url {url}: {path} answered {shortened(str(answer))}, expected an SGLang server")
    return answer


def _json(url: str, api_key: str | None, body: bytes | None) -> object:
    """GET, or with a body POST. Proxies of the environment are not asked, redirects not followed."""
    request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"} | key_headers(api_key))
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect()).open(
            request, timeout=_TIMEOUT_S
        ) as answer:
            return json.loads(answer.read())
    except HTTPError as error:
        hint = ". The key is wrong or missing (--rm-api-key-file)" if error.code in (401, 403) else ""
        raise ConfigError(
            f"--rm-url: {url} answered status {error.code}: {shortened(error.read().decode(errors='replace'))}{hint}"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"--rm-url: {url} cannot be read as JSON ({error}). Expected an SGLang server: {_SERVE}") from error


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect is an answer with its status: the key must not travel to another server."""

    def redirect_request(self, *_: object) -> None:
        return None
