"""The Triton kernels of ppo_utils on one GPU: equal to plain torch there, and how long they take. Needs CUDA; pytest does not
collect it.

python tests/gpu/check_kernels.py        # exit code 1 when an error passes its tolerance
python tests/gpu/check_kernels.py --device cpu --tokens 32 --vocab 1000     # the script itself; both sides are plain torch

Errors are against float64 on the same device, of log-probs, entropy and gradient. Times are the least of several runs, and
beside them the time of three passes over the logits at copy speed (facts of the field: two reads and a write).
"""

import argparse
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from unittest.mock import patch

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from slime_ppo.ppo_utils.top_p import TokenSupports, support_and_vocab_log_probs
from slime_ppo.ppo_utils.vocab_parallel import vocab_log_probs

LOG = logging.getLogger("check_kernels")
# of log-probs and entropies; and of gradients, relative to the largest: two roundings of bfloat16
TOLERANCE = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (1e-5, 8e-3)}
KERNEL_USERS = ("slime_ppo.ppo_utils.vocab_rows.has_kernels", "slime_ppo.ppo_utils.support_rows.has_kernels")

Scored = tuple[list[Tensor], Tensor]


def score(logits: Tensor, labels: Tensor, supports: TokenSupports | None, upstream: Tensor) -> Scored:
    """Log-probs and entropies, and the gradient of their sum weighed by `upstream` [3, T]."""
    logits = logits.detach().requires_grad_()
    # the last columns are padding
    common = {"vocab_size": logits.shape[1] - 5, "temperature": 0.8, "group": None, "entropy": "grad"}
    if supports is None:
        out = vocab_log_probs(logits, labels, **common)
        figures = [out.log_probs, out.entropy]
    else:
        both = support_and_vocab_log_probs(logits, labels, supports, **common)
        figures = [both.log_probs, both.full_log_probs, both.entropy]
    torch.stack(figures).mul(upstream[: len(figures)]).sum().backward()
    return [figure.detach() for figure in figures], logits.grad


def best_ms(run: Callable[[], object], device: str) -> float:
    def once() -> float:
        started = perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        return 1000 * (perf_counter() - started)

    once()
    return min(once() for _ in range(7))


def check(name: str, logits: Tensor, labels: Tensor, supports: TokenSupports | None, upstream: Tensor) -> bool:
    """Report one case; True when kernels and plain torch are both within the tolerance."""
    device, within = logits.device.type, True
    exact, exact_gradient = score(logits.double(), labels, supports, upstream.double())
    exact_gradient = exact_gradient.float()
    limits = TOLERANCE[logits.dtype]

    def run() -> Scored:
        return score(logits, labels, supports, upstream)

    for way, kernels in (("kernels", device == "cuda"), ("plain torch", False)):
        with patch(KERNEL_USERS[0], return_value=kernels), patch(KERNEL_USERS[1], return_value=kernels):
            figures, gradient = run()
            time = best_ms(run, device)
        errors = [float((own - other).abs().max()) for own, other in zip(figures, exact, strict=True)]
        gradient_error = float((gradient.float() - exact_gradient).abs().max() / exact_gradient.abs().max())
        passed = max(errors) <= limits[0] and gradient_error <= limits[1]
        within = within and passed
        LOG.info(
            f"{name:24s} {way:12s} error {max(errors):.1e}, gradient {gradient_error:.1e}, forward + backward {time:.2f} ms"
            f"{'' if passed else '  FAILED'}"
        )
    copy = best_ms(lambda: torch.empty_like(logits).copy_(logits), device)
    LOG.info(f"{name:24s} three passes at copy speed: {1.5 * copy:.2f} ms")
    return within


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=151936)
    arguments = parser.parse_args()
    logging.basicConfig(format="%(message)s", stream=sys.stdout, level=logging.INFO)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device here; the kernels' equality on a CPU is tested in Triton's interpreter by the unit tests")
    device, tokens, vocab = arguments.device, arguments.tokens, arguments.vocab
    torch.manual_seed(0)
    labels = torch.randint(vocab - 5, (tokens,), device=device)
    counts = torch.randint(0, 64, (tokens,), device=device)
    ids = torch.cat([torch.randperm(vocab - 5, device=device)[:count] for count in counts.tolist()])
    supports = TokenSupports(ids, counts)
    upstream = torch.randn((3, tokens), device=device)
    passed = True
    for dtype in TOLERANCE:
        logits = (3 * torch.randn((tokens, vocab), device=device)).to(dtype)
        for name, given in (("vocab_log_probs", None), ("support_and_vocab", supports)):
            passed = check(f"{name} {str(dtype).removeprefix('torch.')}", logits, labels, given, upstream) and passed
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
