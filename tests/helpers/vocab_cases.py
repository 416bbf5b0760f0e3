"""Cases of the row functions of vocab_rows, for plain torch and the Triton kernels; what ranks run for test_vocab_parallel.

As a program (with TRITON_INTERPRET=1 in its environment) it runs every case by the kernels and saves the results:

    python -m tests.helpers.vocab_cases RESULTS
"""

import math
import sys
from dataclasses import dataclass, replace
from typing import Literal
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from slime_ppo.ppo_utils import vocab_rows
from slime_ppo.ppo_utils.vocab_parallel import VocabShard, dense_gradient, merge_rows, row_statistics, vocab_log_probs
from tests.helpers.dispatch import Collectives

Rows = Literal["random", "rising", "non_contiguous", "special"]


@dataclass(frozen=True)
class Case:
    """Logits [num_tokens, width] of one shard that holds the ids [start, start + num_real)."""

    num_tokens: int = 5
    width: int = 20_000
    start: int = 0
    num_real: int = 20_000
    dtype: torch.dtype = torch.float32
    temperature: float = 1.0
    entropy: Literal["none", "metric", "grad"] = "grad"
    overwrite: bool = False
    rows: Rows = "random"

    def logits(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.width)
        x = 3 * torch.randn((self.num_tokens, self.width), generator=generator)
        if self.rows == "rising":
            x = x.sort(-1).values * 20  # each block of columns has a higher maximum than the one before
        if self.rows == "special":
            x[0, ::2] = -math.inf
            x[1] = -math.inf
            x[2, 7] = math.nan
            x[3] += 1e4
            x[4, 3] = -1e4
        x[:, self.num_real :] = math.nan
        x = x.to(self.dtype)
        return x.t().contiguous().t() if self.rows == "non_contiguous" else x

    def labels(self) -> Tensor:
        """Ids of this shard, but one before it and one after it."""
        labels = self.start + torch.arange(self.num_tokens) * 6007 % max(self.num_real, 1)
        labels[-1:] = self.start + self.num_real
        labels[-2:-1] = self.start - 1
        return labels

    def upstream(self) -> tuple[Tensor, Tensor]:
        """Gradients of log-probs and entropies, zero for rows 1 and 2."""
        generator = torch.Generator().manual_seed(1)
        g = torch.randn((2, self.num_tokens), generator=generator)
        g[:, 1:3] = 0
        return g[0], g[1]


_MIXED = Case(num_real=19_990, start=40, temperature=0.7)
CASES: dict[str, Case] = {
    "one_block": Case(width=300, num_real=300),
    "three_blocks": Case(),
    "rising_maxima": replace(_MIXED, rows="rising"),
    "padding_and_temperature": _MIXED,
    "no_entropy": replace(_MIXED, entropy="none"),
    "entropy_as_metric": replace(_MIXED, entropy="metric"),
    "bf16": replace(_MIXED, dtype=torch.bfloat16),
    "fp16": replace(_MIXED, dtype=torch.float16),
    "non_contiguous": replace(_MIXED, rows="non_contiguous"),
    "special_values": replace(_MIXED, rows="special"),
    "special_values_no_entropy": replace(_MIXED, rows="special", entropy="none"),
    "overwritten": replace(_MIXED, overwrite=True),
    "overwritten_bf16_non_contiguous": replace(_MIXED, overwrite=True, dtype=torch.bfloat16, rows="non_contiguous"),
    "overwritten_special": replace(_MIXED, overwrite=True, rows="special", entropy="none"),
    "one_column": Case(width=1, num_real=1),
    "padding_only": Case(width=9, num_real=0, start=40),
    "no_tokens": Case(num_tokens=0),
}


def run(case: Case) -> dict[str, Tensor]:
    """Statistics, log-probs and gradient of a case."""
    logits, labels = case.logits(), case.labels()
    shard = VocabShard(start=case.start, num_real=case.num_real, group=None)
    with_entropy = case.entropy != "none"
    stats = row_statistics(logits, labels, shard, temperature=case.temperature, with_entropy=with_entropy)
    totals = merge_rows(stats[None], temperature=case.temperature)
    g_lp, g_h = case.upstream()
    grad = dense_gradient(
        logits,
        labels,
        shard,
        totals.lse(case.temperature),
        totals.entropy,
        temperature=case.temperature,
        grad_log_probs=g_lp,
        grad_entropy=g_h if case.entropy == "grad" else None,
        out=logits if case.overwrite else None,
    )
    if case.overwrite and grad is not logits:
        raise AssertionError("the gradient is not where it was asked for")
    return {"stats": stats, "log_probs": totals.log_probs(case.temperature), "grad": grad}


def run_autograd(*, overwrite: bool) -> dict[str, Tensor]:
    """vocab_log_probs of a matmul's result, forward and backward; and whether autograd was told of the write."""
    case = replace(_MIXED, start=0)
    source = case.logits().requires_grad_()
    logits = source * 1.0
    version = logits._version
    out = vocab_log_probs(
        logits,
        case.labels().clamp(0, case.num_real - 1),
        vocab_size=case.num_real,
        temperature=case.temperature,
        group=None,
        entropy="grad",
        overwrite_logits=overwrite,
    )
    (out.log_probs * case.upstream()[0] + out.entropy * case.upstream()[1]).sum().backward()
    told = torch.tensor(logits._version > version)
    return {"log_probs": out.log_probs.detach(), "entropy": out.entropy.detach(), "grad": source.grad, "told": told}


def collectives_of_rank(overwrite: bool) -> tuple[list[str], list[str]]:
    """Collectives of one forward and of one backward over all ranks, at two columns a rank."""
    logits = torch.randn((3, 2), requires_grad=True) * 1.0
    labels = torch.tensor([0, 1, 0])
    world = dist.get_world_size()
    with Collectives() as forward:
        out = vocab_log_probs(
            logits,
            labels,
            vocab_size=2 * world - 1,
            temperature=0.7,
            group=dist.group.WORLD,
            entropy="grad",
            overwrite_logits=overwrite,
        )
    with Collectives() as backward:
        (out.log_probs.sum() + out.entropy.sum()).backward()
    return forward.names, backward.names


def main() -> None:
    """Every case by the kernels, in Triton's interpreter, into the file named by the argument."""
    with patch.object(vocab_rows, "has_kernels", return_value=True):
        results = {name: run(case) for name, case in CASES.items()}
        results |= {f"autograd_{overwrite}": run_autograd(overwrite=overwrite) for overwrite in (False, True)}
    torch.save(results, sys.argv[1])


if __name__ == "__main__":
    main()
