"""Samples as people read them: texts, and numbers per token."""

from collections.abc import Callable, Sequence

import numpy as np

from slime_ppo.tracking.base import SampleRecord
from slime_ppo.types.rollout_batch import RolloutBatch
from slime_ppo.types.sample import Sample

TokenStrings = Callable[[np.ndarray], Sequence[str]]


def training_records(samples: Sequence[Sample], batch: RolloutBatch, token_strings: TokenStrings) -> list[SampleRecord]:
    """Records of the samples, whose columns are the first ones of `batch`, in order."""
    offsets = batch.offsets("response_token")

    def tokens_of(row: int, column: np.ndarray | None) -> tuple[float, ...]:
        return () if column is None else tuple(column[offsets[row] : offsets[row + 1]].tolist())

    return [
        SampleRecord(
            rollout_id=batch.rollout_id,
            sample_id=sample.sample_id,
            prompt=sample.prompt.text,
            response=sample.response_text,
            reward=float(batch.rewards[row]),
            finish=sample.finish.value,
            tokens=tuple(token_strings(sample.response_ids)),
            log_probs=tokens_of(row, batch.old_log_probs),
            ref_log_probs=tokens_of(row, batch.ref_log_probs),
            values=tokens_of(row, batch.values),
            advantages=tokens_of(row, batch.advantages),
            returns=tokens_of(row, batch.returns),
            loss_mask=tuple(bool(mask) for mask in sample.loss_mask),
            kind="train",
        )
        for row, sample in enumerate(samples)
    ]


def eval_records(rollout_id: int, data_set: str, samples: Sequence[Sample], token_strings: TokenStrings) -> list[SampleRecord]:
    """Records of answers to held-out prompts of one data set; they have rewards, and nothing per token."""
    return [
        SampleRecord(
            rollout_id=rollout_id,
            sample_id=sample.sample_id,
            prompt=sample.prompt.text,
            response=sample.response_text,
            reward=0.0 if sample.reward is None else sample.reward,
            finish=sample.finish.value,
            tokens=tuple(token_strings(sample.response_ids)),
            log_probs=(),
            ref_log_probs=(),
            values=(),
            advantages=(),
            returns=(),
            loss_mask=(),
            kind="eval",
            data_set=data_set,
        )
        for sample in samples
    ]
