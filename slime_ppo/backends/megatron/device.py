"""Lets unmodified megatron-core run on CPU tensors and gloo; on a GPU it does nothing.

Strategy: only the *name* `torch` inside `megatron.core` modules is replaced, by a proxy whose `cuda` is a namespace of
no-ops and whose factories turn device="cuda" into the CPU. `torch` itself stays honest for transformers and for us. The
three methods of `torch.Tensor` below look at their caller and behave differently for megatron.core alone.

Every replacement of a third-party function in this project stands in this file, with its reason. All of it can go when
megatron-core takes its device from a setting instead of `torch.cuda`.
"""

import contextlib
import functools
import importlib.abc
import importlib.machinery
import logging
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from slime_ppo.parallel.worker_settings import DeviceKind

_FACTORIES = (
    "tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn", "randint", "empty_like",
    "zeros_like", "ones_like", "full_like", "as_tensor", "linspace", "eye",
)  # fmt: skip

# megatron.core guards these imports against ImportError only; without a driver some raise OSError instead
_GPU_ONLY_PACKAGES = (
    "flash_mla", "flash_attn", "flash_attn_3", "flashattn_hopper", "transformer_engine",
    "transformer_engine_torch", "apex", "amp_C", "deep_ep", "grouped_gemm", "nvidia_resiliency_ext",
)  # fmt: skip
# megatron.core would log its timers and its inference there; every rank would import it for half a second or more, for nothing
_UNUSED_PACKAGES = ("wandb",)


def collective_backend(device: DeviceKind) -> str:
    """The torch.distributed backend of a device: gloo or nccl."""
    return "nccl" if device == "cuda" else "gloo"


def prepare_megatron(device: DeviceKind) -> None:
    """Make megatron.core usable on `device`. Call before the first import of megatron.core; later calls do nothing."""
    if device == "cuda" or any(isinstance(finder, _MegatronImportHook) for finder in sys.meta_path):
        return
    hook = _MegatronImportHook()
    _patch_tensor_methods()
    sys.meta_path.insert(0, hook)
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and module is not None:
            hook.patch(module)


