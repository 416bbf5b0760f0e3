"""The columns of one rollout, declared once.

A column is one dataclass field of `RolloutBatch`: its dtype, and what it has one entry per. Slicing, merging, checking
and logging iterate over the fields, so a new tensor costs two edits: declare it here, use it.

Shapes: S samples, P_s prompt tokens and R_s response tokens of sample s. Ragged columns are packed in sample order:
a per-response-token column is one flat array [sum R_s]. No torch: the driver holds this type.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any, Literal

import numpy as np

from slime_ppo.errors import DataError
from slime_ppo.types.sample import FinishReason, Sample

Per = Literal["sample", "prompt_token", "response_token", "support_id"]
FINISH_CODES: tuple[FinishReason, ...] = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT)


@dataclass(frozen=True)
class Column:
    """dtype and alignment of one field of RolloutBatch."""

    dtype: type
    per: Per


def _column(dtype: type, per: Per) -> Any:
    return field(metadata={"column": Column(dtype, per)})


def _later(dtype: type, per: Per) -> Any:
    """A column that a later stage fills in."""
    return field(default=None, metadata={"column": Column(dtype, per)})


@dataclass(frozen=True)
class ColumnPart:
    """Columns that one rank made for some of the samples; `rows` int64 [n] are positions in the RolloutBatch.

    Flat arrays in the order of `rows`. One such object per producing rank and stage crosses the object store.
    """

    rows: np.ndarray
    columns: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class RolloutBatch:
    """All samples of one rollout in sample order.

    Worked example, two samples with prompts of 3 and 2 tokens and responses of 2 and 4 tokens:
        prompt_lens = [3, 2]; response_lens = [2, 4]; prompt_ids has 5 entries; response_ids, loss_mask, values, ... 6;
        `batch.select([1]).response_ids` are the last 4.
    """

    rollout_id: int
    sample_ids: np.ndarray = _column(np.int64, "sample")
    group_ids: np.ndarray = _column(np.int64, "sample")
    trajectory_ids: np.ndarray = _column(np.int64, "sample")
    prompt_lens: np.ndarray = _column(np.int64, "sample")
    response_lens: np.ndarray = _column(np.int64, "sample")
    finish: np.ndarray = _column(np.int8, "sample")
    rewards: np.ndarray = _column(np.float32, "sample")
    prompt_ids: np.ndarray = _column(np.int32, "prompt_token")
    response_ids: np.ndarray = _column(np.int32, "response_token")
    loss_mask: np.ndarray = _column(np.bool_, "response_token")
    rollout_log_probs: np.ndarray = _column(np.float32, "response_token")
    support_counts: np.ndarray | None = _later(np.int32, "response_token")
    support_ids: np.ndarray | None = _later(np.int32, "support_id")
    # over the full vocabulary; None without a restriction, or when the engine does not tell
    rollout_full_log_probs: np.ndarray | None = _later(np.float32, "response_token")
    # None when the reward function paid no single token of this rollout
    process_rewards: np.ndarray | None = _later(np.float32, "response_token")
    old_log_probs: np.ndarray | None = _later(np.float32, "response_token")
    # over the full vocabulary; None when the KL to the reference uses old_log_probs, which are just that without a restriction
    old_full_log_probs: np.ndarray | None = _later(np.float32, "response_token")
    ref_log_probs: np.ndarray | None = _later(np.float32, "response_token")
    # rollout correction; None when none is chosen
    rollout_weights: np.ndarray | None = _later(np.float32, "response_token")
    rejected: np.ndarray | None = _later(np.bool_, "sample")
    entropy: np.ndarray | None = _later(np.float32, "response_token")
    values: np.ndarray | None = _later(np.float32, "response_token")
    bootstrap_values: np.ndarray | None = _later(np.float32, "sample")
    token_rewards: np.ndarray | None = _later(np.float32, "response_token")
    returns: np.ndarray | None = _later(np.float32, "response_token")
    advantages: np.ndarray | None = _later(np.float32, "response_token")

    def __post_init__(self) -> None:
        for name, column in COLUMNS.items():
            array = getattr(self, name)
            if array is None:
                continue
            expected = int(self._lengths(column.per).sum()) if column.per != "sample" else self.num_samples
            if array.shape != (expected,):
                raise DataError(
                    f"column {name} of rollout {self.rollout_id} has shape {array.shape}, expected ({expected},): "
                    f"one entry per {column.per} of {self.num_samples} samples"
                )
            if array.dtype != column.dtype:
                raise DataError(f"column {name} of rollout {self.rollout_id} is {array.dtype}, expected {np.dtype(column.dtype)}")

    @property
    def num_samples(self) -> int:
        return len(self.sample_ids)

    @property
    def total_lens(self) -> np.ndarray:
        """Prompt plus response tokens of each sample, int64 [S]."""
        lengths: np.ndarray = self.prompt_lens + self.response_lens
        return lengths

    @property
    def trainable_tokens(self) -> np.ndarray:
        """Number of trainable tokens of each sample, int64 [S]."""
        return _segment_sum(self.loss_mask.astype(np.int64), self.offsets("response_token"))

    @property
    def kept_mask(self) -> np.ndarray:
        """`loss_mask` without the samples that the rollout correction rejected, bool [sum R_s]."""
        if self.rejected is None:
            return self.loss_mask
        kept: np.ndarray = self.loss_mask & ~np.repeat(self.rejected, self.response_lens)
        return kept

    @property
    def kept_tokens(self) -> np.ndarray:
        """Number of tokens of each sample in `kept_mask`, int64 [S]."""
        return self.trainable_tokens if self.rejected is None else np.where(self.rejected, 0, self.trainable_tokens)

    @property
    def kl_log_probs(self) -> np.ndarray:
        """Old log-probs for the KL to the reference: over the full vocabulary, or on the support with --kl-support sampled."""
        return filled(self.old_log_probs if self.old_full_log_probs is None else self.old_full_log_probs)

    def _lengths(self, per: Per) -> np.ndarray:
        if per == "prompt_token":
            return self.prompt_lens
        if per == "response_token":
            return self.response_lens
        if per == "support_id":
            if self.support_counts is None:
                raise DataError(f"rollout {self.rollout_id} has support_ids without support_counts")
            return _segment_sum(self.support_counts.astype(np.int64), self.offsets("response_token"))
        return np.ones(self.num_samples, np.int64)

    def offsets(self, per: Per) -> np.ndarray:
        """Start of each sample in a flat column, int64 [S + 1]; the last entry is the column's length."""
        return np.concatenate(([0], np.cumsum(self._lengths(per)))).astype(np.int64)

    def flat_index(self, rows: Sequence[int] | np.ndarray, per: Per) -> np.ndarray:
        """Positions in a flat column of the entries of `rows`, in that order."""
        offsets = self.offsets(per)
        pieces = [np.arange(offsets[row], offsets[row + 1]) for row in rows]
        return np.concatenate(pieces) if pieces else np.zeros(0, np.int64)

    def select(self, rows: Sequence[int] | np.ndarray) -> "RolloutBatch":
        """The samples at `rows`, in that order."""
        index = {per: self.flat_index(rows, per) for per in ("sample", "prompt_token", "response_token")}
        if self.support_ids is not None:
            index["support_id"] = self.flat_index(rows, "support_id")
        chosen = {
            name: getattr(self, name)[index[column.per]] for name, column in COLUMNS.items() if getattr(self, name) is not None
        }
        return self._replaced({name: chosen.get(name) for name in COLUMNS})

    def with_columns(self, **columns: np.ndarray) -> "RolloutBatch":
        """A copy with these columns set; lengths and dtypes are checked."""
        return self._replaced(columns)

    def _replaced(self, columns: Mapping[str, Any]) -> "RolloutBatch":
        return replace(self, **columns)

    def with_parts(self, parts: Iterable[ColumnPart | None]) -> "RolloutBatch":
        """A copy with the columns that ranks made for their samples put together in sample order.

        Parts of ranks that hold no result are None. Raises DataError when a sample is missing or given twice.
        """
        given = [part for part in parts if part is not None]
        names = sorted({name for part in given for name in part.columns})
        merged: dict[str, np.ndarray] = {}
        for name in names:
            column = COLUMNS[name]
            owners = [part for part in given if name in part.columns]
            rows = np.concatenate([part.rows for part in owners])
            if len(rows) != self.num_samples or len(np.unique(rows)) != self.num_samples:
                raise DataError(
                    f"column {name} of rollout {self.rollout_id}: ranks returned {len(rows)} samples "
                    f"({len(np.unique(rows))} different) for {self.num_samples}"
                )
            index = self.flat_index(rows, column.per)
            values = np.concatenate([part.columns[name] for part in owners])
            if len(values) != len(index):
                raise DataError(
                    f"column {name} of rollout {self.rollout_id}: ranks returned {len(values)} entries for {len(index)}"
                )
            whole: np.ndarray = np.empty(len(index), column.dtype)
            whole[index] = values
            merged[name] = whole
        return self.with_columns(**merged)

    @staticmethod
    def from_samples(rollout_id: int, samples: Sequence[Sample]) -> "RolloutBatch":
        """Pack samples whose rewards are known. All of them, or none, must have a support, and the same for log-probs
        over the full vocabulary; process rewards of samples without any are 0.

        Raises DataError that names the sample: aborted, no tokens, columns of another length than its response, a reward that
        is missing or not finite in float32, a reward, group or finish other than those of the same trajectory, a process reward
        that no trainable token can be credited with (SEMANTICS 1, 3, 4).
        """
        _check_samples(rollout_id, samples)
        per_sample = {
            "sample_ids": [s.sample_id for s in samples],
            "group_ids": [s.group_id for s in samples],
            "trajectory_ids": [s.trajectory_id for s in samples],
            "prompt_lens": [len(s.prompt.token_ids) for s in samples],
            "response_lens": [len(s.response_ids) for s in samples],
            "finish": [FINISH_CODES.index(s.finish) for s in samples],
            "rewards": [s.reward for s in samples],
        }
        ragged = {
            "prompt_ids": [s.prompt.token_ids for s in samples],
            "response_ids": [s.response_ids for s in samples],
            "loss_mask": [s.loss_mask for s in samples],
            "rollout_log_probs": [s.rollout_log_probs for s in samples],
        }
        if _all_or_none(rollout_id, samples, [s.support is not None for s in samples], "recorded support"):
            ragged["support_counts"] = [s.support.counts for s in samples if s.support is not None]
            ragged["support_ids"] = [s.support.ids for s in samples if s.support is not None]
        full = [s.full_log_probs for s in samples if s.full_log_probs is not None]
        if _all_or_none(rollout_id, samples, [s.full_log_probs is not None for s in samples], "log-probs over the full vocabulary"):
            ragged["rollout_full_log_probs"] = full
        if any(s.process_rewards is not None for s in samples):
            ragged["process_rewards"] = [_process_rewards(s) for s in samples]
        columns: dict[str, np.ndarray] = {name: np.asarray(values, COLUMNS[name].dtype) for name, values in per_sample.items()}
        columns |= {name: _concatenate(pieces, COLUMNS[name].dtype) for name, pieces in ragged.items()}
        return RolloutBatch(rollout_id=rollout_id, **columns)


