"""API keys, which are given in files: a command line and a resolved config are for everybody to read."""

from pathlib import Path

from slime_ppo.errors import ConfigError


def read_api_key(path: str | None, *, flag: str) -> str | None:
    """The key in the file that `flag` names, without white space around it; None without a file.

    Raises ConfigError when the file cannot be read, or holds no single key that can be a header.
    """
    if path is None:
        return None
    try:
        key = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag} {path} cannot be read ({error}). Name a text file that holds the key alone") from error
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        found = "nothing" if not key else "several" if len(key.split()) > 1 else "other characters"
        raise ConfigError(
            f"{flag} {path} holds no key: expected one in ASCII without spaces, found {found}. Name a text file that holds the "
            "key alone"
        )
    return key
