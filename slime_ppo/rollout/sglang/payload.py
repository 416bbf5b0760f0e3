"""Tensors inside the requests of /update_weights_from_tensor."""

import base64
import pickle
from types import SimpleNamespace

import numpy as np

from slime_ppo.weight_sync.bucket import Bucket


def inline_payload(bucket: Bucket, flat: np.ndarray) -> str:
    """A bucket's bytes as one rank's entry of `serialized_named_tensors`, for `load_format` "flattened_bucket".

    SGLang's own serializer sends a file descriptor of a CPU tensor, which kills a server that is not a child of the sender; a
    plain pickle carries the bytes. The server reads the metadata by attribute, so that no class of its own is needed.
    """
    import torch

    metadata = [
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
    # a copy: what is pickled is the whole memory behind a tensor, and torch can't hold read-only memory
    content = {"flattened_tensor": torch.from_numpy(flat.copy()), "metadata": metadata}
    return base64.b64encode(pickle.dumps(content)).decode("ascii")
