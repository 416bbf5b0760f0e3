"""The CPU shim: megatron.core sees a torch that says "cuda" and computes on the CPU; everybody else sees torch as it is."""

from importlib.util import find_spec
from types import ModuleType

import pytest

from slime_ppo.backends.megatron.device import collective_backend
from tests.helpers.rank_pool import RankPool

HERE = "tests.unit.backends.megatron.test_device"


def test_collective_backend_of_each_device() -> None:
    assert (collective_backend("cpu"), collective_backend("cuda")) == ("gloo", "nccl")


def _prepared_torch() -> ModuleType:
    """torch in a process where megatron.core was imported through the shim."""
    from slime_ppo.backends.megatron.device import prepare_megatron

    prepare_megatron("cpu")
    prepare_megatron("cpu")  # a second call changes nothing
    import megatron.core.models.gpt.gpt_model
    import megatron.core.optimizer.distrib_optimizer  # noqa: F401
    import torch

    return torch


def outside_megatron() -> dict[str, object]:
    torch = _prepared_torch()
    found: dict[str, object] = {"type": torch.zeros(1).type(), "double": torch.zeros(1).type(torch.float64).dtype}
    for name, call in {
        "zeros": lambda: torch.zeros(1, device="cuda"),
        "cuda": lambda: torch.zeros(1).cuda(),
        "current_device": lambda: torch.cuda.current_device(),
    }.items():
        try:
            found[name] = call()
        except (RuntimeError, AssertionError) as error:
            found[name] = type(error).__name__
    found["available"] = torch.cuda.is_available()
    return found


def inside_megatron() -> dict[str, object]:
    """The same calls made by code whose module is one of megatron.core's."""
    _prepared_torch()
    import megatron.core.optimizer.optimizer as module

    source = """
def probe():
    x = torch.zeros(2, device="cuda")
    pinned = x.pin_memory()
    pinned += 1
    moved = torch.tensor([1.0], device=torch.cuda.current_device())
    return {
        "device": str(x.device), "type": x.type(), "same": x.cuda() is x, "untouched": float(x.sum()),
        "moved": str(moved.device), "pin": bool(torch.empty(1, pin_memory=True).is_pinned()), "streams": torch.cuda.device_count(),
        "type_with_argument": str(x.type(torch.float64).dtype),
    }
"""
    namespace = dict(vars(module))
    exec(source, namespace)
    return namespace["probe"]()


def optimizer_names() -> tuple[str, str, bool]:
    _prepared_torch()
    import megatron.core.optimizer as package
    import megatron.core.optimizer.distrib_optimizer as distributed

    return package.Adam.__name__, distributed.Adam.__name__, bool(distributed.HAVE_APEX_OR_TE)


def slow_imports_of_megatron() -> dict[str, object]:
    _prepared_torch()
    import megatron.core.jit as jit
    import megatron.core.timers as timers

    return {"fuser": jit.jit_fuser.__name__, "wandb": timers.wandb}


def test_shim_megatron_imports_neither_torchs_compiler_nor_wandb(rank_pool: RankPool) -> None:
    """Both are installed, and together cost each rank as much time as all that it needs."""
    assert find_spec("wandb") is not None
    assert rank_pool.run(f"{HERE}:slow_imports_of_megatron", world=1)[0] == {"fuser": "noop_decorator", "wandb": None}


def collected_after_the_imports_of_a_rank() -> tuple[bool, bool]:
    import gc

    from slime_ppo.orchestration.rank_role import import_megatron

    gc.unfreeze()
    import_megatron("cpu")
    return gc.isenabled(), len(gc.get_objects()) < 10_000 < gc.get_freeze_count()


def test_rank_collects_garbage_without_looking_through_its_imports(rank_pool: RankPool) -> None:
    assert rank_pool.run(f"{HERE}:collected_after_the_imports_of_a_rank", world=1) == [(True, True)]


def test_shim_torch_outside_megatron_is_unchanged(rank_pool: RankPool) -> None:
    found = rank_pool.run(f"{HERE}:outside_megatron", world=1)[0]
    if found["available"]:
        pytest.fail("these tests are for machines without a GPU; tests/gpu has the others")
    assert found["type"] == "torch.FloatTensor" and str(found["double"]) == "torch.float64"
    assert all(found[name] in ("RuntimeError", "AssertionError") for name in ("zeros", "cuda", "current_device"))


def test_shim_torch_inside_megatron_runs_on_the_cpu_and_pins_by_copying(rank_pool: RankPool) -> None:
    """A pinned tensor that were the tensor itself would let an offload destroy the weights."""
    assert rank_pool.run(f"{HERE}:inside_megatron", world=1)[0] == {
        "device": "cpu",
        "type": "torch.cuda.FloatTensor",
        "same": True,
        "untouched": 0.0,
        "moved": "cpu",
        "pin": False,
        "streams": 1,
        "type_with_argument": "torch.float64",
    }


def test_shim_megatrons_optimizer_gets_the_host_adam(rank_pool: RankPool) -> None:
    assert rank_pool.run(f"{HERE}:optimizer_names", world=1)[0] == ("HostAdam", "HostAdam", True)
