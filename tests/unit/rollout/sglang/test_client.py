"""Calls and their errors, against a small server of our own."""

import asyncio
import pickle
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from slime_ppo.errors import RolloutError
from slime_ppo.rollout.sglang.client import ServerAnswerError, ServerClient, ServerGone, ServerTimeout

TOGETHER = 150


def _run(use: Callable[[ServerClient], Awaitable[Any]], key: str | None = None) -> Any:
    """The result of `use` on a client of a fresh server."""

    async def echo(request: web.Request) -> web.Response:
        return web.json_response({"body": await request.json(), "key": request.headers.get("Authorization")})

    async def refuse(_: web.Request) -> web.Response:
        return web.json_response({"success": False, "message": "no group"})

    async def status(_: web.Request) -> web.Response:
        return web.Response(status=400, text="Flush cache failed.")

    async def text(_: web.Request) -> web.Response:
        return web.Response(text="Cache flushed.")

    async def listed(_: web.Request) -> web.Response:
        return web.json_response([1, 2])

    async def cut(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async def late(_: web.Request) -> web.Response:
        await asyncio.sleep(0.3)
        return web.json_response({})

    arrived: list[web.Request] = []
    all_there = asyncio.Event()

    async def together(request: web.Request) -> web.Response:
        arrived.append(request)
        if len(arrived) == TOGETHER:
            all_there.set()
        await all_there.wait()
        return web.json_response({})

    async def main() -> Any:
        app = web.Application()
        for handler in (echo, refuse, status, text, listed, cut, late, together):
            app.router.add_route("*", f"/{handler.__name__}", handler)
        app.router.add_post("/generate", echo)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        client = ServerClient(f"http://127.0.0.1:{runner.addresses[0][1]}/", key)
        try:
            return await use(client)
        finally:
            await client.close()
            await runner.cleanup()

    return asyncio.run(main())


def test_post_sends_body_and_key_and_returns_the_object() -> None:
    assert _run(lambda client: client.generate({"a": 1}, 5), key="k") == {"body": {"a": 1}, "key": "Bearer k"}
    assert _run(lambda client: client.post("/echo", {"a": 1}, 5)) == {"body": {"a": 1}, "key": None}


def test_post_plain_text_answer_is_an_empty_object() -> None:
    assert _run(lambda client: client.post("/text", {}, 5)) == {}


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [("/status", 400, "Flush cache failed."), ("/refuse", 200, "no group"), ("/listed", 200, "expected a JSON object")],
)
def test_post_refused_names_url_path_status_and_text(path: str, status: int, text: str) -> None:
    with pytest.raises(ServerAnswerError) as caught:
        _run(lambda client: client.post(path, {}, 5))
    error = caught.value
    assert (error.path, error.status) == (path, status) and text in error.text
    assert error.url in str(error) and path in str(error) and str(status) in str(error) and text in str(error)


def test_connection_that_breaks_or_cannot_be_made_is_a_server_gone() -> None:
    with pytest.raises(ServerGone, match=r"http://127.0.0.1:\d+/cut: no answer, the connection failed: ServerDisconnectedError"):
        _run(lambda client: client.post("/cut", {}, 5))

    async def call() -> None:
        client = ServerClient("http://127.0.0.1:9")
        try:
            await client.get("/model_info", 5)
        finally:
            await client.close()

    with pytest.raises(ServerGone, match=r"http://127.0.0.1:9/model_info"):
        asyncio.run(call())


def test_late_answer_is_a_timeout_and_the_client_lives_on() -> None:
    async def use(client: ServerClient) -> Any:
        with pytest.raises(ServerTimeout, match="/late: no answer within 0.05 s"):
            await client.get("/late", 0.05)
        return await client.get("/late", 5)

    assert _run(use) == {}


def test_many_calls_are_under_way_at_the_same_time() -> None:
    """The server answers none of 150 calls before it has all: aiohttp's own limit of 100 connections would hold them up."""
    answers = _run(lambda client: asyncio.gather(*(client.get("/together", 20) for _ in range(TOGETHER))))
    assert answers == [{}] * TOGETHER


@pytest.mark.parametrize(
    "error", [ServerAnswerError("u", "/p", 400, "t"), ServerGone("u", "/p", "c"), ServerTimeout("u", "/p", 2.0)]
)
def test_errors_are_rollout_errors_and_travel_between_processes(error: RolloutError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(error, RolloutError) and (type(again), str(again)) == (type(error), str(error))
