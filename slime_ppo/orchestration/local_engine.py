"""The embedded engine in the driver's own process, which rank 0 of the roles shares."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from slime_ppo.rollout.engine import EngineHealth, EnginePart
from slime_ppo.types.sample import GenerateRequest, GenerateResult
from slime_ppo.weight_sync.bucket import Bucket, TensorSpec

if TYPE_CHECKING:
    from slime_ppo.rollout.embedded.engine import EmbeddedEngine


class LocalRolloutEngine:
    """`RolloutEngine` in the driver's own process, which rank 0 of the roles shares."""

    returns_support: ClassVar[bool] = True

    def __init__(self, engine: "EmbeddedEngine") -> None:
        self._engine = engine

    def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        with _without_deterministic_mode():
            return self._engine.generate(requests)

    def abort(self) -> None:
        self._engine.abort()

    def wake(self, parts: EnginePart) -> None:
        self._engine.wake(parts)

    def offload(self, parts: EnginePart) -> None:
        self._engine.offload(parts)

    def weight_version(self) -> int:
        return self._engine.weight_version()

    def health(self) -> EngineHealth:
        return self._engine.health()

    def begin_update(self, manifest: tuple[TensorSpec, ...], version: int, *, bucket_bytes: int) -> None:
        self._engine.begin_update(manifest, version, bucket_bytes=bucket_bytes)

    def load_bucket(self, index: int, flat: np.ndarray) -> None:
        self._engine.load_bucket(index, flat)

    def manifest(self) -> tuple[TensorSpec, ...]:
        return self._engine.manifest()

    def load_folder(self, folder: str) -> None:
        self._engine.load_folder(folder)

    def check_bucket(self, bucket: Bucket, flat: np.ndarray) -> None:
        self._engine.check_bucket(bucket, flat)

    def end_update(self) -> int:
        return self._engine.end_update()


@contextmanager
def _without_deterministic_mode() -> Iterator[None]:
    """The engine computes as in a process of its own: the roles' deterministic mode refuses operations that sampling needs."""
    import torch

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
