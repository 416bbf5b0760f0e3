"""The rollout engine on stock SGLang servers: a client of all of them, with no SGLang and no GPU of its own."""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event
from typing import ClassVar, Literal

import numpy as np

from slime_ppo.config.model_shape import ModelShape
from slime_ppo.errors import RolloutError, WeightSyncError
from slime_ppo.rollout.engine import NO_VERSION, EngineHealth, EnginePart, check_requests
from slime_ppo.rollout.sglang.answers import UnknownVersionError, check_servable
from slime_ppo.rollout.sglang.dispatch import Dispatch, DispatchSettings
from slime_ppo.rollout.sglang.fleet import Member, ServerFleet
from slime_ppo.rollout.sglang.router import probe_router, router_member
from slime_ppo.rollout.sglang.server import Server
from slime_ppo.rollout.sglang.updates import PauseMode, ServerUpdates, UpdateSettings
from slime_ppo.types.sample import GenerateRequest, GenerateResult
from slime_ppo.weight_sync.base import Meeting
from slime_ppo.weight_sync.bucket import Bucket, TensorSpec

_log = logging.getLogger(__name__)

_IDLE_POLL_S = 0.02
_CONTROL_TIMEOUT_S = 60.0
_TAGS: Mapping[EnginePart, str] = {EnginePart.KV_CACHE: "kv_cache", EnginePart.WEIGHTS: "weights"}
"""Parts in the order in which they are released; they are resumed in the opposite one."""


@dataclass(frozen=True)
class EngineSettings:
    """What an SGLangEngine must know beyond its servers.

    `expected`: what a push must bring (`served_tensors` of the served folder). `pause_mode`: what becomes of requests when weights
    are pushed while they run: "abort" gives them back as they are, "retract" goes on with the new weights and a new KV cache.
    `deterministic`: the servers honour seeds. `max_concurrency` None: all requests at the same time. `max_restarts` of each server.
    `trainer_ranks`: see `UpdateSettings`. `releases_memory` False for servers that somebody else started, whose devices are their
    own: they are paused instead, since a server that is restarted, or left behind, meanwhile dies of the next release or resume.
    """

    shape: ModelShape
    expected: Mapping[str, tuple[tuple[int, ...], str]]
    device: Literal["cpu", "cuda"]
    pause_mode: PauseMode
    deterministic: bool
    max_concurrency: int | None
    max_attempts: int
    max_restarts: int
    request_timeout_s: float
    sync_timeout_s: float
    trainer_ranks: tuple[tuple[int, ...], ...] | None
    releases_memory: bool
    router_url: str | None
    api_key: str | None = field(repr=False)


