"""Our hashes against those of the installed SGLang: its Triton kernel runs in Triton's interpreter, in a process of its own."""

import ast
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from slime_ppo.rollout.sglang.tensor_hash import tensor_hash

PACKAGE = Path(str(next(iter(importlib.util.find_spec("sglang").submodule_search_locations))))  # type: ignore[union-attr, arg-type]
# bytes: less than a word, several words, a whole tile of 8192 words and one more byte, several tiles and a part of one
SIZES = (3, 1000, 32769, 80_001)

INTERPRETED = """
import importlib.util, json, os, sys
os.environ["TRITON_INTERPRET"] = "1"
import numpy as np, torch
spec = importlib.util.spec_from_file_location("gpu_tensor_hash", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
def words(tensor):
    content = tensor.contiguous().reshape(-1).view(torch.uint8)
    return torch.nn.functional.pad(content, (0, -len(content) % 4)).view(torch.uint32)
module._as_uint32_words = words
class Tensor:  # says that it is where the kernel wants it
    is_cuda = True
    def __init__(self, tensor): self.tensor = tensor
    def __getattr__(self, name): return getattr(self.tensor, name)
found = []
for size in json.loads(sys.argv[2]):
    content = np.random.default_rng(size).integers(0, 256, size).astype(np.uint8)
    found.append(f"{module.gpu_tensor_hash(Tensor(torch.from_numpy(content)), use_cg=False):016x}")
print(json.dumps(found))
"""


def content(size: int) -> np.ndarray:
    return np.random.default_rng(size).integers(0, 256, size).astype(np.uint8)


def test_cuda_hash_is_that_of_sglangs_kernel() -> None:
    kernel = PACKAGE / "kernels" / "ops" / "memory" / "gpu_tensor_hash.py"
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED, str(kernel), json.dumps(SIZES)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    ours = tensor_hash("cuda")
    assert [ours(content(size)) for size in SIZES] == json.loads(done.stdout.splitlines()[-1])
    assert ours(np.zeros(0, np.float32)) == "0" * 16


def test_cpu_hash_is_that_of_sglangs_source() -> None:
    """The function is taken out of its module, whose import takes seconds."""
    source = (PACKAGE / "srt" / "managers" / "mm_utils.py").read_text()
    [function] = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == "tensor_hash"]
    import hashlib

    import torch

    names: dict = {"torch": torch, "hashlib": hashlib}
    exec(compile(ast.Module([function], []), "mm_utils.py", "exec"), names)
    ours = tensor_hash("cpu")
    for size in SIZES:
        assert ours(content(size)) == f"{names['tensor_hash'](torch.from_numpy(content(size))):016x}"
    matrix = content(24).reshape(4, 6)
    assert ours(matrix.T) == f"{names['tensor_hash'](torch.from_numpy(matrix).T):016x}" != ours(matrix)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_hash_sees_every_word_and_its_place(device: str) -> None:
    ours, whole = tensor_hash(device), content(80_000)  # type: ignore[arg-type]
    seen = {ours(whole)}
    for changed in (0, 40_000, 79_999):
        other = whole.copy()
        other[changed] ^= 1
        seen.add(ours(other))
    swapped = whole.copy()
    swapped[:4], swapped[4:8] = whole[4:8], whole[:4]
    assert len(seen | {ours(swapped)}) == 5
