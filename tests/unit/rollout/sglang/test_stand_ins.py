"""The stand-ins compute what the functions they stand for compute."""

import importlib
import os
import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from slime_ppo.rollout.sglang import serve, stand_ins


def test_assign_req_to_token_pool_writes_each_requests_slots_into_its_row() -> None:
    table = torch.zeros(3, 6, dtype=torch.int32)
    slots = torch.tensor([11, 12, 13, 14, 15])
    stand_ins.assign_req_to_token_pool(torch.tensor([2, 0]), table, torch.tensor([1, 0]), torch.tensor([4, 2]), slots)
    assert table.tolist() == [[14, 15, 0, 0, 0, 0], [0] * 6, [0, 11, 12, 13, 0, 0]]


def _murmur3_32(content: bytes) -> int:
    """MurmurHash3_x86_32 with seed 0, as Austin Appleby published it, for whole 4-byte blocks."""
    mixed = 0
    for at in range(0, len(content), 4):
        block = int.from_bytes(content[at : at + 4], "little") * 0xCC9E2D51 & 0xFFFFFFFF
        block = ((block << 15) | (block >> 17)) * 0x1B873593 & 0xFFFFFFFF
        mixed ^= block
        mixed = (((mixed << 13) | (mixed >> 19)) & 0xFFFFFFFF) * 5 + 0xE6546B64 & 0xFFFFFFFF
    mixed ^= len(content)
    mixed = (mixed ^ (mixed >> 16)) * 0x85EBCA6B & 0xFFFFFFFF
    mixed = (mixed ^ (mixed >> 13)) * 0xC2B2AE35 & 0xFFFFFFFF
    return mixed ^ (mixed >> 16)


def test_murmur_hash_equals_the_published_one() -> None:
    """The scalar reference is checked on a published value: the hash of b"test" with seed 0 is 0xba6bd213."""
    assert _murmur3_32(b"test") == 0xBA6BD213
    seeds, positions, columns = [0, 7, 2**40 + 3], [0, 5, 1000], [0, 1, 31999]
    found = stand_ins.murmur_hash32(torch.tensor(seeds), torch.tensor(positions), torch.tensor(columns))
    blocks = [
        [s.to_bytes(8, "little") + p.to_bytes(4, "little") + c.to_bytes(4, "little") for c in columns]
        for s, p in zip(seeds, positions, strict=True)
    ]
    assert found.dtype == torch.uint32
    np.testing.assert_array_equal(found.numpy(), [[_murmur3_32(block) for block in row] for row in blocks])


def test_install_sgl_kernel_other_functions_say_that_they_need_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sgl_kernel", None)  # type: ignore[arg-type]
    stand_ins.install_sgl_kernel()
    module = sys.modules["sgl_kernel"]
    assert module.assign_req_to_token_pool_cpu is stand_ins.assign_req_to_token_pool
    with pytest.raises(NotImplementedError, match="sgl_kernel.fused_moe has no stand-in for CPUs"):
        module.fused_moe()


@pytest.mark.parametrize(
    ("argv", "installed"),
    [
        (["serve", "1", "--device", "cuda", "--enable-deterministic-inference"], []),
        (["serve", "1", "--device", "cpu"], ["torchvision", "sgl_kernel", "no megatron", "attention"]),
        (
            ["serve", "1", "--device", "cpu", "--enable-deterministic-inference"],
            ["torchvision", "sgl_kernel", "no megatron", "attention", "seeds"],
        ),
    ],
)
def test_install_stand_ins_only_on_a_cpu(argv: Sequence[str], installed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(stand_ins, "install_torchvision", lambda: calls.append("torchvision"))
    monkeypatch.setattr(stand_ins, "install_sgl_kernel", lambda: calls.append("sgl_kernel"))
    monkeypatch.setattr(stand_ins, "hide_megatron", lambda: calls.append("no megatron"))
    monkeypatch.setattr(stand_ins, "admit_batched_attention", lambda: calls.append("attention"))
    monkeypatch.setattr(stand_ins, "allow_seeds", lambda: calls.append("seeds"))
    serve.install_stand_ins(argv)
    assert calls == installed


def test_hide_megatron_lets_its_import_fail_as_if_it_were_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron", None)  # type: ignore[arg-type]
    monkeypatch.delitem(sys.modules, "megatron")
    stand_ins.hide_megatron()
    with pytest.raises(ImportError):
        importlib.import_module("megatron")


NAMED = """
import os
from slime_ppo.rollout.sglang.serve import name_processes
name_processes()
os.environ["FIRST"] = "longer than before"
from setproctitle import setproctitle
setproctitle("sglang::scheduler")
print(open("/proc/self/cmdline").read().strip("\\0 "))
"""


def test_process_gets_its_name_though_a_variable_was_changed() -> None:
    """The symptom: with TORCHINDUCTOR_CACHE_DIR set nobody watched the scheduler, since its process had no name to find it by."""
    environment = {"FIRST": "1", **os.environ}
    done = subprocess.run([sys.executable, "-c", NAMED], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "sglang::scheduler"
