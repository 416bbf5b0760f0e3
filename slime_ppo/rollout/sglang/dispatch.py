"""Requests spread over the servers: one per sample, concurrent, tried again a bounded number of times, ended by an abort. With
seeds all of a server first go there as one."""

import asyncio
import logging
from collections.abc import Collection, Coroutine, Sequence
from dataclasses import dataclass
from threading import Event
from typing import Any, TypeVar
from uuid import uuid4

from slime_ppo.errors import RolloutError
from slime_ppo.rollout.sglang.answers import aborted_result, read_answer, request_body
from slime_ppo.rollout.sglang.client import ServerAnswerError, ServerGone, ServerTimeout
from slime_ppo.rollout.sglang.fleet import Member, ServerFleet
from slime_ppo.types.sample import GenerateRequest, GenerateResult

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")

_TICK_S = 0.05
_WATCH_S = 0.5
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
"""Before a request that a server could not answer is sent again; each pause is twice the one before."""
_ABORT_TIMEOUT_S = 10.0
"""What is unfinished so long after an abort comes back without its tokens: its server is paused and holds it back."""


@dataclass(frozen=True)
class DispatchSettings:
    """`max_concurrency` None: all requests at the same time. `request_timeout_s`: a server that needs longer for one hangs."""

    vocab_size: int
    deterministic: bool
    max_concurrency: int | None
    max_attempts: int
    request_timeout_s: float


class _GivenUp(Exception):
    """A request that an abort has not brought back in time."""


