"""A rollout engine that holds the Hugging Face model in its own process: no server, token ids in and out."""

from collections.abc import Sequence
from pathlib import Path
from threading import Event
from typing import ClassVar

import numpy as np
import torch

from slime_ppo.errors import RolloutError, WeightSyncError
from slime_ppo.rollout.embedded.decode import decode
from slime_ppo.rollout.embedded.model import ParameterMemory, load_causal_lm
from slime_ppo.rollout.embedded.receiver import WeightReceiver
from slime_ppo.rollout.engine import NO_VERSION, EngineHealth, EnginePart, check_requests
from slime_ppo.types.sample import GenerateRequest, GenerateResult
from slime_ppo.weight_sync.base import check_bucket
from slime_ppo.weight_sync.bucket import Bucket, TensorSpec, tensor_checksum

SamplerKey = tuple[float, float, int, float]


class EmbeddedEngine:
    """transformers' model and cache behind the `RolloutEngine` contract, and the receiving end of a weight push.

    Awake after construction, but without a version: the weights of the folder count as never pushed. `abort` may be
    called from another thread; nothing else may.
    """

    returns_support: ClassVar[bool] = True

    def __init__(
        self,
        hf_folder: str | Path,
        *,
        dtype: str = "float32",
        device: str = "cpu",
        trust_remote_code: bool = False,
        fp32_lm_head: bool = False,
        num_threads: int = 1,
    ) -> None:
        """Load the folder's model; raises CheckpointError. `num_threads` is set for the whole process."""
        torch.set_num_threads(num_threads)
        self._model = load_causal_lm(
            hf_folder, dtype=dtype, device=device, trust_remote_code=trust_remote_code, fp32_lm_head=fp32_lm_head
        )
        self._memory = ParameterMemory(self._model)
        self._receiver = WeightReceiver(self._memory.parameters)
        self._awake = EnginePart.ALL
        self._abort = Event()

    def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        """See `RolloutEngine`. Requests that share temperature, top_p, top_k and min_p run as one batch."""
        self._check_ready()
        check_requests(requests, vocab_size=self._model.config.vocab_size, max_positions=self._model.config.max_position_embeddings)
        self._abort.clear()
        results: dict[int, GenerateResult] = {}
        for places in _by_sampler(requests):
            batch = [requests[place] for place in places]
            answers = decode(self._model, batch, weight_version=self._receiver.version, aborted=self._abort.is_set)
            results |= zip(places, answers, strict=True)
        return [results[place] for place in range(len(requests))]

    def abort(self) -> None:
        """See `RolloutEngine`; takes effect before the next token."""
        self._abort.set()

    def wake(self, parts: EnginePart) -> None:
        """See `RolloutEngine`. The KV cache lives only inside `generate`: waking it allocates nothing yet."""
        if EnginePart.WEIGHTS in parts and EnginePart.WEIGHTS not in self._awake:
            self._memory.allocate()
        self._awake |= parts

    def offload(self, parts: EnginePart) -> None:
        """See `RolloutEngine`."""
        if EnginePart.WEIGHTS in parts and EnginePart.WEIGHTS in self._awake:
            self._receiver.invalidate()
            self._memory.free()
        self._awake &= ~parts

    def weight_version(self) -> int:
        """See `RolloutEngine`."""
        return self._receiver.version

    def health(self) -> EngineHealth:
        """See `RolloutEngine`."""
        return EngineHealth(self._awake, self._receiver.version, self.bytes_resident())

    def bytes_resident(self) -> int:
        """Bytes of parameters and buffers on the device."""
        return self._memory.bytes_resident()

    def manifest(self) -> tuple[TensorSpec, ...]:
        """What a push must bring: every parameter once, tied ones under their first name, with Hugging Face names."""
        return self._receiver.manifest()

    def begin_update(self, manifest: tuple[TensorSpec, ...], version: int, *, bucket_bytes: int) -> None:
        """Start the push of `version`, cut into buckets by `plan_buckets(manifest, bucket_bytes)`.

        The engine has no valid version from here until `end_update`. Raises WeightSyncError for weights that sleep or a
        manifest that does not fit.
        """
        if EnginePart.WEIGHTS not in self._awake:
            raise WeightSyncError(
                f"version {version} was pushed to an engine whose weights are offloaded; wake the weights part first"
            )
        self._receiver.begin(manifest, version, bucket_bytes=bucket_bytes)

    def load_bucket(self, index: int, flat: np.ndarray) -> None:
        """Copy bucket `index` (uint8, may be a read-only view) into the parameters. Raises WeightSyncError."""
        self._receiver.load(index, flat)

    def load_folder(self, folder: str) -> None:
        """Copy the tensors of a Hugging Face folder into the parameters, in place of all buckets. Raises WeightSyncError."""
        self._receiver.load_folder(folder)

    def end_update(self) -> int:
        """Make the pushed version valid and return it. Raises WeightSyncError when buckets are missing."""
        return self._receiver.end()

    def check_bucket(self, bucket: Bucket, flat: np.ndarray) -> None:
        """Compare the parameters with the bytes that the trainer sent. Raises WeightSyncError naming the tensors."""
        check_bucket(self, bucket, flat)

    def checksums(self, names: Sequence[str] | None = None) -> dict[str, str]:
        """Name -> checksum of these parameters (all by default), to compare with the trainer's (`bucket_checksums`)."""
        if EnginePart.WEIGHTS not in self._awake:
            raise WeightSyncError("checksums were asked of an engine whose weights are offloaded; wake and push first")
        parameters = self._memory.parameters
        return {name: tensor_checksum(name, parameters[name]) for name in (parameters if names is None else names)}

    def _check_ready(self) -> None:
        asleep = EnginePart.ALL & ~self._awake
        if asleep:
            raise RolloutError(f"generate was called while {asleep} of the engine is offloaded; wake it first")
        if self._receiver.version == NO_VERSION:
            raise RolloutError(
                "generate was called before a weight version was pushed (after start, after the weights woke, or after a "
                "failed push); push the trainer's weights first"
            )


def _by_sampler(requests: Sequence[GenerateRequest]) -> list[list[int]]:
    """Places of the requests that can share a batch, in order of first appearance. Greedy ones ignore the restrictions."""
    groups: dict[SamplerKey, list[int]] = {}
    for place, request in enumerate(requests):
        sampling = request.sampling
        restriction = (1.0, 0, 0.0) if sampling.greedy else (sampling.top_p, sampling.top_k, sampling.min_p)
        key = (sampling.temperature, *restriction)
        groups.setdefault(key, []).append(place)
    return list(groups.values())
