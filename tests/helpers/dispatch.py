"""What torch is asked to do inside a `with` block: allocations and collectives, counted where every operation passes."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def _tensors(tree: Any) -> Iterator[Tensor]:
    leaves = torch.utils._pytree.tree_leaves(tree)
    return (leaf for leaf in leaves if isinstance(leaf, Tensor))


class Allocations(TorchDispatchMode):
    """Names of the operations whose result is new memory of at least `num_bytes`; views and in-place results are not new."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self.num_bytes = num_bytes
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, kwargs))}
        for tensor in _tensors(results):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in given and storage.nbytes() >= self.num_bytes:
                self.names.append(str(func))
        return results


class Collectives(TorchDispatchMode):
    """Names of the collectives that were called, whichever function of torch.distributed was used."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))