class SGLangEngine:
    """`RolloutEngine` on SGLang servers, and the receiving end of every kind of weight push.

    Awake after construction, which starts the servers, but without a version. `generate` runs in one thread; meanwhile another
    may abort, push, offload or ask for health.
    """

    returns_support: ClassVar[bool] = True

    def __init__(self, servers: Sequence[Server], settings: EngineSettings) -> None:
        """Start `servers`. Raises RolloutError."""
        self._settings = settings
        self._fleet = ServerFleet(servers, settings.api_key)
        shape = settings.shape
        self._updates = ServerUpdates(
            self._fleet,
            UpdateSettings(
                settings.expected,
                shape,
                settings.device,
                timeout_s=settings.sync_timeout_s,
                trainer_ranks=settings.trainer_ranks,
            ),
        )
        self._dispatch = DispatchSettings(
            vocab_size=shape.vocab_size,
            deterministic=settings.deterministic,
            max_concurrency=settings.max_concurrency,
            max_attempts=settings.max_attempts,
            request_timeout_s=settings.request_timeout_s,
        )
        self._router: Member | None = None
        self._awake = EnginePart.ALL
        self._abort = Event()
        self._versions: set[int] = set()

    def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        """See `RolloutEngine`. With seeds, samplers of the two kinds that draw differently run one after the other."""
        self._check_ready()
        vocab_size = self._settings.shape.vocab_size
        check_requests(requests, vocab_size=vocab_size, max_positions=self._settings.shape.max_position_embeddings)
        check_servable(requests, vocab_size=vocab_size, deterministic=self._settings.deterministic)
        self._abort.clear()
        results: dict[int, GenerateResult] = {}
        for places in _waves(requests, self._settings.deterministic):
            answers = self._answers([requests[place] for place in places])
            results |= zip(places, answers, strict=True)
        return [results[place] for place in range(len(requests))]

    def abort(self) -> None:
        """See `RolloutEngine`; may be called from any thread."""
        self._abort.set()

    def wake(self, parts: EnginePart) -> None:
        """See `RolloutEngine`. The weights part starts servers anew that were lost."""
        if EnginePart.WEIGHTS in parts:
            self._restart_lost(parts)
        for part in reversed(tuple(_TAGS)):
            if part in parts:
                self._resume(part)
        if EnginePart.KV_CACHE in parts & ~self._awake:
            self._control("/flush_cache")
        if parts & ~self._awake and self._awake | parts == EnginePart.ALL:
            self._control("/continue_generation")
        self._awake |= parts

    def offload(self, parts: EnginePart) -> None:
        """See `RolloutEngine`. A server answers a release when it has unmapped the memory and its GPU is done; on a CPU it frees
        nothing, and only forgets."""
        if not parts & self._awake:
            return
        self._fleet.notice_losses()
        self._abort.set()
        self._wait_until_idle()
        if self._awake == EnginePart.ALL:
            self._control("/pause_generation", {"mode": "abort"})
        for part, tag in _TAGS.items() if self._settings.releases_memory else ():
            holding = [member for member in self._fleet.alive() if part in parts & ~member.released]
            self._post(holding, "/release_memory_occupation", {"tags": [tag]})
            for member in holding:
                member.released |= part
        if EnginePart.WEIGHTS in parts:
            self._updates.invalidate()
        self._awake &= ~parts

    def weight_version(self) -> int:
        """See `RolloutEngine`. A server that has died takes its version with it; others go on serving theirs."""
        self._fleet.notice_losses()
        if not self._fleet.alive():
            self._updates.invalidate()
        return self._updates.version

    def health(self) -> EngineHealth:
        """See `RolloutEngine`; servers that have died are out of it, an error if that is all of them."""
        version = self.weight_version()
        if not self._fleet.alive():
            raise RolloutError(f"all SGLang servers are lost; wake the weights part to start them anew: {self._fleet.losses()}")
        num_lost = len(self._fleet.members) - len(self._fleet.alive())
        return EngineHealth(self._awake, version, self._bytes_resident(), num_lost)

    def calls(self) -> list[str]:
        """The last control calls that were sent to the servers, with pause mode or memory tags."""
        return list(self._fleet.calls)

    def close(self) -> None:
        """End the servers that are ours."""
        self._fleet.close()

    def num_ranks(self) -> int:
        """Tensor-parallel ranks of all servers."""
        return self._updates.num_ranks()

    def incarnation(self) -> int:
        """Another number whenever a server was started anew."""
        return self._updates.incarnation()

    def begin_update(self, manifest: tuple[TensorSpec, ...], version: int, *, bucket_bytes: int) -> None:
        """Start the push of `version`; no version is valid until `end_update`. Raises WeightSyncError."""
        if EnginePart.WEIGHTS not in self._awake:
            raise WeightSyncError(
                f"version {version} was pushed to an engine whose weights are offloaded; wake the weights part first"
            )
        mode = self._settings.pause_mode if self._awake == EnginePart.ALL else None
        # The servers go on before the end of the push is told here: from now on their answers may be of this version.
        self._versions.add(version)
        with self._push_step():
            self._updates.begin(manifest, version, bucket_bytes=bucket_bytes, pause_mode=mode)

    def load_bucket(self, index: int, flat: np.ndarray) -> None:
        """Send a bucket's bytes to all servers. Raises WeightSyncError."""
        with self._push_step():
            self._updates.load_bucket(index, flat)

    def load_shared(self, index: int, payloads: Sequence[str]) -> None:
        """Let every rank of the servers read a bucket from the trainer's memory on the same GPU. Raises WeightSyncError."""
        with self._push_step():
            self._updates.load_shared(index, payloads)

    def receive_bucket(self, index: int) -> None:
        """Let all servers take part in one broadcast. Raises WeightSyncError."""
        with self._push_step():
            self._updates.receive_bucket(index)

    def manifest(self) -> tuple[TensorSpec, ...]:
        """What a push must bring: the served folder's tensors in the servers' dtype."""
        return tuple(TensorSpec(name, shape, dtype) for name, (shape, dtype) in self._settings.expected.items())

    def load_folder(self, folder: str) -> None:
        """Let all servers read a Hugging Face folder. Raises WeightSyncError."""
        with self._push_step():
            self._updates.load_folder(folder)

    def check_bucket(self, bucket: Bucket, flat: np.ndarray) -> None:
        """Remember what the servers must hold; `end_update` compares."""
        self._updates.check_bucket(bucket, flat)

    def end_update(self) -> int:
        """Make the pushed version valid and return it. Raises WeightSyncError."""
        with self._push_step():
            return self._updates.end()

    def join_group(self, meeting: Meeting) -> None:
        """Let the ranks of all servers join the trainer's group. Raises WeightSyncError."""
        self._updates.join_group(meeting)

    def leave_group(self) -> None:
        """Leave the group, if there is one."""
        self._updates.leave_group()

    def _answers(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        """A server that turns out to have other weights than were pushed is lost, as one that has died, and all are asked again."""
        while True:
            dispatch = Dispatch(self._fleet, self._targets(), self._dispatch, versions=self._versions, abort=self._abort)
            try:
                return self._fleet.run(dispatch.run(requests))
            except UnknownVersionError as error:
                if not self._fleet.run(self._fleet.lose_strangers(self._versions, _CONTROL_TIMEOUT_S)):
                    raise
                _log.warning("asking %d samples again: %s", len(requests), error)

    @contextmanager
    def _push_step(self) -> Iterator[None]:
        """A push that fails leaves the servers paused: what they were generating comes back as it is."""
        try:
            yield
        except WeightSyncError:
            self._abort.set()
            raise

    def _check_ready(self) -> None:
        asleep = EnginePart.ALL & ~self._awake
        if asleep:
            raise RolloutError(f"generate was called while {asleep} of the engine is offloaded; wake it first")
        if self.weight_version() == NO_VERSION:
            losses = self._fleet.losses()
            raise RolloutError(
                "generate was called before a weight version was pushed (after start, after the weights woke, or after a "
                "failed push); push the trainer's weights first" + (f". Lost servers: {losses}" if losses else "")
            )

    def _targets(self) -> list[Member]:
        """Where requests go: the servers, or the router before them."""
        url = self._settings.router_url
        if url is None:
            return self._fleet.members
        if self._router is None or self._router.lost is not None:
            router = router_member(url, self._fleet.client(url))
            self._fleet.run(probe_router(router, versions=self._versions, timeout_s=self._settings.request_timeout_s))
            self._router = router
        return [self._router]

    def _restart_lost(self, parts: EnginePart) -> None:
        """A new server holds memory of all parts: those that are to sleep on are released."""
        started = self._fleet.restart_lost(self._settings.max_restarts)
        if not started:
            return
        self._updates.invalidate()
        asleep = EnginePart.ALL & ~(self._awake | parts)
        if asleep:
            self._post(started, "/pause_generation", {"mode": "abort"})
            self._post(started, "/release_memory_occupation", {"tags": [_TAGS[asleep]]})
            for member in started:
                member.released = asleep

    def _resume(self, part: EnginePart) -> None:
        lacking = [member for member in self._fleet.alive() if part in member.released]
        self._post(lacking, "/resume_memory_occupation", {"tags": [_TAGS[part]]})
        for member in lacking:
            member.released &= ~part

    def _wait_until_idle(self) -> None:
        """A server dies when memory is released while it runs a request, and takes a second to pause while it still tidies up."""
        deadline = time.monotonic() + _CONTROL_TIMEOUT_S
        while busy := [member for member in self._fleet.alive() if self._num_running(member) > 0]:
            if time.monotonic() > deadline:
                raise RolloutError(f"{busy[0].address.url} is still busy {_CONTROL_TIMEOUT_S:g} s after its requests were aborted")
            time.sleep(_IDLE_POLL_S)

    def _num_running(self, member: Member) -> int:
        """Requests that we wait for, or that the server still knows."""
        if member.running:
            return len(member.running)
        return self._fleet.num_running(member, timeout_s=_CONTROL_TIMEOUT_S)

    def _bytes_resident(self) -> int:
        """The weights of the servers. SGLang on a CPU keeps its memory also while it sleeps."""
        tensors = self._settings.expected
        weights = sum(TensorSpec(name, shape, dtype).num_bytes for name, (shape, dtype) in tensors.items())
        frees = self._settings.device == "cuda"
        return sum(weights for member in self._fleet.alive() if not (frees and EnginePart.WEIGHTS in member.released))

    def _control(self, path: str, body: Mapping[str, object] | None = None) -> None:
        self._post(self._fleet.alive(), path, body or {})

    def _post(self, members: Sequence[Member], path: str, body: Mapping[str, object]) -> None:
        """A server that dies meanwhile is lost, which is told by `health` and the next push."""
        self._fleet.post_to(members, path, body, timeout_s=_CONTROL_TIMEOUT_S, may_die=True)


def _waves(requests: Sequence[GenerateRequest], deterministic: bool) -> list[list[int]]:
    """Places of the requests that may share a server's batch.

    A seeded draw numbers the tokens by id when no sampler of the batch is restricted, and by rank otherwise: in a mixed batch a
    sample would draw other tokens than alone (SEMANTICS 14).
    """
    ranked = [request.sampling.restricted or request.sampling.greedy for request in requests]
    kinds = (False, True) if deterministic else ()
    waves = [[place for place, kind in enumerate(ranked) if kind is wanted] for wanted in kinds] or [list(range(len(requests)))]
    return [wave for wave in waves if wave]
