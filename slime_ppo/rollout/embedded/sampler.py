"""Draw the next token of every row: one uniform number per row, inverse CDF.

Shapes: B rows, V vocabulary, K candidates.

A row's uniforms come from its own seed, so that they do not depend on the batch (SEMANTICS 14). The support is joint:
rank < top_k and (cumulative - own) <= top_p, both on the full softmax(logits / temperature), ties by the lower id.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from slime_ppo.types.sample import SamplingParams

FIRST_CANDIDATES = 64
"""A top-p support is looked for among this many most likely tokens, then among four times as many, and so on."""

LARGEST_UNIFORM = 1.0 - 2.0**-52
"""Keeps uniform * total strictly below total in float64, so that the draw never lands behind the last token."""


@dataclass(frozen=True)
class Kept:
    """The supports of all rows at one step: `ids` int32 [sum counts] row after row, most likely first; `counts` int32 [B]."""

    ids: np.ndarray
    counts: np.ndarray


@dataclass(frozen=True)
class Draw:
    """One token per row: `tokens` int64 [B]; `log_probs` float32 [B]; `kept` is None when the sampler is unrestricted."""

    tokens: torch.Tensor
    log_probs: torch.Tensor
    kept: Kept | None = None


Sampler = Callable[[torch.Tensor, torch.Tensor], Draw]
"""(logits [B, V], uniforms float64 [B]) -> Draw."""


def sampler_of(sampling: SamplingParams) -> Sampler:
    """The sampler for these parameters. A greedy one has no use for top_k, top_p or the uniforms."""
    if sampling.greedy:
        return lambda logits, uniforms: draw_greedy(logits)
    if sampling.restricted:
        return lambda logits, uniforms: draw_restricted(
            logits, uniforms, temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p
        )
    return lambda logits, uniforms: draw_full(logits, uniforms, temperature=sampling.temperature)


def row_uniforms(seeds: Sequence[int], num_tokens: int) -> torch.Tensor:
    """float64 [B, num_tokens] in [0, 1): row i depends on seeds[i] alone, and more tokens only append numbers."""
    drawn = [np.random.Generator(np.random.Philox(seed)).random(num_tokens) for seed in seeds]
    return torch.from_numpy(np.minimum(np.stack(drawn), LARGEST_UNIFORM))


def draw_greedy(logits: torch.Tensor) -> Draw:
    """The most likely token with its log-prob at temperature 1 (evaluation only)."""
    log_probs = logits.float().log_softmax(-1)
    best = log_probs.max(-1)
    return Draw(tokens=best.indices, log_probs=best.values)


def draw_full(logits: torch.Tensor, uniforms: torch.Tensor, *, temperature: float) -> Draw:
    """A token of softmax(logits / temperature) with its log-prob."""
    log_probs = _log_softmax(logits, temperature)
    tokens = _inverse_cdf(log_probs.exp(), uniforms)
    return Draw(tokens=tokens.squeeze(-1), log_probs=log_probs.gather(-1, tokens).squeeze(-1))


def draw_restricted(logits: torch.Tensor, uniforms: torch.Tensor, *, temperature: float, top_k: int, top_p: float) -> Draw:
    """A token of softmax(logits / temperature) renormalised over the joint support, its log-prob there, and the support."""
    log_probs = _log_softmax(logits, temperature)
    probs = log_probs.exp()
    ids, keep = _joint_support(probs, top_k, top_p)
    places = _inverse_cdf(probs.gather(-1, ids).masked_fill(~keep, 0.0), uniforms)
    kept_log_probs = log_probs.gather(-1, ids).masked_fill(~keep, float("-inf"))
    drawn = kept_log_probs.gather(-1, places) - kept_log_probs.logsumexp(-1, keepdim=True)
    kept = Kept(ids=ids[keep].to(torch.int32).cpu().numpy(), counts=keep.sum(-1, dtype=torch.int32).cpu().numpy())
    return Draw(tokens=ids.gather(-1, places).squeeze(-1), log_probs=drawn.squeeze(-1), kept=kept)


def _log_softmax(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    return (logits.float() / temperature).log_softmax(-1)


def _inverse_cdf(probs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """First place whose cumulative probability passes uniform * total, int64 [B, 1]; one of probability 0 is never drawn."""
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    places = torch.searchsorted(cumulative, uniforms[:, None] * cumulative[:, -1:], right=True)
    # Only a row with NaN ends behind the last place; its log-prob is NaN too and is refused by check_results.
    return places.clamp_(max=probs.shape[-1] - 1)


def _joint_support(probs: torch.Tensor, top_k: int, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids of the most likely tokens in order, int64 [B, K], and which of them are in the support, bool [B, K]."""
    vocab_size = probs.shape[-1]
    num_candidates = min(top_k or FIRST_CANDIDATES, vocab_size)
    while True:
        ids = _most_likely(probs, num_candidates)
        ranked = probs.gather(-1, ids).double()
        # Rounding can push the sum past 1, which must not cut anything when top_p is off.
        keep = (ranked.cumsum(-1) - ranked <= top_p) | (top_p >= 1.0)
        if top_k > 0 or num_candidates == vocab_size or not bool(keep[:, -1].any()):
            return ids, keep
        num_candidates = min(4 * num_candidates, vocab_size)


def _most_likely(probs: torch.Tensor, num_candidates: int) -> torch.Tensor:
    """Ids in order of falling probability, equal ones by rising id: what a stable sort gives, at the price of a topk.

    The bits of a non-negative float32 order like integers, so (bits, negated id) packed in an int64 is a key without ties.
    """
    vocab_size = probs.shape[-1]
    reversed_ids = torch.arange(vocab_size - 1, -1, -1, device=probs.device)
    keys = (probs.view(torch.int32).long() << 32) | reversed_ids
    return vocab_size - 1 - (keys.topk(num_candidates, dim=-1).values & 0xFFFFFFFF)
