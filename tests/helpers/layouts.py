"""Ranks in three dimensions, and some samples as one of those ranks sees them.

Shapes: S samples with N response tokens, n of them on this rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from slime_ppo.parallel.cp_map import CpMap
from slime_ppo.ppo_utils.cp_ops import ContextShard
from slime_ppo.ppo_utils.reference_types import ReferenceSample
from slime_ppo.ppo_utils.top_p import TokenSupports
from tests.helpers.ppo_cases import TinyModel


@dataclass(frozen=True)
class Layout:
    """Process groups of this rank, None where it is alone: the vocabulary over `tensor`, the tokens of a sample over `context`,
    samples over `data`; `tokens` = context x data (each token on one rank of it), `everyone` = all three."""

    tensor: dist.ProcessGroup | None = None
    context: dist.ProcessGroup | None = None
    data: dist.ProcessGroup | None = None
    tokens: dist.ProcessGroup | None = None
    everyone: dist.ProcessGroup | None = None

    @staticmethod
    def of(tp_size: int, cp_size: int, dp_size: int) -> "Layout":
        """The groups of all ranks, tensor parallel fastest, then context, then data. Every rank calls."""
        ranks = torch.arange(dp_size * cp_size * tp_size).view(dp_size, cp_size, tp_size)
        return Layout(
            tensor=_own_group(ranks.reshape(-1, tp_size)),
            context=_own_group(ranks.transpose(1, 2).reshape(-1, cp_size)),
            data=_own_group(ranks.flatten(1).T),
            tokens=_own_group(ranks.flatten(0, 1).T),
            everyone=_own_group(ranks.reshape(1, -1)),
        )


ALONE = Layout()


def _own_group(rows: Tensor) -> dist.ProcessGroup | None:
    """One group per row, of which this rank's is given back; None for rows of one rank."""
    return None if rows.shape[1] == 1 else dist.new_subgroups_by_enumeration(rows.tolist())[0]


def rank_and_size(group: dist.ProcessGroup | None) -> tuple[int, int]:
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))


@dataclass(frozen=True)
class Batch:
    """Some samples as one rank sees them. Of all N response tokens it knows mask and sizes, and holds the n of `shard`."""

    samples: Sequence[ReferenceSample]
    layout: Layout
    cp_map: CpMap
    shard: ContextShard
    all_mask: Tensor
    all_lens: Tensor
    labels: Tensor
    mask: Tensor
    supports: TokenSupports | None

    @staticmethod
    def of(samples: Sequence[ReferenceSample], layout: Layout) -> "Batch":
        prompt_lens, response_lens = (
            np.array([len(vars(s)[name]) for s in samples], np.int64) for name in ("prompt_ids", "response_ids")
        )
        cp_map = CpMap(rank_and_size(layout.context)[1], prompt_lens, response_lens)
        shard = ContextShard.of(cp_map, layout.context)
        labels, mask = (flat(samples, name, dtype) for name, dtype in (("response_ids", torch.int64), ("loss_mask", torch.bool)))
        return Batch(
            samples=samples,
            layout=layout,
            cp_map=cp_map,
            shard=shard,
            all_mask=mask,
            all_lens=torch.from_numpy(response_lens),
            labels=shard.take(labels),
            mask=shard.take(mask),
            supports=_pack_supports(samples, shard.index.tolist()),
        )

    @property
    def rank(self) -> int:
        return rank_and_size(self.layout.context)[0]

    @property
    def context(self) -> ContextShard | None:
        """For functions that know samples split over context ranks, and whole ones."""
        return None if self.layout.context is None else self.shard

    def at_response(self, model: TinyModel) -> Tensor:
        """Outputs of `model` where this rank's response tokens are predicted, [n] or [n, columns]; NaN at masked tokens."""
        out = model.head(self._pack(model)[self.cp_map.local_positions(self.rank)])
        return torch.where(self.mask if out.ndim == 1 else self.mask[:, None], out, torch.nan)

    def after_response(self, critic: TinyModel) -> Tensor:
        """Values after each whole response [S], read by the rank that owns the last position, the same on all."""
        last = self.cp_map.last_positions(self.rank)
        values = critic.hidden.new_full((len(self.samples),), torch.nan)
        values[last.rows] = critic.head(self._pack(critic)[last.places])
        return self.shard.share_last(values)

    def _pack(self, model: TinyModel) -> Tensor:
        """States at the positions this rank holds; NaN at padding."""
        parts = [model.hidden.new_zeros((0, model.hidden.shape[1]))]
        for sample, padded_len in zip(self.samples, self.cp_map.padded_lens.tolist(), strict=True):
            states = model.states(sample.token_ids)
            parts.append(pad(states, (0, 0, 0, padded_len - len(states)), value=torch.nan))
        return torch.cat(parts)[self.cp_map.token_index(self.rank)]


def flat(samples: Sequence[ReferenceSample], name: str, dtype: torch.dtype) -> Tensor:
    """A per-token column of the samples, [N]; 0 where a sample has none."""
    columns = [vars(s)[name] for s in samples]
    parts = [[0] * len(s.response_ids) if x is None else list(x) for s, x in zip(samples, columns, strict=True)]
    return torch.tensor([x for part in parts for x in part], dtype=dtype)


def _pack_supports(samples: Sequence[ReferenceSample], own: Sequence[int]) -> TokenSupports | None:
    """Those of the `own` tokens. Masked tokens get an empty row, which is never read."""
    if any(s.support is None for s in samples):
        return None
    none = torch.zeros(0, dtype=torch.int64)
    rows, unrestricted = [], []
    for sample in samples:
        for ids, trained in zip(sample.support or (), sample.loss_mask.tolist(), strict=True):
            rows.append(none if ids is None or not trained else ids)
            unrestricted.append(ids is None)
    kept = [rows[token] for token in own]
    marks = torch.tensor([unrestricted[token] for token in own], dtype=torch.bool)
    return TokenSupports(torch.cat([none, *kept]), torch.tensor([len(ids) for ids in kept], dtype=torch.int64), marks)
