"""All servers of one engine: started together, called together, and each known to live or to be lost.

The engine's own event loop runs in a thread here; every method that is no coroutine may be called from other threads.
"""

import asyncio
import logging
import resource
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Thread
from typing import Any, TypeVar

from slime_ppo.errors import RolloutError
from slime_ppo.rollout.engine import EnginePart
from slime_ppo.rollout.sglang.client import ServerAnswerError, ServerClient, ServerGone, ServerTimeout
from slime_ppo.rollout.sglang.server import Server, ServerAddress

_log = logging.getLogger(__name__)
_Answer = TypeVar("_Answer")

_NO_PART = EnginePart(0)
_PROBLEM_POLL_S = 0.25
_PROBLEM_WAIT_S = 2.0
_SETTLE_TIMEOUT_S = 60.0
_KEPT_CALLS = 1000
_OPEN_FILES = 65536


@dataclass
class Member:
    """One server. `lost`: why it takes no traffic, None while it does; `released`: the parts it holds no memory of;
    `running`: its requests under way."""

    server: Server
    address: ServerAddress
    client: ServerClient
    lost: str | None = None
    released: EnginePart = _NO_PART
    num_restarts: int = 0
    running: set["asyncio.Task[Any]"] = field(default_factory=set)
    examination: "asyncio.Task[None] | None" = None


_Calls = Sequence[tuple[Member, Coroutine[Any, Any, dict[str, Any]]]]


