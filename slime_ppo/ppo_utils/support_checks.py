"""Checks of the supports that an engine recorded, on the driver, before any rank computes with them. No torch.

Shapes: N response tokens of S samples, K recorded ids of all tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slime_ppo.errors import RolloutError


def validate_support(
    support_ids: np.ndarray,
    support_counts: np.ndarray,
    labels: np.ndarray,
    mask: np.ndarray,
    *,
    lens: np.ndarray,
    sample_ids: Sequence[int] | np.ndarray,
    vocab_size: int,
    unrestricted: np.ndarray | None = None,
) -> None:
    """Raise RolloutError naming a sample and response token whose recorded support cannot be (SEMANTICS 2).

    `support_counts` [N] says how many of the flat `support_ids` [K] belong to each response token; `labels` [N] are the
    sampled tokens, `mask` bool [N], `lens` [S] response tokens per sample; `unrestricted` bool [N] marks tokens drawn
    from the whole vocabulary, None = there are none. Refused, the first of the first kind that is found:

        columns whose lengths differ; a count below 0; counts that do not add up; ids on a row marked unrestricted;
        an id outside [0, vocab_size); an id twice in a row;
        on trainable tokens: an empty row that is not marked, and a sampled token outside its row (of a marked row: outside
        the vocabulary). Masked tokens may have empty rows and rows without the sampled token.
    """
    counts, labels, trainable = np.asarray(support_counts), np.asarray(labels), np.asarray(mask, np.bool_)
    marked = np.zeros(len(counts), np.bool_) if unrestricted is None else np.asarray(unrestricted, np.bool_)
    num_tokens, tokens = int(np.sum(lens)), _Tokens(lens, sample_ids)
    if not len(counts) == len(labels) == len(trainable) == len(marked) == num_tokens:
        raise RolloutError(
            f"the supports of {tokens.samples} have {len(counts)} counts and {len(marked)} unrestricted marks for "
            f"{len(labels)} sampled tokens, {len(trainable)} mask entries and responses of {num_tokens} tokens; "
            "expected one of each per response token"
        )
    _check_counts(counts, marked, len(support_ids), tokens)
    ids = np.asarray(support_ids, np.int64)
    token = np.repeat(np.arange(num_tokens), counts)
    _check_ids(ids, token, vocab_size, tokens)
    empty = trainable & ~marked & (counts == 0)
    if empty.any():
        row = int(np.argmax(empty))
        raise RolloutError(
            f"{tokens.name(row)} is empty, but the token is trainable; expected the ids the engine drew from, the sampled token "
            f"{int(labels[row])} among them. Record them, mask the token, or mark the row unrestricted if nothing was cut off"
        )
    covered = marked & (labels >= 0) & (labels < vocab_size)
    covered[token[ids == labels[token]]] = True
    missing = trainable & ~covered
    if missing.any():
        row = int(np.argmax(missing))
        held = f"all {vocab_size} ids of the vocabulary" if marked[row] else f"{int(counts[row])} ids"
        raise RolloutError(
            f"{tokens.name(row)} holds {held}, but not the sampled token {int(labels[row])}, and the token is trainable; "
            "the engine must record the support it drew from"
        )


@dataclass(frozen=True)
class _Tokens:
    """Names for error messages."""

    lens: np.ndarray
    sample_ids: Sequence[int] | np.ndarray

    @property
    def samples(self) -> str:
        return f"samples {int(self.sample_ids[0])} to {int(self.sample_ids[-1])}" if len(self.lens) else "no sample"

    def name(self, position: int) -> str:
        """The response token at a flat position."""
        ends = np.cumsum(self.lens)
        sample = int(np.searchsorted(ends, position, side="right"))
        token = position - int(ends[sample] - self.lens[sample])
        return f"the support of response token {token} of sample {int(self.sample_ids[sample])}"


def _check_counts(counts: np.ndarray, marked: np.ndarray, num_ids: int, tokens: _Tokens) -> None:
    if len(counts) and int(counts.min()) < 0:
        row = int(np.argmin(counts))
        raise RolloutError(f"{tokens.name(row)} has {int(counts[row])} ids; expected 0 or more")
    if int(counts.sum()) != num_ids:
        raise RolloutError(
            f"the support counts of {tokens.samples} add up to {int(counts.sum())}, but {num_ids} support ids were recorded; "
            "the engine must return one count per response token and as many ids"
        )
    filled = marked & (counts != 0)
    if filled.any():
        row = int(np.argmax(filled))
        raise RolloutError(
            f"{tokens.name(row)} is marked unrestricted, but holds {int(counts[row])} ids; expected a count of 0 there, or no mark"
        )


def _check_ids(ids: np.ndarray, token: np.ndarray, vocab_size: int, tokens: _Tokens) -> None:
    """`token` [K]: flat position of the response token that each id belongs to."""
    outside = (ids < 0) | (ids >= vocab_size)
    if outside.any():
        first = int(np.argmax(outside))
        raise RolloutError(f"{tokens.name(int(token[first]))} holds id {ids[first]}; expected ids in [0, {vocab_size})")
    keys = np.sort(token * vocab_size + ids)
    doubled = np.flatnonzero(keys[1:] == keys[:-1])
    if len(doubled):
        row, repeated = divmod(int(keys[doubled[0]]), vocab_size)
        raise RolloutError(f"{tokens.name(row)} holds id {repeated} more than once; expected distinct ids")
