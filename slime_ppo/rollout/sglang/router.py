"""A router before the servers. Requests go through it, control calls to the servers themselves."""

from collections.abc import Collection

import numpy as np

from slime_ppo.errors import RolloutError
from slime_ppo.rollout.sglang.answers import read_answer, request_body
from slime_ppo.rollout.sglang.client import ServerClient
from slime_ppo.rollout.sglang.fleet import Member
from slime_ppo.rollout.sglang.server import ServerAddress
from slime_ppo.types.sample import GenerateRequest, SamplingParams

_PROBES = (SamplingParams(max_new_tokens=2), SamplingParams(max_new_tokens=2, top_k=2))


class _Router:
    """It is somebody else's, and looked at only by what it answers."""

    def __init__(self, url: str) -> None:
        self._address = ServerAddress(url, tp_size=0, incarnation=0)

    def start(self) -> ServerAddress:
        return self._address

    def problem(self) -> str | None:
        return None

    def stop(self) -> None:
        """Nothing: it is not ours."""


def router_member(url: str, client: ServerClient) -> Member:
    """The router as a target of requests."""
    router = _Router(url)
    return Member(router, router.start(), client)


async def probe_router(router: Member, *, versions: Collection[int], timeout_s: float) -> None:
    """Raise RolloutError, saying which router would do, unless log-probs, supports and weight versions come through."""
    for place, sampling in enumerate(_PROBES):
        request = GenerateRequest(place, np.ones(1, np.int32), 0, sampling)
        body = request_body(request, f"probe-{place}", vocab_size=2, deterministic=False)
        answer = await router.client.generate(body, timeout_s)
        try:
            read_answer(request, answer, versions=versions)
        except RolloutError as error:
            raise RolloutError(
                f"the router at {router.address.url} does not pass on what training needs; use smg, which does, or no router "
                f"(--sglang-router-url): {error}"
            ) from error
