"""A trainer of one rank that holds the weights of a folder: the sending end of every path to SGLang's servers, without Megatron."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from slime_ppo.rollout.sglang.payload import ipc_payload
from slime_ppo.weight_sync.base import Meeting
from slime_ppo.weight_sync.bucket import Bucket, TensorSpec, fill_bucket, pack_bucket
from slime_ppo.weight_sync.process_group import EngineGroup
from tests.helpers.engine_harness import folder_manifest, folder_tensors


class FolderTrainer:
    """Source of every `WeightSync`. `device` is torch's name of one; `hold` exchanges the weights."""

    def __init__(self, folder: Path, *, device: str = "cpu", dtype: str = "float32", timeout_s: float = 60.0) -> None:
        self._device = device
        self._dtype: torch.dtype = getattr(torch, dtype)
        kind: Literal["cpu", "cuda"] = "cpu" if device == "cpu" else "cuda"
        self._group = EngineGroup(host="127.0.0.1", device=kind, timeout_s=timeout_s)
        self._shared: torch.Tensor | None = None
        self.hold(folder)

    def hold(self, folder: Path) -> None:
        self._folder = folder
        self._tensors: Mapping[str, torch.Tensor] = {
            name: tensor.to(self._device, self._dtype) for name, tensor in folder_tensors(folder).items()
        }

    def manifest(self) -> tuple[TensorSpec, ...]:
        return folder_manifest(dict(self._tensors))

    def export_bucket(self, bucket: Bucket) -> np.ndarray:
        return pack_bucket(bucket, self._tensors)

    def share_bucket(self, bucket: Bucket) -> list[str]:
        self._shared = self._flat(bucket)
        return [ipc_payload(bucket, self._shared)]

    def release_shared(self) -> None:
        self._shared = None

    def meet_engine(self, num_engine_ranks: int) -> Meeting:
        return self._group.meet(num_engine_ranks)

    def join_engine(self, meeting: Meeting) -> None:
        self._group.join(meeting)

    def broadcast_bucket(self, bucket: Bucket) -> None:
        self._group.broadcast(self._flat(bucket))

    def abandon_engine(self) -> None:
        self._group.abandon()

    def leave_engine(self) -> None:
        self._group.leave()

    def publish_hf(self, folder: str) -> None:
        shutil.copytree(self._folder, folder)

    def _flat(self, bucket: Bucket) -> torch.Tensor:
        flat = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=self._device)
        fill_bucket(bucket, self._tensors, flat)
        return flat
