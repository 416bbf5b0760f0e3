"""Checks of the supports that an engine recorded, on the driver, before any rank computes with them. No torch."""

from collections.abc import Sequence

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
) -> None:
    """Raise RolloutError naming the first sample and response token whose recorded support cannot be (SEMANTICS 2).

    `support_counts` [N] says how many of the flat `support_ids` [K] belong to each response token; `labels` [N] are the
    sampled tokens, `mask` bool [N], `lens` [S] response tokens per sample. Refused: counts that do not add up, an id
    outside [0, vocab_size), the same id twice in a row, and on trainable tokens an empty row or one without the
    sampled token. Masked tokens may have empty rows.
    """
    num_tokens = int(np.sum(lens))
    if not len(support_counts) == len(labels) == len(mask) == num_tokens:
        raise RolloutError(
            f"the supports have {len(support_counts)} counts for {len(labels)} sampled tokens, {len(mask)} mask "
            f"entries and responses of {num_tokens} tokens; expected one of each per response token"
        )
    if num_tokens and int(np.min(support_counts)) < 0:
        raise RolloutError(_where(int(np.argmin(support_counts)), lens, sample_ids) + f" has {int(np.min(support_counts))} ids")
    if int(np.sum(support_counts)) != len(support_ids):
        raise RolloutError(
            f"support counts add up to {int(np.sum(support_counts))}, but {len(support_ids)} support ids were "
            "recorded; the engine must return one count per response token and as many ids"
        )
    ids = np.asarray(support_ids, np.int64)
    token = np.repeat(np.arange(num_tokens), support_counts)
    outside = (ids < 0) | (ids >= vocab_size)
    if outside.any():
        first = int(np.argmax(outside))
        raise RolloutError(
            _where(int(token[first]), lens, sample_ids) + f" holds id {ids[first]}; expected ids in [0, {vocab_size})"
        )
    keys = np.sort(token * vocab_size + ids)
    doubled = np.flatnonzero(keys[1:] == keys[:-1])
    if len(doubled):
        row, repeated = divmod(int(keys[doubled[0]]), vocab_size)
        raise RolloutError(_where(row, lens, sample_ids) + f" holds id {repeated} more than once; expected distinct ids")
    covered = np.zeros(num_tokens, np.bool_)
    covered[token[ids == np.asarray(labels)[token]]] = True
    missing = np.asarray(mask, np.bool_) & ~covered
    if missing.any():
        row = int(np.argmax(missing))
        raise RolloutError(
            _where(row, lens, sample_ids) + f" holds {int(support_counts[row])} ids, but not the sampled token {int(labels[row])}, "
            "and the token is trainable; the engine must record the support it drew from"
        )


def _where(position: int, lens: np.ndarray, sample_ids: Sequence[int] | np.ndarray) -> str:
    ends = np.cumsum(lens)
    row = int(np.searchsorted(ends, position, side="right"))
    return f"the support of response token {position - int(ends[row] - lens[row])} of sample {int(sample_ids[row])}"
