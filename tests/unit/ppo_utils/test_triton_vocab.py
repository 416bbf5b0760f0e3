"""The Triton kernels of the vocabulary rows: equal to plain torch (in Triton's interpreter, on the CPU), chosen by device,
and accepted by the compiler for a GPU. No GPU is needed."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from slime_ppo.ppo_utils.triton_kernels import has_kernels
from tests.helpers.vocab_cases import CASES, run, run_autograd

REPOSITORY = Path(__file__).resolve().parents[3]
COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from slime_ppo.ppo_utils.triton_kernels import vocab

PER_ROW = dict(columns="*i64", lse="*fp32", entropy="*fp32", grad_log_probs="*fp32", grad_entropy="*fp32", stats="*fp32")
TYPES = PER_ROW | dict(logits="*bf16", grad="*bf16", num_real="i32", width="i32", scale="fp32", temperature="fp32")
FIXED = dict(WITH_ENTROPY=True, BLOCK=8192, column_stride=1, grad_column_stride=1)
for kernel in (vocab._row_statistics_kernel, vocab._dense_gradient_kernel):
    names = kernel.arg_names
    signature = {name: "constexpr" if name in FIXED else TYPES.get(name, "i64") for name in names}
    source = ASTSource(fn=kernel, signature=signature, constexprs={name: FIXED[name] for name in names if name in FIXED})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 16})
    print(compiled.metadata.name, "cubin" in compiled.asm)
"""


def _python(*arguments: str, **environment: str) -> str:
    """Output of a fresh interpreter in the repository."""
    shared = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=os.environ | shared | environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def by_kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Tensor]]:
    """Results of every case by the kernels; Triton decides at its import whether to interpret, hence the process."""
    path = tmp_path_factory.mktemp("kernels") / "results.pt"
    _python("-m", "tests.helpers.vocab_cases", str(path), TRITON_INTERPRET="1")
    results: dict[str, dict[str, Tensor]] = torch.load(path)
    return results


@pytest.mark.parametrize("name", CASES)
def test_kernels_statistics_and_log_probs_equal_plain_torch(name: str, by_kernels: dict[str, dict[str, Tensor]]) -> None:
    found, expected = by_kernels[name], run(CASES[name])
    assert torch.allclose(found["log_probs"], expected["log_probs"], rtol=1e-6, atol=2e-6, equal_nan=True)
    # a row with a NaN has NaN sums either way, but the maximum over it may leave the NaN out
    sound = ~expected["stats"].isnan().any(-1)
    assert torch.allclose(found["stats"][sound], expected["stats"][sound], rtol=1e-5, atol=1e-6)
    assert found["stats"][~sound, 1].isnan().all()


@pytest.mark.parametrize("name", CASES)
def test_kernels_gradients_equal_plain_torch(name: str, by_kernels: dict[str, dict[str, Tensor]]) -> None:
    case, found, expected = CASES[name], by_kernels[name]["grad"], run(CASES[name])["grad"]
    assert found.dtype == case.dtype and found.stride() == expected.stride()
    assert found[:, case.num_real :].eq(0).all() and found[1:3].eq(0).all()
    # one unit in the last place of the logits' dtype, where a sum falls on the other side of a rounding boundary
    assert torch.allclose(found.double(), expected.double(), rtol=4 * torch.finfo(case.dtype).eps, atol=1e-6)


@pytest.mark.parametrize("overwrite", [False, True])
def test_kernels_under_autograd_equal_plain_torch(overwrite: bool, by_kernels: dict[str, dict[str, Tensor]]) -> None:
    found, expected = by_kernels[f"autograd_{overwrite}"], run_autograd(overwrite=overwrite)
    for key in ("log_probs", "entropy", "grad"):
        assert torch.allclose(found[key], expected[key], rtol=1e-5, atol=2e-6, equal_nan=True), key
    # autograd counts writes to a tensor; the kernel's must be among them
    assert found["told"].item() is expected["told"].item() is overwrite


def test_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    output = _python("-c", COMPILE, TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    assert output.splitlines() == ["_row_statistics_kernel True", "_dense_gradient_kernel True"]


@pytest.mark.parametrize(
    ("is_cuda", "dtype", "expected"),
    [(True, torch.bfloat16, True), (True, torch.float32, True), (True, torch.float64, False), (False, torch.float32, False)],
)
def test_kernels_are_taken_for_cuda_tensors_only(is_cuda: bool, dtype: torch.dtype, expected: bool) -> None:
    assert has_kernels(SimpleNamespace(is_cuda=is_cuda, dtype=dtype)) is expected  # type: ignore[arg-type]


def test_kernels_without_triton_fall_back_to_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime_ppo.ppo_utils.triton_kernels.find_spec", lambda name: None)
    assert not has_kernels(SimpleNamespace(is_cuda=True, dtype=torch.float32))  # type: ignore[arg-type]


def test_vocab_log_probs_works_where_triton_cannot_be_imported() -> None:
    code = "import sys, torch; sys.modules['triton'] = None\n"  # an import of it raises ModuleNotFoundError
    code += "from slime_ppo.ppo_utils.vocab_parallel import vocab_log_probs\n"
    code += "x = torch.zeros(1, 2, requires_grad=True)\n"
    code += "y = vocab_log_probs(x, torch.tensor([0]), vocab_size=2, temperature=1.0, group=None, entropy='grad')\n"
    code += "y.log_probs.sum().backward(); print(x.grad.tolist())"
    assert _python("-c", code).strip() == "[[0.5, -0.5]]"
