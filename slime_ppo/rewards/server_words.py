"""What the driver and the reward workers share in talking to a server: the key, and what of an answer goes into a message."""

from pathlib import Path

from slime_ppo.errors import ConfigError

_SHOWN_CHARACTERS = 300


def read_api_key(path: str) -> str:
    """The key in a file, without white space around it. Raises ConfigError when there is none, or when it cannot be a header."""
    try:
        key = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--rm-api-key-file {path} cannot be read ({error}). Name a text file that holds the key alone"
        ) from error
    if not key or not key.isascii() or not key.isprintable():
        raise ConfigError(f"--rm-api-key-file {path} holds no key in one line of ASCII. Name a text file that holds the key alone")
    return key


def key_headers(api_key: str | None) -> dict[str, str]:
    """The header that carries the key, as SGLang and most services expect it."""
    return {} if api_key is None else {"Authorization": f"Bearer {api_key}"}


def shortened(text: str) -> str:
    """`text` in one line of bounded length, for messages."""
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN_CHARACTERS else line[:_SHOWN_CHARACTERS] + "..."
