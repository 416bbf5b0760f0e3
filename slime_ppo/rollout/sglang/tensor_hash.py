"""The hashes that SGLang's /weights_checker tells (0.5.23), computed here from bytes: no sglang, no torch, no GPU.

On a CPU `sglang.srt.managers.mm_utils.tensor_hash`: the first 8 bytes of a SHA-256. On a GPU
`sglang.kernels.ops.memory.gpu_tensor_hash`: every 32-bit word is mixed with its place and summed per tile, the tiles' sums are
mixed and summed. The tests compare both with the installed package's own code.
"""

import hashlib
from collections.abc import Callable
from typing import Literal

import numpy as np

TensorHash = Callable[[np.ndarray], str]

_TILE_WORDS = 8192
_TILES_AT_ONCE = 512
_SEEDS = (0x243F6A88, ((0x243F6A88 * 0x9E3779B1) ^ 0xDEADBEEF) & 0xFFFFFFFF)
_PLACE_FACTORS = (0x27D4EB2D, 0x165667B1)
_PLACE_TURNS = (15, 13)
_MASK64 = (1 << 64) - 1


def tensor_hash(device: Literal["cpu", "cuda"]) -> TensorHash:
    """The function that gives a server's hash of a contiguous array of any type, 16 hexadecimal digits."""
    return _sha256 if device == "cpu" else _tiled


def _sha256(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data).digest()[:8].hex()


def _tiled(array: np.ndarray) -> str:
    content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    if len(content) == 0:
        return f"{0:016x}"
    padding = -len(content) % 4
    words = (np.pad(content, (0, padding)) if padding else content).view(np.uint32)
    total = 0
    step = _TILE_WORDS * _TILES_AT_ONCE
    for start in range(0, len(words), step):
        high, low = (_tile_sums(words[start : start + step], start, len(words), which) for which in (0, 1))
        total += int(((high.astype(np.uint64) << np.uint64(32)) | low.astype(np.uint64)).sum(dtype=np.uint64))
    return f"{_splitmix64(total):016x}"


def _tile_sums(words: np.ndarray, start: int, num_words: int, which: int) -> np.ndarray:
    """uint32 per tile of `words`, which begin at word `start` of `num_words`, by the first or second of the two seeds."""
    place = np.arange(start, start + len(words), dtype=np.uint64).astype(np.uint32)
    turns = _PLACE_TURNS[which]
    turned = (place << np.uint32(turns)) | (place >> np.uint32(32 - turns))
    salt = (place * np.uint32(_PLACE_FACTORS[which]) + np.uint32(_SEEDS[which])) ^ turned
    mixed = _mix32(words ^ salt)
    sums = np.add.reduceat(mixed, np.arange(0, len(words), _TILE_WORDS), dtype=np.uint32)
    return _mix32(sums ^ np.uint32(num_words * 4 & 0xFFFFFFFF))


def _mix32(x: np.ndarray) -> np.ndarray:
    """murmur3's finalizer."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    mixed: np.ndarray = x ^ (x >> np.uint32(16))
    return mixed


def _splitmix64(x: int) -> int:
    x &= _MASK64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK64
    return x ^ (x >> 31)