def _all_or_none(rollout_id: int, samples: Sequence[Sample], have: Sequence[bool], what: str) -> bool:
    """Whether all of them have it. Raises DataError naming the first without, when only some have."""
    if any(have) and not all(have):
        raise DataError(
            f"sample {samples[have.index(False)].sample_id} of rollout {rollout_id} has no {what} while others have: the engine "
            "must return it for every sample"
        )
    return any(have)


def _check_samples(rollout_id: int, samples: Sequence[Sample]) -> None:
    first_part: dict[int, Sample] = {}
    for sample in samples:
        where = f"sample {sample.sample_id} of rollout {rollout_id}"
        num_tokens = len(sample.response_ids)
        if sample.finish is FinishReason.ABORT:
            raise DataError(f"{where} was aborted, so it must not train; leave it out, or have the engine answer again")
        if num_tokens == 0 or len(sample.prompt.token_ids) == 0:
            raise DataError(
                f"{where} has {len(sample.prompt.token_ids)} prompt and {num_tokens} response tokens, expected at least 1 each"
            )
        lengths = {"loss_mask": len(sample.loss_mask), "rollout_log_probs": len(sample.rollout_log_probs)}
        if sample.support is not None:
            lengths["support.counts"] = len(sample.support.counts)
        if sample.full_log_probs is not None:
            lengths["full_log_probs"] = len(sample.full_log_probs)
        if sample.process_rewards is not None:
            lengths["process_rewards"] = len(sample.process_rewards)
        wrong = {name: length for name, length in lengths.items() if length != num_tokens}
        if wrong:
            raise DataError(f"{where} has {num_tokens} response tokens, but {wrong}; expected one entry per token")
        if sample.reward is None:
            raise DataError(f"{where} has no reward")
        if not abs(sample.reward) <= float(np.finfo(np.float32).max):
            raise DataError(f"{where} has reward {sample.reward}, expected a number that is finite in float32")
        _check_trajectory(where, sample, first_part.setdefault(sample.trajectory_id, sample))
        _check_process_rewards(where, sample)


