"""The tokens on which engine and trainer differ most, for the file that a run leaves when it stops over them."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from slime_ppo.tracking.sample_records import TokenStrings
from slime_ppo.types.rollout_batch import RolloutBatch, filled
from slime_ppo.types.sample import Sample

NUM_TOKENS = 20


@dataclass(frozen=True)
class GapToken:
    """One response token, at `position` of its response. Log-probs over the support, and over the full vocabulary where both sides
    have them; `difference` = trainer - engine, of the pair that is farther apart. `support_size` is None without a restriction;
    `weight_versions` are (version, first token, token after the last)."""

    rollout_id: int
    sample_id: int
    position: int
    token_id: int
    token: str
    engine_log_prob: float
    trainer_log_prob: float
    engine_full_log_prob: float | None
    trainer_full_log_prob: float | None
    difference: float
    support_size: int | None
    weight_versions: tuple[tuple[int, int, int], ...]
    num_cached_tokens: int
    num_prompt_tokens: int
    prompt: str
    response: str


def worst_tokens(samples: Sequence[Sample], batch: RolloutBatch, token_strings: TokenStrings) -> list[GapToken]:
    """The NUM_TOKENS trainable tokens with the largest differences, largest first. `batch` has a row for each of the samples, in
    their order, and the trainer's log-probs; equal differences keep the order of the batch."""
    engine, trainer = batch.rollout_log_probs, filled(batch.old_log_probs)
    engine_full, trainer_full = batch.rollout_full_log_probs, batch.old_full_log_probs
    difference = trainer.astype(np.float64) - engine
    if engine_full is not None and trainer_full is not None:
        of_full = trainer_full.astype(np.float64) - engine_full
        difference = np.where(np.abs(of_full) > np.abs(difference), of_full, difference)
    else:
        engine_full = trainer_full = None
    trainable = np.flatnonzero(batch.loss_mask)
    order = np.argsort(-np.abs(difference[trainable]), kind="stable")
    offsets = batch.offsets("response_token")
    found = []
    for at in trainable[order[:NUM_TOKENS]].tolist():
        row = int(np.searchsorted(offsets, at, side="right")) - 1
        sample, position = samples[row], at - int(offsets[row])
        found.append(
            GapToken(
                rollout_id=batch.rollout_id,
                sample_id=sample.sample_id,
                position=position,
                token_id=int(batch.response_ids[at]),
                token=token_strings(sample.response_ids)[position],
                engine_log_prob=float(engine[at]),
                trainer_log_prob=float(trainer[at]),
                engine_full_log_prob=None if engine_full is None else float(engine_full[at]),
                trainer_full_log_prob=None if trainer_full is None else float(trainer_full[at]),
                difference=float(difference[at]),
                support_size=None if batch.support_counts is None else int(batch.support_counts[at]),
                weight_versions=tuple((span.version, span.start, span.end) for span in sample.weight_versions),
                num_cached_tokens=sample.num_cached_tokens,
                num_prompt_tokens=len(sample.prompt.token_ids),
                prompt=sample.prompt.text,
                response=sample.response_text,
            )
        )
    return found


def dump_tokens(path: Path, tokens: Sequence[GapToken]) -> str:
    """Write a JSON line per token, and say where and which is the worst, for an error message. A file that cannot be written is
    said, too: the error it belongs to must not be lost over it."""
    worst = tokens[0]
    which = (
        f"The worst is response token {worst.position} of sample {worst.sample_id}, {worst.token!r} (id {worst.token_id}): "
        f"engine {worst.engine_log_prob:.6g}, trainer {worst.trainer_log_prob:.6g}"
    )
    if worst.engine_full_log_prob is not None and worst.trainer_full_log_prob is not None:
        which += f" (full vocabulary: {worst.engine_full_log_prob:.6g}, {worst.trainer_full_log_prob:.6g})"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(asdict(token)) + "\n" for token in tokens), encoding="utf-8")
    except OSError as error:
        return f"{which}; the others could not be written to {path} ({error.strerror})"
    return f"{which}; the worst {len(tokens)} are in {path}"
