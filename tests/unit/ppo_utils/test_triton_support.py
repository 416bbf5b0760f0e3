"""The Triton kernels against the plain torch functions that define the result, in Triton's interpreter on a CPU.

The interpreter is chosen when triton is imported, so that the kernels run in a process of their own.
"""

import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from slime_ppo.ppo_utils import support_rows, top_p
from slime_ppo.ppo_utils.support_rows import RowGradients, TokenSupports
from slime_ppo.ppo_utils.vocab_parallel import VocabShard

REPOSITORY = Path(__file__).resolve().parents[3]
VOCAB, NUM_TOKENS = 400, 6
# more ids than a program handles at a time, exactly as many with and without the label, one, none
COUNTS = (150, 64, 63, 3, 1, 0)


@dataclass(frozen=True)
class Case:
    """Columns [start, start + width) of the vocabulary."""

    dtype: torch.dtype = torch.float32
    temperature: float = 1.0
    start: int = 0
    width: int = VOCAB
    id_dtype: torch.dtype = torch.int64
    is_view: bool = False
    bad_value: float = 0.0

    @property
    def shard(self) -> VocabShard:
        return VocabShard(self.start, min(max(VOCAB - self.start, 0), self.width), None)


CASES = {
    "whole": Case(),
    "temperature": Case(temperature=0.7),
    "bfloat16": Case(dtype=torch.bfloat16),
    "first shard": Case(width=100),
    "shard with padding": Case(start=300, width=120),
    "shard of padding only": Case(start=400, width=20),
    "int32 ids": Case(id_dtype=torch.int32),
    "view with gaps": Case(is_view=True),
    "minus infinity": Case(bad_value=-math.inf),
    "nan": Case(bad_value=math.nan),
}


def _inputs(case: Case) -> tuple[Tensor, Tensor, TokenSupports]:
    """Logits [T, width], labels of which some are in their support, supports in random order."""
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randperm(VOCAB, generator=generator)[:count] for count in COUNTS]
    labels = torch.tensor([int(ids[0][100]), int(ids[1][0]), int(ids[2][-1]) ^ 1, 7, int(ids[4][0]), 399])
    logits = 3 * torch.randn((NUM_TOKENS, 2 * case.width), generator=generator, dtype=torch.float64)
    logits[1, ::4] = case.bad_value
    logits = logits.to(case.dtype)
    logits = logits[:, ::2] if case.is_view else logits[:, : case.width].contiguous()
    return logits, labels, TokenSupports(torch.cat(ids).to(case.id_dtype), torch.tensor(COUNTS))


def _run(case: Case) -> dict[str, Tensor]:
    logits, labels, supports = _inputs(case)
    stats = support_rows.support_statistics(logits, labels, supports, case.shard, temperature=case.temperature)
    generator = torch.Generator().manual_seed(2)
    top, log_sum, entropy, g_lp, g_h = torch.randn((5, NUM_TOKENS), generator=generator)
    # row 1 may be NaN or -inf: it has no gradient from upstream; row 3 has one of the two
    g_lp[1] = g_h[1] = g_lp[3] = 0.0
    rows = RowGradients(torch.stack([top + 8, log_sum], -1), entropy, g_lp, g_h)
    grad = torch.ones((NUM_TOKENS, case.width), dtype=case.dtype)
    support_rows.add_support_gradient(grad, logits, labels, supports, case.shard, rows=rows, temperature=case.temperature)
    return {"stats": stats, "grad": grad}


def _public() -> dict[str, Tensor]:
    """Through the public functions, with an unrestricted row."""
    logits, labels, supports = _inputs(Case())
    supports = TokenSupports(supports.ids, supports.counts, torch.arange(NUM_TOKENS) == NUM_TOKENS - 1)
    options = {"vocab_size": VOCAB, "temperature": 0.7, "group": None, "entropy": "grad"}
    found = {}
    for name, run in (("sparse", top_p.support_log_probs), ("both", top_p.support_and_vocab_log_probs)):
        leaf = logits.clone().requires_grad_()
        out = run(leaf, labels, supports, **options)
        (out.log_probs.sum() - out.entropy.sum()).backward()
        found |= {f"{name} log_probs": out.log_probs.detach(), f"{name} entropy": out.entropy.detach(), f"{name} grad": leaf.grad}
    return found


def write_results(path: str) -> None:
    """In the interpreter: what every case gives when the kernels are taken."""
    guard = mock.patch.object(torch.cuda, "device_of", wraps=torch.cuda.device_of)
    with mock.patch.object(support_rows, "has_kernels", return_value=True) as asked, guard as guarded:
        results = {name: _run(case) for name, case in CASES.items()} | {"public": _public()}
    # each launch goes to the device of its logits, which need not be the current one
    assert asked.call_count == guarded.call_count == 2 * len(CASES) + 4
    torch.save(results, path)


def compile_kernels() -> None:
    """Down to the machine code of a GPU, which needs none: the interpreter lets pass what the compiler refuses."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from slime_ppo.ppo_utils.triton_kernels import support

    integers = dict.fromkeys(("row_stride", "column_stride", "start", "num_real"), "i32")
    common = {"logits": "*bf16", **dict.fromkeys(("labels", "ids", "ends", "counts"), "*i64"), **integers, "temperature": "fp32"}
    per_row = dict.fromkeys(("lse", "entropy", "grad_log_probs", "grad_entropy"), "*fp32")
    for kernel, types in (
        (support._statistics, {"stats": "*fp32"}),
        (support._gradient, {"grad": "*bf16", "grad_stride": "i32", **per_row}),
    ):
        signature = {**common, **types, "BLOCK": "constexpr"}
        ordered = {name: signature[name] for name in kernel.arg_names}
        source = ASTSource(kernel, ordered, constexprs={"BLOCK": 64})
        assert "ptx" in triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm


def _in_a_process(call: str, **environment: str) -> None:
    code = f"from {__name__} import {call.split('(')[0]}; {call}"
    variables = os.environ | {"PYTHONPATH": str(REPOSITORY)} | environment
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def kernel_results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Tensor]]:
    path = tmp_path_factory.mktemp("triton") / "results.pt"
    _in_a_process(f"write_results({str(path)!r})", TRITON_INTERPRET="1")
    return torch.load(path)


def _close(found: Tensor, expected: Tensor) -> bool:
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 1e-2}[found.dtype]
    return torch.allclose(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("name", CASES)
def test_support_kernels_equal_plain_torch(kernel_results: dict[str, dict[str, Tensor]], name: str) -> None:
    found, expected = kernel_results[name], _run(CASES[name])
    assert _close(found["grad"], expected["grad"])
    # the maximum of a row that holds NaN is not defined; its sum is NaN on both sides
    rows = [0, 2, 3, 4, 5] if name == "nan" else list(range(NUM_TOKENS))
    assert _close(found["stats"][rows], expected["stats"][rows])
    if name == "nan":
        assert torch.isnan(found["stats"][1, 1]) and torch.isnan(expected["stats"][1, 1])
    assert found["grad"][1].eq(1).all()


@pytest.mark.parametrize(
    "name", ["sparse log_probs", "sparse entropy", "sparse grad", "both log_probs", "both entropy", "both grad"]
)
def test_support_log_probs_with_kernels_equal_plain_torch(kernel_results: dict[str, dict[str, Tensor]], name: str) -> None:
    assert _close(kernel_results["public"][name], _public()[name])


def test_support_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    _in_a_process("compile_kernels()", TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))


def test_support_kernels_are_left_alone_on_a_cpu() -> None:
    assert not support_rows.has_kernels(torch.zeros(1, 1))