def _check_trajectory(where: str, sample: Sample, first: Sample) -> None:
    for name, found, expected in (
        ("reward", sample.reward, first.reward),
        ("group_id", sample.group_id, first.group_id),
        ("finish", sample.finish, first.finish),
    ):
        if found != expected:
            raise DataError(
                f"{where} has {name} {found}, but sample {first.sample_id}, another part of trajectory {sample.trajectory_id}, has "
                f"{expected}: all parts of a trajectory carry the same"
            )


def _check_process_rewards(where: str, sample: Sample) -> None:
    """A process reward on a masked token goes to the trainable token before it, so there must be one."""
    paid = np.flatnonzero(_process_rewards(sample))
    trainable = np.flatnonzero(sample.loss_mask)
    if len(paid) and len(trainable) and paid[0] < trainable[0]:
        raise DataError(
            f"{where} has process reward {_process_rewards(sample)[paid[0]]} at response token {paid[0]}, but its first trainable "
            f"token is {trainable[0]}: there is none to credit. The reward function must not pay tokens before that one"
        )


def _process_rewards(sample: Sample) -> np.ndarray:
    return np.zeros(len(sample.response_ids), np.float32) if sample.process_rewards is None else sample.process_rewards


def filled(column: np.ndarray | None) -> np.ndarray:
    """The column, which an earlier stage must have filled in."""
    if column is None:
        raise DataError("a column is needed that no earlier stage has filled in")
    return column


def _concatenate(pieces: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.asarray(piece, dtype) for piece in pieces]) if pieces else np.zeros(0, dtype)


def _segment_sum(values: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    sums: np.ndarray = np.concatenate(([0], np.cumsum(values)))
    per_segment: np.ndarray = sums[offsets[1:]] - sums[offsets[:-1]]
    return per_segment


def _declared_columns() -> dict[str, Column]:
    declared: tuple[Field[Any], ...] = fields(RolloutBatch)
    return {f.name: f.metadata["column"] for f in declared if "column" in f.metadata}


COLUMNS: Mapping[str, Column] = _declared_columns()
