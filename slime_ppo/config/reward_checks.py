"""What scores a response: options that contradict each other, and the form of a server's address."""

from urllib.parse import urlsplit

from slime_ppo.config.checked import Checked
from slime_ppo.errors import ConfigError

_EXAMPLE = "http://127.0.0.1:30000"


def check_reward(checked: Checked) -> None:
    """Refuse a run without a reward, answers without labels to compare with, and a server's reward whose address or time limit
    cannot be. Raises ConfigError."""
    reward = checked.config.reward
    if reward.rm_type is None and reward.custom_rm_path is None:
        raise ConfigError(
            f"no reward: {checked.cite('reward.rm_type')} and no --custom-rm-path. Name a built-in reward, or give your own as "
            "--custom-rm-path package.module.function"
        )
    if reward.rm_type == "math" and reward.custom_rm_path is None and checked.config.data.label_key is None:
        raise ConfigError(
            f"{checked.cite('reward.rm_type')} compares answers with labels, but {checked.cite('data.label_key')}. Name the key of "
            "the right answer: answer in GSM8K's files"
        )
    if reward.served_by is None:
        return
    if reward.rm_url is None:
        raise ConfigError(
            f"{checked.cite('reward.rm_type')} needs the address of a server. Add --rm-url, as in {_example(reward.served_by)}"
        )
    _check_url(checked, reward.rm_url, reward.served_by)
    if reward.rm_timeout_s is not None and reward.rm_timeout_s > reward.requests_s:
        raise ConfigError(
            f"{checked.cite('reward.rm_timeout_s')} is longer than the {reward.requests_s:g} s that requests have in a reward call "
            f"of {checked.cite('reward.reward_timeout_s')}: it would be killed before. Use --rm-timeout-s {reward.requests_s:g} or "
            f"less, or --reward-timeout-s {reward.rm_timeout_s / (reward.requests_s / reward.reward_timeout_s):g} or more"
        )


def _example(served_by: str) -> str:
    return f"{_EXAMPLE}/score" if served_by == "remote" else _EXAMPLE


def _check_url(checked: Checked, url: str, served_by: str) -> None:
    problem = _url_problem(url)
    if not problem and served_by == "reward_model" and (urlsplit(url).path.strip("/") or urlsplit(url).query):
        problem = "goes on behind the address, expected the address of an SGLang server alone"
    if problem:
        raise ConfigError(f"{checked.cite('reward.rm_url')} {problem}, as in {_example(served_by)}")


def _url_problem(url: str) -> str:
    """What is wrong with the form of `url`, "" when nothing is."""
    if url != url.strip() or any(char.isspace() for char in url):
        return "holds a space, expected http://host:port"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        return f"cannot be read ({error}), expected http://host:port"
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        return "is no HTTP address, expected http://host:port"
    if parts.username is not None or parts.password is not None:
        return (
            "holds a user name or password, which would be written to logs and configs; expected the address alone, and the key "
            "in a file (--rm-api-key-file)"
        )
    return "holds a #, expected an address without" if parts.fragment else ""
