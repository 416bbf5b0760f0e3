"""Offload and wake of a trainer: every storage is freed and filled again, so that all views stay valid."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from slime_ppo.config.resident_memory import ResidentBytes

# torch rounds every pinned allocation up to a power of two: whole buffers could take twice their size
HOST_BLOCK_BYTES = 1 << 28

Part = Literal["params", "grads", "main_params", "moments"]


@dataclass
class _Parked:
    """A storage that was freed: its size, and its bytes on the host, block by block (None: not kept, comes back as zeros)."""

    storage: torch.UntypedStorage
    num_bytes: int
    host: list[torch.Tensor] | None


class Offloader:
    """Frees the device memory of a trainer's parameters, gradients, main parameters and moments; bit-exact.

    `untyped_storage().resize_(0)` keeps every tensor and view alive, unlike replacing tensors, after which shards would
    stop being views of the parameter buffer. Gradients are not kept. Optimizer state that does not exist yet (before
    the first step) is simply not there.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], optimizer: object) -> None:
        self._chunks = chunks
        self._optimizer = optimizer
        self._parked: list[_Parked] | None = None

    @property
    def awake(self) -> bool:
        return self._parked is None

    def offload(self) -> None:
        """Copy to the host and free. Does nothing when already offloaded."""
        if self._parked is not None:
            return
        parked: dict[int, _Parked] = {}
        for part, tensor in self._tensors():
            storage = tensor.untyped_storage()
            if storage.size() == 0 or storage.data_ptr() in parked:
                continue
            host = host_copy(_bytes_of(storage, tensor.device), block_bytes=HOST_BLOCK_BYTES) if part != "grads" else None
            parked[storage.data_ptr()] = _Parked(storage, storage.size(), host)
        self._parked = list(parked.values())
        on_gpu = any(entry.storage.device.type == "cuda" for entry in self._parked)
        if on_gpu:
            torch.cuda.synchronize()  # the copies are under way, and what follows frees their sources
        for entry in self._parked:
            entry.storage.resize_(0)
        if on_gpu:
            torch.cuda.empty_cache()  # freed blocks, activations' too, would stay with this process's allocator

    def wake(self) -> None:
        """Allocate again and copy back. Does nothing when awake."""
        if self._parked is None:
            return
        for entry in self._parked:
            entry.storage.resize_(entry.num_bytes)
            whole = _bytes_of(entry.storage, entry.storage.device)
            if entry.host is None:
                whole.zero_()
            else:
                for block, source in zip(torch.split(whole, HOST_BLOCK_BYTES), entry.host, strict=True):
                    block.copy_(source, non_blocking=True)
        self._parked = None

    def resident_bytes(self) -> int:
        """Bytes of the trainer's storages on the device now."""
        return self.bytes_by_part().total

    def bytes_by_part(self) -> ResidentBytes:
        """The same by part, every storage once: float32 main parameters that are views of the parameters add nothing."""
        sizes: dict[Part, int] = {"params": 0, "grads": 0, "main_params": 0, "moments": 0}
        seen: set[int] = set()
        for part, tensor in self._tensors():
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                sizes[part] += storage.size()
        return ResidentBytes(**sizes)

    def _tensors(self) -> Iterator[tuple[Part, torch.Tensor]]:
        """Parameters first: whatever shares a storage with them counts as theirs."""
        buffers = [buffer for chunk in self._chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]  # type: ignore[misc]
        for buffer in buffers:
            if buffer.param_data is not None:
                yield "params", buffer.param_data
        for buffer in buffers:
            yield "grads", buffer.grad_data
        for optimizer in self._optimizer.chained_optimizers:  # type: ignore[attr-defined]
            for group in optimizer.optimizer.param_groups:
                yield from (("main_params", parameter.data) for parameter in group["params"])
            for state in optimizer.optimizer.state.values():
                yield from (("moments", value) for value in state.values() if torch.is_tensor(value) and value.numel() > 1)


def host_copy(whole: torch.Tensor, *, block_bytes: int) -> list[torch.Tensor]:
    """The bytes of `whole` uint8 [n] in host blocks of `block_bytes`, the last one shorter; of a GPU's in pinned memory, copied
    in the background of the current stream. torch keeps pinned blocks that are let go, so that the next copy gets them again.
    """
    blocks = []
    for part in torch.split(whole, block_bytes):
        block = torch.empty(len(part), dtype=torch.uint8, pin_memory=whole.is_cuda)
        blocks.append(block.copy_(part, non_blocking=True))
    return blocks


def _bytes_of(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
