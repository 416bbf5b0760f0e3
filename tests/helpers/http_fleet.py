"""Servers reached by plain HTTP, for tests of what is posted to them."""

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from slime_ppo.errors import RolloutError
from slime_ppo.rollout.sglang.server import ServerAddress


class HttpFleet:
    """`Fleet` of servers whose addresses a test may exchange."""

    def __init__(self, addresses: Sequence[ServerAddress]) -> None:
        self.current = list(addresses)

    def addresses(self) -> Sequence[ServerAddress]:
        return self.current

    def post(
        self,
        path: str,
        bodies: Sequence[Mapping[str, object]],
        *,
        timeout_s: float,
        on_refusal: tuple[str, Mapping[str, object]] | None = None,
    ) -> list[Any]:
        def ask(url: str, content: bytes) -> Any:
            try:
                return _ask(url + path, content, timeout_s)
            except RolloutError:
                if on_refusal is not None:
                    _ask(url + on_refusal[0], json.dumps(on_refusal[1]).encode(), timeout_s)
                raise

        return self._all(ask, [json.dumps(body).encode() for body in bodies])

    def get(self, path: str, *, timeout_s: float) -> list[Any]:
        return self._all(lambda url, _: _ask(url + path, None, timeout_s), [b""] * len(self.current))

    def _all(self, ask: Callable[[str, bytes], Any], contents: Sequence[bytes]) -> list[Any]:
        urls = [address.url for address in self.current]
        with ThreadPoolExecutor(len(urls)) as pool:
            return list(pool.map(ask, urls, contents))


def _ask(url: str, content: bytes | None, timeout_s: float) -> Any:
    request = urllib.request.Request(url, content, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as error:
        raise RolloutError(f"{url} answered {error.code}: {error.read().decode()}") from error
    except OSError as error:
        raise RolloutError(f"{url}: {type(error).__name__}: {error}") from error
