"""Draw the next token of every row by an exponential race: argmax over v of p_v / E_v, with E_v ~ Exp(1) per token id.

The race is the Gumbel-max trick (Maddison, Tarlow, Minka 2014, "A* Sampling") with E_v = exp(-Gumbel_v). As the noise is
tied to the token id, two distributions p and q draw different tokens with probability <= 2 TV / (1 + TV), TV their total
variation distance (Moulton, Jiang 2018): runs of one seed whose logits differ by rounding, as those of two parallel
layouts do, keep drawing the same tokens. An inverse CDF moves all V borders between tokens instead, and soon parts them.

Shapes: B rows, V vocabulary, K candidates.

A row's noise comes from its own seed, so that it does not depend on the batch (SEMANTICS 14). The support is joint:
rank < top_k and (cumulative - own) <= top_p and own >= min_p * largest, all on the full softmax(logits / temperature), ties
by the lower id.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from slime_ppo.types.sample import SamplingParams

FIRST_CANDIDATES = 64
"""A top-p or min-p support is looked for among this many most likely tokens, then among four times as many, and so on."""


@dataclass(frozen=True)
class Kept:
    """The supports of all rows at one step: `ids` int32 [sum counts] row after row, most likely first; `counts` int32 [B]."""

    ids: np.ndarray
    counts: np.ndarray


@dataclass(frozen=True)
class Draw:
    """One token per row: `tokens` int64 [B]; `log_probs` float32 [B]. Only of a restricted sampler: `full_log_probs` float32 [B]
    over the whole vocabulary, and `kept`."""

    tokens: torch.Tensor
    log_probs: torch.Tensor
    full_log_probs: torch.Tensor | None = None
    kept: Kept | None = None


Sampler = Callable[[torch.Tensor, Sequence[bool]], Draw]
"""(logits [B, V], running [B]) -> Draw. What it returns for a row that is not running means nothing."""


class RaceNoise:
    """The exponential noise of every row, step after step, in one buffer on `device`.

    Row i depends on seeds[i] and on how many steps it ran, on nothing else. A CPU generator reads the low 32 bits of a seed.
    """

    def __init__(self, seeds: Sequence[int], vocab_size: int, device: torch.device) -> None:
        self._generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
        self._noise = torch.ones(len(seeds), vocab_size, device=device)
        self._rows = self._noise.unbind()

    def step(self, running: Sequence[bool]) -> torch.Tensor:
        """float32 [B, V] > 0, drawn anew for running rows. Valid until the next step, which overwrites it."""
        for row, generator, draws in zip(self._rows, self._generators, running, strict=True):
            if draws:
                row.exponential_(generator=generator)
        return self._noise


def sampler_of(sampling: SamplingParams, seeds: Sequence[int], *, vocab_size: int, device: torch.device) -> Sampler:
    """The sampler for these parameters and one seed per row. A greedy one has no use for restrictions or seeds."""
    if sampling.greedy:
        return lambda logits, running: draw_greedy(logits)
    noise = RaceNoise(seeds, vocab_size, device)
    if sampling.restricted:
        return lambda logits, running: draw_restricted(
            logits,
            noise.step(running),
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
        )
    return lambda logits, running: draw_full(logits, noise.step(running), temperature=sampling.temperature)


def draw_greedy(logits: torch.Tensor) -> Draw:
    """The most likely token with its log-prob at temperature 1 (evaluation only)."""
    log_probs = logits.float().log_softmax(-1)
    best = log_probs.max(-1)
    return Draw(tokens=best.indices, log_probs=best.values)


def draw_full(logits: torch.Tensor, noise: torch.Tensor, *, temperature: float) -> Draw:
    """A token of softmax(logits / temperature) with its log-prob; `noise` float32 [B, V] ~ Exp(1)."""
    log_probs = _log_softmax(logits, temperature)
    tokens = _race(log_probs.exp(), noise)
    return Draw(tokens=tokens.squeeze(-1), log_probs=log_probs.gather(-1, tokens).squeeze(-1))


def draw_restricted(
    logits: torch.Tensor, noise: torch.Tensor, *, temperature: float, top_k: int, top_p: float, min_p: float
) -> Draw:
    """A token of softmax(logits / temperature) renormalised over the joint support, its log-probs there and over
    the vocabulary, and the support.

    `noise` float32 [B, V] ~ Exp(1) is looked up by token id: two tokens that swap ranks do not swap their noise.
    """
    log_probs = _log_softmax(logits, temperature)
    probs = log_probs.exp()
    ids, keep = _joint_support(probs, top_k=top_k, top_p=top_p, min_p=min_p)
    places = _race(probs.gather(-1, ids).masked_fill(~keep, 0.0), noise.gather(-1, ids))
    kept_log_probs = log_probs.gather(-1, ids).masked_fill(~keep, float("-inf"))
    full = kept_log_probs.gather(-1, places)
    drawn = full - kept_log_probs.logsumexp(-1, keepdim=True)
    kept = Kept(ids=ids[keep].to(torch.int32).cpu().numpy(), counts=keep.sum(-1, dtype=torch.int32).cpu().numpy())
    tokens = ids.gather(-1, places).squeeze(-1)
    return Draw(tokens=tokens, log_probs=drawn.squeeze(-1), full_log_probs=full.squeeze(-1), kept=kept)


def _log_softmax(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    return (logits.float() / temperature).log_softmax(-1)


def _race(weights: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Place of the winner, int64 [B, 1]; proportional weights race alike, and one of weight 0 never wins.

    A row with NaN has some winner too; its log-prob is NaN and is refused by check_results.
    """
    return (weights / noise).argmax(-1, keepdim=True)


def _joint_support(probs: torch.Tensor, *, top_k: int, top_p: float, min_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids of the most likely tokens in order, int64 [B, K], and which of them are in the support, bool [B, K]."""
    vocab_size = probs.shape[-1]
    num_candidates = min(top_k or FIRST_CANDIDATES, vocab_size)
    while True:
        ids = _most_likely(probs, num_candidates)
        ranked = probs.gather(-1, ids).double()
        # Rounding can push the sum past 1, which must not cut anything when top_p is off.
        keep = (ranked.cumsum(-1) - ranked <= top_p) | (top_p >= 1.0)
        keep &= ranked >= min_p * ranked[:, :1]
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
