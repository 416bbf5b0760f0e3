"""Tensors inside the requests of /update_weights_from_tensor, as `load_format` "flattened_bucket" has them.

A server unpickles one entry per rank, and only names on its list. It reads the metadata by attribute, so that no class of its own
is needed. We import no sglang.
"""

import base64
import io
import pickle
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from slime_ppo.weight_sync.bucket import Bucket

if TYPE_CHECKING:
    import torch

_DEVICE_ARGUMENT = 6
_SERVERS_FUNCTION = b"sglang.srt.utils.patch_torch\n_rebuild_cuda_tensor_modified\n"


def inline_payload(bucket: Bucket, flat: np.ndarray) -> str:
    """The bucket's bytes, uint8 [num_bytes], in the entry itself: for servers on a CPU.

    SGLang's own serializer sends a file descriptor of a CPU tensor, which kills a server that is not a child of the sender.
    """
    import torch

    # a copy: torch warns of memory that it must not write to
    content = {"flattened_tensor": torch.from_numpy(flat.copy()), "metadata": _metadata(bucket)}
    return base64.b64encode(pickle.dumps(content)).decode("ascii")


def ipc_payload(bucket: Bucket, flat: "torch.Tensor") -> str:
    """A CUDA IPC handle of the bucket's bytes, uint8 [num_bytes] on a GPU, for the rank of a server on the same GPU.

    `flat` must live until the server has answered. The GPU is named by its UUID, since both processes number those that they see.
    Not run: written after sglang 0.5.23's `patch_torch`, which does the same; torch's expandable segments can't be shared so.
    """
    import torch
    from torch.multiprocessing import reductions

    _, arguments = reductions.reduce_tensor(flat)  # type: ignore[no-untyped-call]
    uuid = str(torch.cuda.get_device_properties(flat.device).uuid)
    named = (*arguments[:_DEVICE_ARGUMENT], uuid, *arguments[_DEVICE_ARGUMENT + 1 :])
    written = io.BytesIO()
    _Pickler(written).dump({"flattened_tensor": _Handle(named), "metadata": _metadata(bucket)})
    return base64.b64encode(written.getvalue()).decode("ascii")


def _metadata(bucket: Bucket) -> list[SimpleNamespace]:
    import torch

    return [
        SimpleNamespace(
            name=spec.name,
            shape=torch.Size(spec.shape),
            dtype=getattr(torch, spec.dtype),
            start_idx=offset,
            end_idx=offset + spec.num_bytes,
            numel=spec.num_bytes,
        )
        for spec, offset in zip(bucket.specs, bucket.offsets, strict=True)
    ]


def _rebuild(*arguments: object) -> None:
    """Stands for the server's function of that purpose, by which name it is pickled."""


class _Handle:
    """Pickled as the tensor that the server makes of these arguments."""

    def __init__(self, arguments: tuple[object, ...]) -> None:
        self._arguments = arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, self._arguments


class _Pickler(pickle._Pickler):
    """Writes a name of sglang's without importing it, which the C version of the class can't."""

    dispatch: ClassVar[dict[Any, Any]] = dict(pickle._Pickler.dispatch)

    def _save_function(self, function: Any) -> None:
        if function is _rebuild:
            self.write(pickle.GLOBAL + _SERVERS_FUNCTION)  # type: ignore[attr-defined]
        else:
            self.save_global(function)  # type: ignore[attr-defined]

    dispatch[type(_rebuild)] = _save_function