class Dispatch:
    """One `generate`. `targets` are chosen by the fewest requests under way; `versions` may grow while it runs."""

    def __init__(
        self, fleet: ServerFleet, targets: Sequence[Member], settings: DispatchSettings, *, versions: Collection[int], abort: Event
    ) -> None:
        self._fleet = fleet
        self._targets = targets
        self._settings = settings
        self._versions = versions
        self._abort = abort
        self._name = uuid4().hex[:12]
        self._given_up = False

    async def run(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        """One result per request, in order. Raises RolloutError for a request that a living server refuses or can't answer."""
        watch = asyncio.create_task(self._watch())
        to_servers = all(target in self._fleet.members for target in self._targets)  # what a router does with it is not known
        in_one_message = self._settings.deterministic and self._settings.max_concurrency is None and to_servers
        try:
            found = await self._together(requests) if in_one_message else {}
            left = [place for place in range(len(requests)) if place not in found]
            limit = asyncio.Semaphore(self._settings.max_concurrency or len(requests))
            found |= zip(left, await _at_once([self._limited(requests[place], limit) for place in left]), strict=True)
            return [found[place] for place in range(len(requests))]
        except BaseException:
            await self._abort_all()
            raise
        finally:
            watch.cancel()

    async def _together(self, requests: Sequence[GenerateRequest]) -> dict[int, GenerateResult]:
        """The results by place, asked in one message per server: its batches, and with them the last bit of every log-prob, do not
        depend on when each request arrived. What could not be asked so, or got no answer, is left out."""
        alive = [target for target in self._targets if target.lost is None]
        shares = [range(first, len(requests), len(alive)) for first in range(min(len(alive), len(requests)))]
        asked = [
            self._ask_share(target, [requests[place] for place in share]) for target, share in zip(alive, shares, strict=False)
        ]
        found: dict[int, GenerateResult] = {}
        for share, results in zip(shares, await _at_once(asked), strict=True):
            found |= zip(share, results, strict=False)
        return found

    async def _ask_share(self, target: Member, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        """The results of requests that go to one server as one, none when they differ in what they ask for or it failed."""
        bodies = [self._body(request, 0) for request in requests]
        per_sample = ("rid", "input_ids", "sampling_params")
        rest = [{name: value for name, value in body.items() if name not in per_sample} for body in bodies]
        if any(one != rest[0] for one in rest):
            return []
        body = {name: [one[name] for one in bodies] for name in per_sample} | rest[0]
        call = target.client.ask("POST", "/generate", body, self._settings.request_timeout_s)
        try:
            answers = await self._running(target, asyncio.create_task(call))
        except (ServerGone, ServerTimeout) as error:
            await self._fleet.examine(target, error)
            _log.warning("%d samples on %s: %s; asking each again", len(requests), target.address.url, error)
            return []
        except (ServerAnswerError, _GivenUp) as error:
            _log.warning("%d samples on %s: %s; asking each by itself", len(requests), target.address.url, error)
            return []
        if not isinstance(answers, list) or len(answers) != len(requests):
            raise RolloutError(
                f"{target.address.url} was asked for {len(requests)} samples in one message and answered {str(answers)[:200]}"
            )
        return [read_answer(*pair, versions=self._versions) for pair in zip(requests, answers, strict=True)]

    async def _limited(self, request: GenerateRequest, limit: asyncio.Semaphore) -> GenerateResult:
        async with limit:
            try:
                return await self._answered(request)
            except _GivenUp:
                return aborted_result(request, max(self._versions))

    async def _answered(self, request: GenerateRequest) -> GenerateResult:
        failure: RolloutError | None = None
        most = self._settings.max_attempts
        for attempt in range(1, most + 1):
            if self._abort.is_set() or not self._fleet.alive():
                return aborted_result(request, max(self._versions))
            target = self._chosen()
            if target is None:
                raise RolloutError(f"sample {request.sample_id}: the router before the servers is lost: {self._targets[0].lost}")
            try:
                answer = await self._ask(target, request, attempt)
                return read_answer(request, answer, versions=self._versions)
            except (ServerAnswerError, ServerGone, ServerTimeout) as error:
                failure = error
            if isinstance(failure, ServerAnswerError):
                if 400 <= failure.status < 500:
                    raise RolloutError(f"sample {request.sample_id}: {failure}") from failure
            else:
                await self._fleet.examine(target, failure)
            _log.warning(
                "sample %d on %s: attempt %d of %d failed: %s", request.sample_id, target.address.url, attempt, most, failure
            )
            if isinstance(failure, ServerAnswerError) and attempt < most:
                await asyncio.sleep(min(_FIRST_PAUSE_S * 2 ** (attempt - 1), _LONGEST_PAUSE_S))
        if not self._fleet.alive():
            return aborted_result(request, max(self._versions))
        # others have its version, so that nobody would ask it again
        raise RolloutError(f"sample {request.sample_id}: attempt {most} of {most} failed: {failure}") from failure

    def _chosen(self) -> Member | None:
        alive = [target for target in self._targets if target.lost is None]
        return min(alive, key=lambda target: len(target.running), default=None)

    async def _ask(self, target: Member, request: GenerateRequest, attempt: int) -> dict[str, Any]:
        call = target.client.generate(self._body(request, attempt), self._settings.request_timeout_s)
        answer: dict[str, Any] = await self._running(target, asyncio.create_task(call))
        return answer

    def _body(self, request: GenerateRequest, attempt: int) -> dict[str, Any]:
        settings, rid = self._settings, f"{self._name}-{request.sample_id}-{attempt}"
        return request_body(request, rid, vocab_size=settings.vocab_size, deterministic=settings.deterministic)

    async def _running(self, target: Member, task: "asyncio.Task[Any]") -> Any:
        """What the call returns. It is ended when its server is lost (ServerGone), or when an abort has waited long enough."""
        target.running.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            if self._given_up:
                raise _GivenUp from None
            raise ServerGone(target.address.url, "/generate", str(target.lost)) from None
        finally:
            target.running.discard(task)

    async def _watch(self) -> None:
        """Notice servers that have died, and keep aborting once that was asked: a request may still be on its way there."""
        loop = asyncio.get_running_loop()
        next_look, give_up_at = loop.time() + _WATCH_S, float("inf")
        while True:
            await asyncio.sleep(_TICK_S)
            if loop.time() >= next_look:
                await self._fleet.watch_once()
                next_look = loop.time() + _WATCH_S
            if self._abort.is_set():
                give_up_at = min(give_up_at, loop.time() + _ABORT_TIMEOUT_S)
                await self._abort_all()
            if loop.time() >= give_up_at or not self._fleet.alive():
                self._given_up = True
                for target in self._targets:
                    for task in list(target.running):
                        task.cancel()

    async def _abort_all(self) -> None:
        """Best effort: who does not hear it is dead, or answers when it is done."""
        calls = [member.client.post("/abort_request", {"abort_all": True}, _ABORT_TIMEOUT_S) for member in self._fleet.alive()]
        await asyncio.gather(*calls, return_exceptions=True)


async def _at_once(calls: Sequence[Coroutine[Any, Any, _Result]]) -> list[_Result]:
    """The results of calls made at the same time. When one raises, the others are cancelled, and over, before that is told."""
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
