"""What the driver and the reward workers share in talking to a server: the key, and what of an answer is shown."""

_SHOWN_CHARACTERS = 300


def key_headers(api_key: str | None) -> dict[str, str]:
    """The header that carries the key, as SGLang and most services expect it."""
    return {} if api_key is None else {"Authorization": f"Bearer {api_key}"}


def shortened(text: str) -> str:
    """`text` in one line of bounded length, for messages."""
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN_CHARACTERS else line[:_SHOWN_CHARACTERS] + "..."
