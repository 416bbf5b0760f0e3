"""The receiving end of a weight push: all or nothing per version."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from safetensors import SafetensorError

from slime_ppo.conversion.hf_io import HfWeights
from slime_ppo.errors import CheckpointError, WeightSyncError
from slime_ppo.rollout.engine import NO_VERSION
from slime_ppo.weight_sync.base import check_manifest
from slime_ppo.weight_sync.bucket import Bucket, TensorSpec, dtype_name, plan_buckets, unpack_bucket


@dataclass
class _Update:
    """A push that has begun and not ended."""

    version: int
    buckets: list[Bucket]
    loaded: set[int] = field(default_factory=set)


class WeightReceiver:
    """Copies buckets into parameters: begin, load every bucket once in any order, end.

    From `begin` until a successful `end` there is no valid version. Any failure ends the update; what was half written
    is only made good by a whole new push.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self._parameters = parameters
        self._version = NO_VERSION
        self._update: _Update | None = None

    @property
    def version(self) -> int:
        """The version of the last complete push, NO_VERSION without one."""
        return self._version

    def manifest(self) -> tuple[TensorSpec, ...]:
        """What a push must bring: every parameter once, in the model's order."""
        return tuple(TensorSpec(name, tuple(p.shape), dtype_name(p.dtype)) for name, p in self._parameters.items())

    def invalidate(self) -> None:
        """Forget the version, and the push that is under way: the parameters' values are gone."""
        self._version = NO_VERSION
        self._update = None

    def begin(self, manifest: tuple[TensorSpec, ...], version: int, *, bucket_bytes: int) -> None:
        """Start the push of `version` (0 or more). Raises WeightSyncError for a manifest that doesn't fit the parameters."""
        self.invalidate()
        if version < 0:
            raise WeightSyncError(f"weight version {version} pushed, expected 0 or more")
        check_manifest(manifest, {spec.name: (spec.shape, spec.dtype) for spec in self.manifest()})
        self._update = _Update(version, plan_buckets(manifest, bucket_bytes))

    def load(self, index: int, flat: np.ndarray) -> None:
        """Copy one bucket (uint8, may be read-only) into the parameters. Raises WeightSyncError and ends the push."""
        update = self._running(f"bucket {index}")
        # A failure below must leave no push to go on with; only success puts it back.
        self._update = None
        if not 0 <= index < len(update.buckets):
            raise WeightSyncError(f"bucket {index} of version {update.version} was pushed, expected 0 to {len(update.buckets) - 1}")
        if index in update.loaded:
            raise WeightSyncError(f"bucket {index} of version {update.version} was pushed twice")
        with torch.no_grad():
            for name, tensor in unpack_bucket(update.buckets[index], flat):
                self._parameters[name].copy_(tensor)
        update.loaded.add(index)
        self._update = update

    def load_folder(self, folder: str) -> None:
        """Copy all tensors of a Hugging Face folder, in place of the buckets. Raises WeightSyncError and ends the push."""
        update = self._running(f"folder {folder}")
        self._update = None
        try:
            weights = HfWeights(folder)
            with torch.no_grad():
                for name, parameter in self._parameters.items():
                    parameter.copy_(weights[name])
        except (CheckpointError, SafetensorError, RuntimeError) as error:
            raise WeightSyncError(f"the weights of {folder} do not fit the engine: {error}") from error
        update.loaded = {bucket.index for bucket in update.buckets}
        self._update = update

    def end(self) -> int:
        """Make the pushed version valid and return it. Raises WeightSyncError when buckets are missing."""
        update = self._running("the end of a push")
        self._update = None
        missing = [bucket for bucket in update.buckets if bucket.index not in update.loaded]
        if missing:
            raise WeightSyncError(
                f"the push of version {update.version} ended after {len(update.loaded)} of {len(update.buckets)} buckets; missing "
                f"{[bucket.index for bucket in missing]}, first tensor {missing[0].specs[0].name}. The engine has no valid "
                "weights: push all again"
            )
        self._version = update.version
        return self._version

    def _running(self, what: str) -> _Update:
        if self._update is None:
            raise WeightSyncError(
                f"{what} arrived while no push was under way (none begun, or an earlier part failed); begin the push anew"
            )
        return self._update
