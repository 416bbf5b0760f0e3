"""What SGLang 0.5.23 imports or calls on a CPU and no CPU package provides. Only `serve` uses it, in a server's processes.

- torchvision: two vision configs import `torchvision.transforms` at start, whatever the model; its wheel needs a CUDA torch.
  Goes when `sglang.srt.configs` imports without it.
- sgl_kernel: there is no CPU wheel; text models call one function of it on CPUs without AMX.
- megatron is the opposite: it is hidden, see `hide_megatron`.
- seeds (`--enable-deterministic-inference`): SGLang refuses a CPU three times for reasons that hold for GPUs only, see
  `allow_seeds`. Go when it accepts `--device cpu` beside that flag.
"""

import enum
import importlib.machinery
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from slime_ppo.rollout.sglang.server_args import BATCHED_ATTENTION

# a whole number: torch.compile, which traces the hash, can't guard a global numpy scalar
_MASK_32 = 0xFFFFFFFF


def install_torchvision() -> None:
    """Modules with the one name that SGLang takes from torchvision, unless the real one is there."""
    from transformers.utils.import_utils import is_torchvision_available

    # the answer is cached: transformers must not take our modules for torchvision
    if is_torchvision_available():
        return
    modes = {"NEAREST": "nearest", "BILINEAR": "bilinear", "BICUBIC": "bicubic", "LANCZOS": "lanczos"}
    interpolation = enum.Enum("InterpolationMode", modes)  # type: ignore[misc]
    functional = _module("torchvision.transforms.functional", InterpolationMode=interpolation)
    transforms = _module("torchvision.transforms", InterpolationMode=interpolation, functional=functional)
    _module("torchvision", __version__="0.0", transforms=transforms)


def install_sgl_kernel() -> None:
    """A module `sgl_kernel` with the one function; any other raises NotImplementedError when it is called."""

    def missing(name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def refuse(*_: Any, **__: Any) -> Any:
            raise NotImplementedError(f"sgl_kernel.{name} has no stand-in for CPUs; this model or option needs a GPU")

        return refuse

    _module("sgl_kernel", assign_req_to_token_pool_cpu=assign_req_to_token_pool, __getattr__=missing)


def hide_megatron() -> None:
    """Let `import megatron` fail: where it is installed, SGLang's debug dumper takes a second to import it for nothing."""
    sys.modules["megatron"] = None  # type: ignore[assignment]


def admit_batched_attention() -> None:
    """Make `--attention-backend torch_batched` one that SGLang's parser knows; `cpu_launch` supplies it."""
    from sglang.srt.arg_groups.choices import add_attention_backend_choices

    add_attention_backend_choices([BATCHED_ATTENTION])


def assign_req_to_token_pool(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    *_: Any,
) -> None:
    """Write each request's new cache slots into its row: `req_to_token[req, start:end]`, slots in the requests' order."""
    taken = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        slots = out_cache_loc[taken : taken + end - start]
        req_to_token[row, start:end] = slots.to(req_to_token.dtype)
        taken += end - start


def allow_seeds() -> "torch.library.Library":
    """Make `--enable-deterministic-inference`, without which seeds are ignored, run on a CPU; keep what is returned alive.

    1. torch_native joins the attention backends that the flag admits (by SGLang's own function for that).
    2. The batch-invariant GPU kernels are not switched on: on a CPU their set-up raises "No supported accelerator".
    3. The hash behind the sampler's noise, an operator of sgl_kernel, is supplied in numpy.
    """
    import sglang.srt.batch_invariant_ops as batch_invariant
    from sglang.srt.arg_groups.choices import add_deterministic_attention_backend_choices

    add_deterministic_attention_backend_choices(["torch_native"])
    batch_invariant.enable_batch_invariant_mode = lambda *_, **__: None
    library = torch.library.Library("sgl_kernel", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor cols) -> Tensor")  # type: ignore[no-untyped-call]
    library.impl("murmur_hash32_cpu", torch.compiler.disable(murmur_hash32), "CPU")  # type: ignore[no-untyped-call]
    return library


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, cols: torch.Tensor) -> torch.Tensor:
    """MurmurHash3 (x86, 32 bits) of the 16 bytes seed low, seed high, position, column, as uint32 [len(seed), len(cols)].

    The same numbers as `sglang/kernels/ops/sampling/murmur_hash.py` computes on a GPU.
    """
    seeds, rows = _unsigned(seed)[:, None], _unsigned(positions)[:, None] & np.uint64(_MASK_32)
    columns = _unsigned(cols)[None] & np.uint64(_MASK_32)
    mixed = np.zeros_like(seeds)
    for block in (seeds & np.uint64(_MASK_32), seeds >> np.uint64(32), rows, columns):
        mixed = _mix(mixed, block)
    mixed = mixed ^ np.uint64(16)
    mixed ^= mixed >> np.uint64(16)
    mixed = mixed * np.uint64(0x85EBCA6B) & np.uint64(_MASK_32)
    mixed ^= mixed >> np.uint64(13)
    mixed = mixed * np.uint64(0xC2B2AE35) & np.uint64(_MASK_32)
    mixed ^= mixed >> np.uint64(16)
    return torch.from_numpy(mixed.astype(np.uint32))


def _unsigned(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().to(torch.int64).numpy().astype(np.uint64)


def _rotated(value: np.ndarray, bits: int) -> np.ndarray:
    return ((value << np.uint64(bits)) | (value >> np.uint64(32 - bits))) & np.uint64(_MASK_32)


def _mix(mixed: np.ndarray, block: np.ndarray) -> np.ndarray:
    scrambled = _rotated(block * np.uint64(0xCC9E2D51) & np.uint64(_MASK_32), 15) * np.uint64(0x1B873593) & np.uint64(_MASK_32)
    return (_rotated(mixed ^ scrambled, 13) * np.uint64(5) + np.uint64(0xE6546B64)) & np.uint64(_MASK_32)


def _module(name: str, **attributes: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    module.__dict__.update(attributes)
    sys.modules[name] = module
    return module
