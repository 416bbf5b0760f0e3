"""Entries of update requests hold nothing that a server refuses to unpickle, by the list in the installed SGLang's source."""

import ast
import base64
import importlib.util
import io
import pickle
import pickletools
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch.multiprocessing import reductions

from slime_ppo.rollout.sglang.payload import inline_payload, ipc_payload
from slime_ppo.weight_sync.bucket import TensorSpec, plan_buckets

SPECS = [TensorSpec("w", (2, 3), "float32"), TensorSpec("half", (3,), "bfloat16")]
(BUCKET,) = plan_buckets(SPECS, 1000)
PACKAGE = Path(str(next(iter(importlib.util.find_spec("sglang").submodule_search_locations))))  # type: ignore[union-attr, arg-type]


@pytest.fixture(scope="module")
def allowed() -> set[tuple[str, str]]:
    """What SafeUnpickler finds: its list, and torch's storages, for which it has a function of its own."""
    source = ast.parse((PACKAGE / "srt" / "utils" / "common.py").read_text())
    [unpickler] = [node for node in source.body if isinstance(node, ast.ClassDef) and node.name == "SafeUnpickler"]
    [names] = [node for node in unpickler.body if isinstance(node, ast.Assign)]
    return set(ast.literal_eval(names.value)) | {("torch.storage", "_load_from_bytes")}


class Unpickler(pickle.Unpickler):
    """Remembers which names it looked up; sglang's are not imported."""

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content))
        self.found: set[tuple[str, str]] = set()

    def find_class(self, module: str, name: str) -> Any:
        self.found.add((module, name))
        return (lambda *arguments: arguments) if module.startswith("sglang") else super().find_class(module, name)


def opened(payload: str) -> tuple[Any, set[tuple[str, str]]]:
    unpickler = Unpickler(base64.b64decode(payload))
    return unpickler.load(), unpickler.found


def test_inline_payload_holds_the_bytes_and_names_that_servers_allow(allowed: set[tuple[str, str]]) -> None:
    flat = np.arange(BUCKET.num_bytes, dtype=np.uint8)
    flat.setflags(write=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        content, found = opened(inline_payload(BUCKET, flat))
    assert found <= allowed and len(found) > 3
    assert content["flattened_tensor"].tolist() == flat.tolist()
    [w, half] = content["metadata"]
    assert (w.name, w.shape, w.dtype, w.start_idx, w.end_idx, w.numel) == ("w", (2, 3), torch.float32, 0, 24, 24)
    assert (half.name, half.dtype, half.start_idx, half.end_idx) == ("half", torch.bfloat16, 24, 30)


def test_inline_payload_of_a_part_of_a_larger_array_holds_that_part_alone() -> None:
    whole = np.zeros(1_000_000, np.uint8)
    assert len(inline_payload(BUCKET, whole[: BUCKET.num_bytes])) < 3000


def test_ipc_payload_names_sglangs_function_and_the_gpu_by_its_uuid(allowed: set[tuple[str, str]]) -> None:
    """torch's own reduction of a GPU's tensor is played: a CPU has none."""
    handle = (
        torch.Tensor,
        (30,),
        (1,),
        0,
        torch.UntypedStorage,
        torch.uint8,
        3,
        b"handle",
        512,
        64,
        False,
        b"counter",
        1,
        b"event",
        True,
    )
    properties = SimpleNamespace(uuid="GPU-77")
    with (
        patch.object(reductions, "reduce_tensor", lambda tensor: (reductions.rebuild_cuda_tensor, handle)),
        patch.object(torch.cuda, "get_device_properties", lambda device: properties),
    ):
        payload = ipc_payload(BUCKET, torch.zeros(BUCKET.num_bytes, dtype=torch.uint8))
    content, found = opened(payload)
    assert found <= allowed
    assert ("sglang.srt.utils.patch_torch", "_rebuild_cuda_tensor_modified") in found
    assert content["flattened_tensor"] == (*handle[:6], "GPU-77", *handle[7:])
    assert [entry.name for entry in content["metadata"]] == ["w", "half"]
    pickletools.dis(base64.b64decode(payload), out=io.StringIO())