class ServerFleet:
    """The servers in a fixed order. `calls` are the last control calls that were posted, for tests and for a timeline."""

    def __init__(self, servers: Sequence[Server], api_key: str | None) -> None:
        """Start all of them, at the same time. Raises RolloutError, with none left running, when one can't."""
        if not servers:
            raise RolloutError("an SGLang engine was made without servers; expected at least one")
        self._api_key = api_key
        _allow_connections()
        self.calls: deque[str] = deque(maxlen=_KEPT_CALLS)
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="sglang-client", daemon=True)
        self._thread.start()
        try:
            addresses = _at_once([server.start for server in servers])
            self.members = [
                Member(server, address, self.client(address.url)) for server, address in zip(servers, addresses, strict=True)
            ]
            self._settle(self.members)
        except BaseException:
            _at_once([server.stop for server in servers])
            self._loop.call_soon_threadsafe(self._loop.stop)
            raise

    def client(self, url: str) -> ServerClient:
        return ServerClient(url, self._api_key)

    def run(self, work: Coroutine[Any, Any, _Answer]) -> _Answer:
        """What a coroutine returns that runs in the event loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def alive(self) -> list[Member]:
        return [member for member in self.members if member.lost is None]

    def losses(self) -> str:
        """Why servers are lost, one line each."""
        return "; ".join(f"{member.address.url}: {member.lost}" for member in self.members if member.lost is not None)

    def notice_losses(self) -> None:
        """Ask every server whether it lives."""
        self.run(self.watch_once())

    async def watch_once(self) -> None:
        for member in self.alive():
            problem = await asyncio.to_thread(member.server.problem)
            if problem is not None:
                self._lose(member, problem)

    async def lose_strangers(self, versions: Collection[int], timeout_s: float) -> bool:
        """Lose the servers whose weights nobody here has pushed (`versions` were): somebody else has started them anew meanwhile,
        or pushes to them. False when there is none."""
        known = {str(version) for version in versions}
        alive = self.alive()
        for member in alive:
            try:
                found = (await member.client.get("/model_info", timeout_s))["weight_version"]
            except (ServerGone, ServerTimeout) as error:
                await self.examine(member, error)
                continue
            if found not in known:
                self._lose(
                    member,
                    f"its weights are of version {found!r}, which were never pushed to it: it was started anew, or another program "
                    "pushes to it",
                )
        return len(self.alive()) < len(alive)

    def restart_lost(self, max_restarts: int) -> list[Member]:
        """Start lost servers anew, at the same time, or wait until those of others are back, and return them. Raises
        RolloutError."""
        self.notice_losses()
        lost = [member for member in self.members if member.lost is not None]
        for member in lost:
            if member.num_restarts >= max_restarts:
                raise RolloutError(
                    f"{member.address.url} is lost and was started anew {member.num_restarts} times already "
                    f"(--sglang-max-restarts): {member.lost}"
                )
            member.num_restarts += 1
        addresses = _at_once([member.server.start for member in lost])
        for member, address in zip(lost, addresses, strict=True):
            _log.warning("%s serves again, as %s, after: %s", member.address.url, address.url, member.lost)
            self.run(member.client.close())
            member.address, member.client = address, self.client(address.url)
            member.released, member.lost = _NO_PART, None
        self._settle(lost)
        return lost

    def addresses(self) -> Sequence[ServerAddress]:
        return [member.address for member in self.members]

    def post(
        self,
        path: str,
        bodies: Sequence[Mapping[str, object]],
        *,
        timeout_s: float,
        on_refusal: tuple[str, Mapping[str, object]] | None = None,
    ) -> list[Any]:
        """One body to each server, to all at the same time; their answers. Raises RolloutError when all have answered. One that
        refuses is posted `on_refusal` at once."""
        self._note(path, bodies[0])

        async def ask(client: ServerClient, body: Mapping[str, object]) -> dict[str, Any]:
            try:
                return await client.post(path, body, timeout_s)
            except ServerAnswerError:
                if on_refusal is not None:
                    with suppress(RolloutError):
                        await client.post(*on_refusal, timeout_s)
                raise

        calls = zip(self.members, bodies, strict=True)
        return self._answers([(member, ask(member.client, body)) for member, body in calls])

    def get(self, path: str, *, timeout_s: float) -> list[Any]:
        """The answers of all servers. Raises RolloutError when all have answered."""
        return self._answers([(member, member.client.get(path, timeout_s)) for member in self.members])

    def post_to(
        self, members: Sequence[Member], path: str, body: Mapping[str, object], *, timeout_s: float, may_die: bool = False
    ) -> list[Any]:
        """The same body to some servers. Raises RolloutError when all have answered; a server that `may_die` answers None then."""
        if members:
            self._note(path, body)
        calls = [(member, member.client.post(path, body, timeout_s)) for member in members]
        return self._answers(calls, may_die=may_die)

    def num_running(self, member: Member, *, timeout_s: float) -> int:
        """Requests that the server still knows; none when it turns out to have died."""
        [answer] = self._answers([(member, member.client.get("/v1/loads", timeout_s))], may_die=True)
        return 0 if answer is None else sum(load["num_running_reqs"] for load in answer["loads"])

    async def examine(self, member: Member, failure: RolloutError) -> None:
        """Find out whether a server is lost whose connection failed; one that hangs is lost, and stopped if it is ours."""
        if member.lost is not None:
            return
        if member.examination is None:
            member.examination = asyncio.create_task(self._examine(member, failure))
        examination = member.examination
        try:
            await asyncio.shield(examination)
        finally:
            if examination.done():
                member.examination = None

    def close(self) -> None:
        """Stop the servers that are ours, and the event loop."""
        _at_once([member.server.stop for member in self.members])
        for member in self.members:
            self.run(member.client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _settle(self, started: Sequence[Member]) -> None:
        """Let new servers leave what they have loaded out of garbage collection: every flush of the prefix cache collects, for
        half a second on a CPU."""
        self.post_to(started, "/freeze_gc", {}, timeout_s=_SETTLE_TIMEOUT_S)

    def _answers(self, calls: _Calls, *, may_die: bool = False) -> list[Any]:
        return self.run(self._gather(calls, may_die=may_die))

    async def _gather(self, calls: _Calls, *, may_die: bool) -> list[Any]:
        answers = await asyncio.gather(*(call for _, call in calls), return_exceptions=True)
        failed: list[str] = []
        for (member, _), answer in zip(calls, answers, strict=True):
            if isinstance(answer, ServerGone | ServerTimeout):
                await self.examine(member, answer)
            if isinstance(answer, RolloutError) and may_die and member.lost is not None:
                continue
            if isinstance(answer, RolloutError):
                failed.append(f"{answer}" if member.lost is None else f"{answer}: {member.lost}")
            elif isinstance(answer, BaseException):
                raise answer
        if failed:
            raise RolloutError(f"{len(failed)} of {len(calls)} SGLang servers failed: " + "; ".join(failed))
        return [None if isinstance(answer, BaseException) else answer for answer in answers]

    async def _examine(self, member: Member, failure: RolloutError) -> None:
        if isinstance(failure, ServerTimeout):
            # Lost first: who looks while it is being stopped would take that for the cause.
            self._lose(member, f"it hangs: {failure}")
            await asyncio.to_thread(member.server.stop)
            return
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _PROBLEM_WAIT_S
        while member.lost is None and loop.time() < deadline:
            problem = await asyncio.to_thread(member.server.problem)
            if problem is not None:
                self._lose(member, problem)
                return
            await asyncio.sleep(_PROBLEM_POLL_S)

    def _lose(self, member: Member, why: str) -> None:
        """Called in the event loop; the server's requests move on."""
        if member.lost is None:
            _log.error("lost the SGLang server at %s with %d requests: %s", member.address.url, len(member.running), why)
            member.lost = why
            for task in list(member.running):
                task.cancel()

    def _note(self, path: str, body: Mapping[str, object]) -> None:
        tags = body.get("tags")
        detail = " ".join(tags) if isinstance(tags, list) else body.get("mode", "")
        self.calls.append(f"{path} {detail}".strip())


def _allow_connections() -> None:
    """Every request under way is an open file; a shell's usual limit of 1024 is less than a large rollout."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _at_once(calls: Sequence[Callable[[], _Answer]]) -> list[_Answer]:
    """The results of calls that block, made at the same time; raises the first error when all have ended.

    An interrupt of the caller is not held up until then: whoever catches it ends what still runs.
    """
    if not calls:
        return []
    pool = ThreadPoolExecutor(len(calls))
    try:
        running = [pool.submit(call) for call in calls]
        wait(running)
    finally:
        pool.shutdown(wait=False)
    return [one.result() for one in running]
