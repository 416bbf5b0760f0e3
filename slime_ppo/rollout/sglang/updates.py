"""The servers' end of a weight push: what is posted to them, in which order, and what is checked before and after.

A server accepts unknown names, half of the tensors and messages that are too short, and dies of shapes or messages that are too
long (none of it is atomic). So a manifest is compared with the served folder's own tensors before anything is sent, every body is
made of that manifest, only the request that completes the push carries its version, and no request is sent twice.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from slime_ppo.config.model_shape import ModelShape
from slime_ppo.errors import RolloutError, WeightSyncError
from slime_ppo.rollout.engine import NO_VERSION
from slime_ppo.rollout.sglang.checksums import ExpectedChecksums, compare_checksums
from slime_ppo.rollout.sglang.payload import inline_payload
from slime_ppo.rollout.sglang.server import ServerAddress
from slime_ppo.weight_sync.base import Meeting, check_manifest
from slime_ppo.weight_sync.bucket import Bucket, TensorSpec, check_flat, plan_buckets
from slime_ppo.weight_sync.folder import check_folder

_log = logging.getLogger(__name__)

PauseMode = Literal["abort", "retract"]
"""retract lets requests go on afterwards, but a server that is paused so spins on a core until it continues."""


class Fleet(Protocol):
    """All servers of an engine, in a fixed order."""

    def addresses(self) -> Sequence[ServerAddress]: ...

    def post(
        self,
        path: str,
        bodies: Sequence[Mapping[str, object]],
        *,
        timeout_s: float,
        on_refusal: tuple[str, Mapping[str, object]] | None = None,
    ) -> list[Any]:
        """Post one body to each server, to all at the same time; their JSON answers. Raises RolloutError, when all have
        answered, naming the servers that failed, with status and text. `on_refusal`, path and body, is posted to a server as soon
        as it refuses, for others that wait for it."""
        ...

    def get(self, path: str, *, timeout_s: float) -> list[Any]: ...


@dataclass(frozen=True)
class UpdateSettings:
    """`expected`: the served model's tensors by Hugging Face name, with the servers' dtype (`served_tensors`); `timeout_s` of one
    request (--weight-sync-timeout-s); `trainer_ranks`: per server and rank of it the trainer's rank on the same GPU, where GPUs
    are shared."""

    expected: Mapping[str, tuple[tuple[int, ...], str]]
    shape: ModelShape
    device: Literal["cpu", "cuda"]
    timeout_s: float
    trainer_ranks: tuple[tuple[int, ...], ...] | None = None


@dataclass
class _Update:
    """A push that has begun and not ended. `is_open`: the servers are in a session of begin_ and end_weight_update."""

    version: int
    buckets: list[Bucket]
    pauses: bool
    incarnation: int
    is_open: bool = False
    loaded: set[int] = field(default_factory=set)
    expected: dict[int, ExpectedChecksums] = field(default_factory=dict)

    @property
    def missing(self) -> list[Bucket]:
        return [bucket for bucket in self.buckets if bucket.index not in self.loaded]


class ServerUpdates:
    """Pushes weights to all servers of an engine: begin, every bucket once in any order (or one folder), end.

    From `begin` until a successful `end` there is no valid version. Any failure ends the push with a WeightSyncError; the servers
    then hold mixed weights, paused if the push had paused them, until a whole push has succeeded.
    """

    def __init__(self, fleet: Fleet, settings: UpdateSettings) -> None:
        self._fleet = fleet
        self._settings = settings
        self._version = NO_VERSION
        self._update: _Update | None = None
        self._session_in_doubt = True
        self._group: str | None = None

    @property
    def version(self) -> int:
        """The version of the last complete push, NO_VERSION without one."""
        return self._version

    def invalidate(self) -> None:
        """Forget the version, and the push that is under way: a server has died, or the weights were released."""
        self._version = NO_VERSION
        self._update = None

    def num_ranks(self) -> int:
        """Tensor-parallel ranks of all servers."""
        return sum(address.tp_size for address in self._fleet.addresses())

    def incarnation(self) -> int:
        """Another number whenever a server was started anew."""
        return sum(address.incarnation for address in self._fleet.addresses())

    def begin(self, manifest: tuple[TensorSpec, ...], version: int, *, bucket_bytes: int, pause_mode: PauseMode | None) -> None:
        """Start the push of `version` (0 or more). `pause_mode` None: the servers are paused already, and stay so.

        Raises WeightSyncError, before any server hears of it, for a manifest that does not fit the served model.
        """
        self.invalidate()
        if version < 0:
            raise WeightSyncError(f"weight version {version} pushed, expected 0 or more")
        check_manifest(manifest, self._settings.expected)
        buckets = plan_buckets(manifest, bucket_bytes)
        if pause_mode is not None:
            with _as_sync_error("pausing the servers"):
                self._post("/pause_generation", {"mode": pause_mode})
        if self._session_in_doubt:
            self._try("/end_weight_update")
        self._update = _Update(version, buckets, pauses=pause_mode is not None, incarnation=self.incarnation())

    def load_bucket(self, index: int, flat: np.ndarray) -> None:
        """Send bucket `index` (uint8 [num_bytes], may be read-only) in the requests themselves."""
        with self._step(index) as (update, bucket):
            check_flat(bucket, flat)
            payload = inline_payload(bucket, flat)
            self._send_payloads(update, bucket, [[payload] * address.tp_size for address in self._fleet.addresses()])

    def load_shared(self, index: int, payloads: Sequence[str]) -> None:
        """Let every rank of a server read bucket `index` from the memory of the trainer's rank on its GPU; `payloads` by trainer's
        rank (`ipc_payload`)."""
        with self._step(index) as (update, bucket):
            if self._settings.trainer_ranks is None:
                raise WeightSyncError(
                    "memory of GPUs was pushed to servers that are not on the trainer's; use another --weight-sync"
                )
            self._send_payloads(update, bucket, [[payloads[rank] for rank in ranks] for ranks in self._settings.trainer_ranks])

    def receive_bucket(self, index: int) -> None:
        """Let every server receive bucket `index` by a broadcast of the group; returns when all hold it."""
        with self._step(index) as (update, bucket):
            if self._group is None:
                raise WeightSyncError(f"bucket {index} was broadcast to servers that have joined no group; join one first")
            self._open(update)
            body: dict[str, object] = {
                "names": [spec.name for spec in bucket.specs],
                "dtypes": [spec.dtype for spec in bucket.specs],
                "shapes": [list(spec.shape) for spec in bucket.specs],
                "group_name": self._group,
                "load_format": "flattened_bucket",
            }
            bodies = [body | self._completion(update, bucket)] * len(self._fleet.addresses())
            # the others, and the trainer, would wait in the broadcast for a server that takes no part
            leave = ("/destroy_weights_update_group", {"group_name": self._group})
            path, timeout_s = "/update_weights_from_distributed", self._settings.timeout_s
            self._fleet.post(path, bodies, timeout_s=timeout_s, on_refusal=leave)

    def load_folder(self, folder: str) -> None:
        """Let every server read the Hugging Face folder, whose tensors are those of the manifest; all of them at once."""
        update = self._running(f"folder {folder}")
        self._update = None
        with _as_sync_error(f"loading {folder}"):
            check_folder(folder, self._settings.expected)
            body = {"model_path": folder, "flush_cache": True, "weight_version": str(update.version)}
            self._post("/update_weights_from_disk", body)
        update.loaded = {bucket.index for bucket in update.buckets}
        self._update = update

    def check_bucket(self, bucket: Bucket, flat: np.ndarray) -> None:
        """Remember what the servers must hold of this bucket; `end` compares."""
        update = self._running(f"the check of bucket {bucket.index}")
        self._update = None
        check_flat(bucket, flat)
        for tp_size in sorted({address.tp_size for address in self._fleet.addresses()}):
            if tp_size not in update.expected:
                update.expected[tp_size] = ExpectedChecksums(self._settings.shape, tp_size=tp_size, device=self._settings.device)
            update.expected[tp_size].add(bucket, flat)
        self._update = update

    def end(self) -> int:
        """Make the pushed version valid and return it, once every server reports it and every check holds."""
        update = self._running("the end of a push")
        self._update = None
        if update.missing:
            raise WeightSyncError(
                f"the push of version {update.version} ended after {len(update.loaded)} of {len(update.buckets)} buckets; missing "
                f"{[bucket.index for bucket in update.missing]}, first tensor {update.missing[0].specs[0].name}. The engine has no "
                "valid weights: push all again"
            )
        with _as_sync_error(f"ending the push of version {update.version}"):
            if update.is_open:
                self._post("/end_weight_update", {})
                self._session_in_doubt = False
            self._check_versions(update)
            self._check_checksums(update)
            if update.pauses:
                self._post("/continue_generation", {})
        self._version = update.version
        return self._version

    def join_group(self, meeting: Meeting) -> None:
        """Let the ranks of all servers join the trainer's group; returns when all have."""
        addresses = self._fleet.addresses()
        if meeting.world_size != 1 + self.num_ranks():
            raise WeightSyncError(
                f"a group of {meeting.world_size} ranks for {self.num_ranks()} ranks of servers and one trainer's"
            )
        bodies, offset = [], 1
        for address in addresses:
            bodies.append(
                {
                    "master_address": meeting.address,
                    "master_port": meeting.port,
                    "rank_offset": offset,
                    "world_size": meeting.world_size,
                    "group_name": meeting.group_name,
                    "backend": meeting.backend,
                }
            )
            offset += address.tp_size
        self._group = None
        with _as_sync_error(f"joining group {meeting.group_name}"):
            self._fleet.post("/init_weights_update_group", bodies, timeout_s=self._settings.timeout_s)
        self._group = meeting.group_name

    def leave_group(self) -> None:
        """Leave the group, if there is one; a server that can't any more has left it."""
        if self._group is not None:
            group, self._group = self._group, None
            self._try("/destroy_weights_update_group", {"group_name": group})

    def _send_payloads(self, update: _Update, bucket: Bucket, of_servers: Sequence[Sequence[str]]) -> None:
        """`of_servers`: for each server an entry per rank."""
        self._open(update)
        shared: dict[str, object] = {"load_format": "flattened_bucket"} | self._completion(update, bucket)
        bodies = [shared | {"serialized_named_tensors": list(payloads)} for payloads in of_servers]
        self._fleet.post("/update_weights_from_tensor", bodies, timeout_s=self._settings.timeout_s)

    def _open(self, update: _Update) -> None:
        """Before the first bucket; reading a folder needs no session."""
        if not update.is_open:
            self._session_in_doubt = True
            self._post("/begin_weight_update", {})
            update.is_open = True

    def _completion(self, update: _Update, bucket: Bucket) -> dict[str, object]:
        """The request that completes the push carries its version and flushes the prefix cache."""
        if [missing.index for missing in update.missing] == [bucket.index]:
            return {"flush_cache": True, "weight_version": str(update.version)}
        return {"flush_cache": False}

    def _check_versions(self, update: _Update) -> None:
        answers = self._fleet.get("/model_info", timeout_s=self._settings.timeout_s)
        for address, answer in zip(self._fleet.addresses(), answers, strict=True):
            if answer["weight_version"] != str(update.version):
                raise WeightSyncError(
                    f"version {update.version} was pushed, {address.url} reports {answer['weight_version']!r}: it was "
                    "started anew, or another program pushes to it"
                )
        if self.incarnation() != update.incarnation:
            raise WeightSyncError("a server was started anew during the push: push again")

    def _check_checksums(self, update: _Update) -> None:
        if not update.expected:
            return
        answers = self._post("/weights_checker", {"action": "checksum"})
        for address, answer in zip(self._fleet.addresses(), answers, strict=True):
            compare_checksums(update.expected[address.tp_size], answer["ranks"], server=address.url)

    def _post(self, path: str, body: Mapping[str, object]) -> list[Any]:
        return self._fleet.post(path, [body] * len(self._fleet.addresses()), timeout_s=self._settings.timeout_s)

    def _try(self, path: str, body: Mapping[str, object] | None = None) -> None:
        """Post what only matters when it works."""
        try:
            self._post(path, body or {})
        except RolloutError as error:
            _log.info("tidying up before a push: %s", error)

    @contextmanager
    def _step(self, index: int) -> Iterator[tuple[_Update, Bucket]]:
        """One bucket of the push that runs. A failure leaves no push to go on with."""
        update = self._running(f"bucket {index}")
        self._update = None
        if not 0 <= index < len(update.buckets):
            raise WeightSyncError(f"bucket {index} of version {update.version} was pushed, expected 0 to {len(update.buckets) - 1}")
        if index in update.loaded:
            raise WeightSyncError(f"bucket {index} of version {update.version} was pushed twice")
        with _as_sync_error(f"bucket {index} of {len(update.buckets)} of version {update.version}"):
            yield update, update.buckets[index]
        update.loaded.add(index)
        self._update = update

    def _running(self, what: str) -> _Update:
        if self._update is None:
            raise WeightSyncError(
                f"{what} arrived while no push was under way (none begun, or an earlier part failed); begin the push anew"
            )
        return self._update


@contextmanager
def _as_sync_error(what: str) -> Iterator[None]:
    """What a server answers to a push is a WeightSyncError."""
    try:
        yield
    except RolloutError as error:
        raise WeightSyncError(f"{what} failed: {error}. The engine has no valid weights: push all again") from error
