"""HTTP client of one SGLang server, for one event loop. Every failure names the server, the call and what came back."""

import json
from collections.abc import Mapping
from typing import Any

import aiohttp

from slime_ppo.errors import RolloutError

# uvicorn closes a connection that was idle for 5 s (SGLANG_TIMEOUT_KEEP_ALIVE); a request sent at that moment would look like
# a server that died, so ours are closed before
_KEEP_ALIVE_S = 2.0
_SHOWN_CHARS = 400


class ServerAnswerError(RolloutError):
    """A server refused a call: any status but 200, or `success: false`. It lives on."""

    def __init__(self, url: str, path: str, status: int, text: str) -> None:
        super().__init__(f"{url}{path} answered {status}: {text[:_SHOWN_CHARS]}")
        self.url, self.path, self.status, self.text = url, path, status, text

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.url, self.path, self.status, self.text)


class ServerGone(RolloutError):
    """The connection could not be made, or broke before the whole answer was there: mostly a server that has died."""

    def __init__(self, url: str, path: str, cause: str) -> None:
        super().__init__(f"{url}{path}: no answer, the connection failed: {cause}")
        self.url, self.path, self.cause = url, path, cause

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.url, self.path, self.cause)


class ServerTimeout(RolloutError):
    """A server is connected and has not answered in time: it hangs, or `timeout_s` is too short for the call."""

    def __init__(self, url: str, path: str, timeout_s: float) -> None:
        super().__init__(f"{url}{path}: no answer within {timeout_s:g} s")
        self.url, self.path, self.timeout_s = url, path, timeout_s

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.url, self.path, self.timeout_s)


class ServerClient:
    """Calls of one server. Opens as many connections as there are calls under way; made and used in one event loop."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._session: aiohttp.ClientSession | None = None

    async def post(self, path: str, body: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """The answer of a control call; {} where the server answers with plain text, as /flush_cache does.

        Raises ServerAnswerError, ServerGone, ServerTimeout.
        """
        return self._object(path, await self.ask("POST", path, body, timeout_s))

    async def get(self, path: str, timeout_s: float) -> dict[str, Any]:
        """As `post`, for calls that change nothing."""
        return self._object(path, await self.ask("GET", path, None, timeout_s))

    async def generate(self, body: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """The answer of /generate to one prompt. Raises as `post` does."""
        return await self.post("/generate", body, timeout_s)

    async def ask(self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> Any:
        """The parsed answer of any call, None where it is not JSON. Raises as `post` does."""
        try:
            async with self._opened().request(
                method, self.url + path, json=body, timeout=aiohttp.ClientTimeout(total=timeout_s)
            ) as answer:
                status, content = answer.status, await answer.read()
        except TimeoutError as error:
            raise ServerTimeout(self.url, path, timeout_s) from error
        except aiohttp.ClientError as error:
            raise ServerGone(self.url, path, f"{type(error).__name__}: {error}") from error
        if status != 200:
            raise ServerAnswerError(self.url, path, status, content.decode(errors="replace"))
        return _parsed(content)

    async def close(self) -> None:
        """Close the connections; the next call opens new ones."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S)
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers, trust_env=False)
        return self._session

    def _object(self, path: str, answer: Any) -> dict[str, Any]:
        if answer is None:
            return {}
        if not isinstance(answer, dict):
            raise ServerAnswerError(self.url, path, 200, f"expected a JSON object, found {json.dumps(answer)}")
        if answer.get("success") is False:
            raise ServerAnswerError(self.url, path, 200, json.dumps(answer))
        return answer


def _parsed(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return None
