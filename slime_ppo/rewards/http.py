"""JSON requests of reward functions that ask a server: a time limit for each, and repetitions while there is time."""

import asyncio
import json
import time
from dataclasses import dataclass
from http import HTTPStatus

import aiohttp

from slime_ppo.rewards.server_words import key_headers, shortened

_FIRST_PAUSE_S = 0.25
# the server asks to come again: busy, or none of the request's fault
_TRY_AGAIN = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)


class NoAnswer(Exception):
    """A request that got no usable answer. `status` is that of the server's answer, None when there was none."""

    def __init__(self, reason: str, status: int | None = None) -> None:
        super().__init__(reason)
        self.status = status

    @property
    def may_pass(self) -> bool:
        """True when the same request may succeed later."""
        return self.status is None or self.status >= HTTPStatus.INTERNAL_SERVER_ERROR or self.status in _TRY_AGAIN


@dataclass(frozen=True)
class RequestLimits:
    """`timeout_s` and `max_attempts` are for each request; `requests_s` is for all of one reward call."""

    timeout_s: float
    max_attempts: int
    requests_s: float


class JsonClient:
    """Posts JSON during one reward call, on the event loop of that call: `async with` it."""

    def __init__(self, api_key: str | None, limits: RequestLimits, *, concurrency: int) -> None:
        self._headers, self._limits, self._concurrency = key_headers(api_key), limits, concurrency

    async def __aenter__(self) -> "JsonClient":
        self._deadline = time.monotonic() + self._limits.requests_s
        self._turns = asyncio.Semaphore(self._concurrency)
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            connector=aiohttp.TCPConnector(limit=self._concurrency),
            timeout=aiohttp.ClientTimeout(total=None),  # ours, for each request
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def post(self, url: str, body: object) -> object:
        """The server's JSON. Failed connections, time limits and status 408, 429 and 5xx are tried again, after pauses that double.

        Raises NoAnswer with the last cause and the number of tries.
        """
        async with self._turns:
            return await self._post(url, body)

    async def _post(self, url: str, body: object) -> object:
        failed = NoAnswer(f"POST {url} was not sent: the requests before it took the time of the call (--reward-timeout-s)")
        for attempt in range(1, self._limits.max_attempts + 1):
            if attempt > 1:
                await asyncio.sleep(min(_FIRST_PAUSE_S * 2 ** (attempt - 2), self._left_s))
            if self._left_s == 0:
                break
            try:
                return await self._once(url, body, min(self._limits.timeout_s, self._left_s))
            except NoAnswer as error:
                failed = NoAnswer(f"POST {url} {error} (attempt {attempt} of at most {self._limits.max_attempts})", error.status)
                if not error.may_pass:
                    break
        raise failed

    @property
    def _left_s(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    async def _once(self, url: str, body: object, timeout_s: float) -> object:
        try:
            # a redirect would turn the POST into a GET, or carry texts to a server that nobody named
            async with (
                asyncio.timeout(timeout_s),
                self._session.post(url, json=body, allow_redirects=False) as response,
            ):
                status, text = response.status, await response.text(errors="replace")
        except TimeoutError:
            raise NoAnswer(f"got no answer within {timeout_s:.3g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise NoAnswer(f"failed, {type(error).__name__}: {error}") from error
        if not HTTPStatus.OK <= status < HTTPStatus.MULTIPLE_CHOICES:
            raise NoAnswer(f"got status {status}: {shortened(text)}", status)
        try:
            return json.loads(text)
        except ValueError as error:
            raise NoAnswer(f"got {shortened(text)!r}, expected JSON ({error})", status) from error