class _NullStream:
    """A CUDA stream or event on a machine that has none: everything is already done."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def _nothing(self, *_: Any, **__: Any) -> None: ...

    wait_stream = wait_event = synchronize = record = wait = _nothing

    def record_event(self, *_: Any) -> "_NullStream":
        return self

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: "_NullStream") -> float:
        return 0.0

    def __enter__(self) -> "_NullStream":
        return self

    def __exit__(self, *_: object) -> None: ...


def _fake_cuda() -> types.ModuleType:
    """What megatron.core sees as `torch.cuda`; a name not set here is the real one."""

    def nothing(*_: Any, **__: Any) -> None: ...

    random_state = {
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        "manual_seed": torch.manual_seed,
        "manual_seed_all": torch.manual_seed,
    }
    stream = _NullStream()
    fake = _Delegate("torch.cuda", torch.cuda)
    fake.__dict__.update(
        current_device=lambda: torch.device("cpu"),
        device_count=lambda: 1,
        set_device=nothing,
        synchronize=nothing,
        empty_cache=nothing,
        current_stream=lambda *_, **__: stream,
        default_stream=lambda *_, **__: stream,
        stream=lambda _: contextlib.nullcontext(),
        Stream=_NullStream,
        Event=_NullStream,
        is_current_stream_capturing=lambda: False,
        memory_allocated=lambda *_: 0,
        max_memory_allocated=lambda *_: 0,
        nvtx=types.SimpleNamespace(range_push=nothing, range_pop=nothing, range=lambda *_: contextlib.nullcontext()),
        random=types.SimpleNamespace(**random_state),
        **random_state,
    )
    return fake


class _Delegate(types.ModuleType):
    """A module in front of another one: what is set here wins, everything else is the other's."""

    def __init__(self, name: str, real: types.ModuleType) -> None:
        super().__init__(name)
        self.__dict__["_real"] = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_real"], name)


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def wrapped(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = torch.device("cpu")
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return wrapped


def _torch_proxy() -> types.ModuleType:
    proxy = _Delegate("torch", torch)
    proxy.__dict__["cuda"] = _fake_cuda()
    for name in _FACTORIES:
        proxy.__dict__[name] = _on_cpu(getattr(torch, name))
    return proxy


def _uneven_collectives() -> types.ModuleType:
    """torch.distributed whose all_gather and reduce_scatter take parts of different sizes, which gloo refuses and NCCL allows."""

    def all_gather(parts: list[torch.Tensor], own: torch.Tensor, group: dist.ProcessGroup) -> None:
        sizes = [len(part) for part in parts]
        received = own.new_empty((sum(sizes), *own.shape[1:]))
        repeated = own.repeat(len(parts), *[1] * (own.dim() - 1))
        dist.all_to_all_single(received, repeated, sizes, [len(own)] * len(parts), group=group)
        for part, found in zip(parts, torch.split(received, sizes), strict=True):
            part.copy_(found)

    def reduce_scatter(own: torch.Tensor, parts: list[torch.Tensor], group: dist.ProcessGroup) -> None:
        received = own.new_empty((len(parts), *own.shape))
        sizes = [len(part) for part in parts]
        dist.all_to_all_single(received.flatten(0, 1), torch.cat(parts), [len(own)] * len(parts), sizes, group=group)
        own.copy_(received.sum(0))

    uneven = _Delegate("torch.distributed", dist)
    uneven.__dict__.update(all_gather=all_gather, reduce_scatter=reduce_scatter)
    return uneven


def _called_from_megatron() -> bool:
    caller = sys._getframe(2).f_globals.get("__name__", "")
    return str(caller).startswith("megatron.core")


def _patch_tensor_methods() -> None:
    real_type, real_cuda, real_pin = torch.Tensor.type, torch.Tensor.cuda, torch.Tensor.pin_memory

    def tensor_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # optimizer.py, distrib_optimizer.py and clip_grads.py compare with the string 'torch.cuda.FloatTensor'
        result = real_type(self, *args, **kwargs)
        if not args and not kwargs and _called_from_megatron():
            return result.replace("torch.", "torch.cuda.", 1)
        return result

    def cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self if _called_from_megatron() else real_cuda(self, *args, **kwargs)

    def pin_memory(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        # a pinned tensor is a copy; returning self here would let the offload destroy the weights
        return self.clone() if _called_from_megatron() else real_pin(self, *args, **kwargs)

    for name, method in (("type", tensor_type), ("cuda", cuda), ("pin_memory", pin_memory)):
        setattr(torch.Tensor, name, method)


@contextlib.contextmanager
def _hidden_packages(names: Sequence[str]) -> Iterator[None]:
    """Make `import name` fail with ImportError while megatron.core is being imported."""
    hidden = [name for name in names if name not in sys.modules]
    blocked: dict[str, Any] = dict.fromkeys(hidden)
    sys.modules.update(blocked)
    try:
        yield
    finally:
        for name in hidden:
            if name in sys.modules and sys.modules[name] is None:
                del sys.modules[name]


class _MegatronImportHook(importlib.abc.MetaPathFinder):
    """Patches megatron.core modules as they are imported; many of them are imported lazily."""

    def __init__(self) -> None:
        self._proxy = _torch_proxy()
        self._patched: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith("megatron.core"):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            with _hidden_packages((*_GPU_ONLY_PACKAGES, *_UNUSED_PACKAGES)):
                execute(module)
            self.patch(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def patch(self, module: types.ModuleType) -> None:
        name = module.__name__
        if name in self._patched:
            return
        self._patched.add(name)
        if module.__dict__.get("torch") is torch:
            module.__dict__["torch"] = self._proxy
        if name == "megatron.core.jit":
            # its decorator is torch.compile, which imports torch's compiler into every rank, for fusions made for a GPU
            module.__dict__["disable_jit_fuser"]()
        if name in ("megatron.core.optimizer", "megatron.core.optimizer.distrib_optimizer"):
            _use_host_adam(module)
        if name == "megatron.core.tensor_parallel.mappings":  # experts that are split over ranks exchange uneven numbers of tokens
            module.__dict__["torch"] = _torch_proxy()
            module.__dict__["torch"].__dict__["distributed"] = _uneven_collectives()
        if name == "megatron.core.transformer.moe.moe_utils":
            # 0.16 defines it only where transformer-engine is installed, but reads it everywhere (NameError); 0.17 sets it to None
            module.__dict__.setdefault("te_general_gemm", None)
        if name == "megatron.core.transformer.moe.token_dispatcher":
            module.__dict__["maybe_move_tensor_to_cpu"] = _as_sizes(module.__dict__["maybe_move_tensor_to_cpu"])
        if name == "megatron.core.tensor_parallel.random":
            # the one function that goes below torch.cuda: without a driver it would queue the state for ever
            module.__dict__["_set_cuda_rng_state"] = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
            logging.getLogger(name).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())


def _as_sizes(move: Callable[..., Any]) -> Callable[..., Any]:
    """`maybe_move_tensor_to_cpu` makes arrays of tensors on a GPU alone; all_to_all_single takes no tensors as split sizes."""

    @functools.wraps(move)
    def moved(tensor: Any, as_numpy: bool = False, **kwargs: Any) -> Any:
        found = move(tensor, as_numpy=as_numpy, **kwargs)
        return found.numpy() if as_numpy and torch.is_tensor(found) else found

    return moved


def _use_host_adam(module: types.ModuleType) -> None:
    """Give the distributed optimizer an Adam with FusedAdam's state layout, and the flags it sets for FusedAdam.

    torch.optim.AdamW is half supported there: its state_dict asserts before the first step and a resharded checkpoint
    does not load. With this the CPU takes the code path, and writes the checkpoints, of a GPU.
    """
    from slime_ppo.backends.megatron.host_adam import HostAdam

    module.__dict__["Adam"] = HostAdam
    if module.__name__ == "megatron.core.optimizer":
        module.__dict__["USING_PYTORCH_OPTIMIZER"] = False
    else:
        module.__dict__["HAVE_APEX_OR_TE"] = True
        module.__dict__["USING_APEX_OPTIMIZER"] = True
