"""Memory of each rank by layout: predicted from the model's config.json, as --dry-run does, and measured on gloo ranks.

    python tools/layouts/memory.py runs/models/glass-en
    python tools/layouts/memory.py runs/models/glass-en --role critic --dtype float32

Megabytes of the rank that holds most, after an optimizer step; the parts are the measured ones. `off by` is the largest share by
which any part of any rank differs from its prediction.
"""

import argparse
import sys
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from slime_ppo.config.model_shape import ModelShape
from slime_ppo.config.resident_memory import ResidentBytes, TrainedModel, resident_bytes
from slime_ppo.parallel.layout import ParallelLayout

Dtype = Literal["float32", "bfloat16"]
Role = Literal["actor", "critic"]
RANKS = "tools.layouts.memory_ranks"
DIVISIBLE_BY = 128
LAYOUTS: Mapping[str, ParallelLayout] = {
    "one rank": ParallelLayout(1),
    "dp2": ParallelLayout(2),
    "cp2": ParallelLayout(2, cp_size=2),
    "tp2": ParallelLayout(2, tp_size=2),
    "pp2": ParallelLayout(2, pp_size=2),
    "pp2 vpp2": ParallelLayout(2, pp_size=2, vpp_size=2),
    "tp2 pp2": ParallelLayout(4, tp_size=2, pp_size=2),
    "tp2 dp2": ParallelLayout(4, tp_size=2),
}


class Pool(Protocol):
    """Runs module:function(**kwargs) in `world` ranks of one process group, and returns their results by rank."""

    def run(self, target: str, *, world: int, **kwargs: Any) -> list[Any]: ...


@dataclass(frozen=True)
class Measured:
    """One role in one layout: what its ranks should hold and what they do hold, by rank."""

    predicted: list[ResidentBytes]
    measured: list[ResidentBytes]

    @property
    def largest(self) -> tuple[ResidentBytes, ResidentBytes]:
        """(predicted, measured) of the rank for which most was predicted."""
        rank = max(range(len(self.predicted)), key=lambda rank: self.predicted[rank].total)
        return self.predicted[rank], self.measured[rank]

    @property
    def error(self) -> float:
        """The largest |measured / predicted - 1| over ranks, parts and totals; a part that should be empty counts as it is."""
        pairs = [
            (float(own), float(expected))
            for one, other in zip(self.measured, self.predicted, strict=True)
            for own, expected in zip((*astuple(one), one.total), (*astuple(other), other.total), strict=True)
        ]
        return max(abs(own - expected) / max(expected, 1.0) for own, expected in pairs)


def measure_roles(
    pool: Pool, roles: Mapping[str, tuple[Role, str]], layout: ParallelLayout, dtype: Dtype, *, fp32_lm_head: bool = False
) -> dict[str, Measured]:
    """Predicted and measured bytes of `roles`, by label; they are given as role and HF folder."""
    heads: dict[str, tuple[str, str]] = {
        label: (folder, "value" if role == "critic" else "language_model") for label, (role, folder) in roles.items()
    }
    settings = {"dtype": dtype, "divisible_by": DIVISIBLE_BY, "fp32_lm_head": fp32_lm_head}
    ranks = pool.run(f"{RANKS}:measure", world=layout.num_ranks, layout=layout, roles=heads, **settings)
    found = {}
    for label, (role, folder) in roles.items():
        shape = ModelShape.from_hf_folder(folder)
        is_critic = role == "critic"
        model = TrainedModel(
            shape, dtype, is_critic, make_vocab_size_divisible_by=DIVISIBLE_BY, fp32_lm_head=fp32_lm_head and not is_critic
        )
        predicted = [resident_bytes(model, layout, pp_rank=layout.pp_rank(rank)) for rank in range(layout.num_ranks)]
        found[label] = Measured(predicted, [rank[label] for rank in ranks])
    return found


def memory_rows(pool: Pool, folder: str, *, role: Role = "actor", dtype: Dtype = "bfloat16") -> list[tuple[str, ...]]:
    """The table of one role of the model in `folder`, its head first: a row per layout of LAYOUTS, measured on ranks of `pool`."""
    rows = [("layout", "params", "grads", "main params", "moments", "total", "predicted", "of one rank", "off by")]
    whole = 0
    for name, layout in LAYOUTS.items():
        one = measure_roles(pool, {role: (role, folder)}, layout, dtype)[role]
        predicted, measured = one.largest
        whole = whole or measured.total
        parts = [f"{part / 1e6:.2f}" for part in (*astuple(measured), measured.total, predicted.total)]
        rows.append((name, *parts, f"{measured.total / whole:.0%}", f"{one.error:.2%}"))
    return rows


def as_text(rows: list[tuple[str, ...]]) -> str:
    """A Markdown table with columns of equal width."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    rule = ("-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:]))
    lines = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in (rows[0], rule, *rows[1:])]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    from tests.helpers.rank_pool import RankPool

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("folder", help="a Hugging Face folder")
    parser.add_argument("--role", choices=get_args(Role), default="actor")
    parser.add_argument("--dtype", choices=get_args(Dtype), default="bfloat16")
    options = parser.parse_args()
    with RankPool([RANKS]) as pool:
        print(as_text(memory_rows(pool, options.folder, role=options.role, dtype=options.dtype)))


if __name__ == "__main__":
    main()
