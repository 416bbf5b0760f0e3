"""The worst tokens of a rollout: which they are, what is said of each, and the file they go to."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from slime_ppo.tracking.gap_dump import NUM_TOKENS, GapToken, dump_tokens, worst_tokens
from slime_ppo.types.rollout_batch import RolloutBatch
from slime_ppo.types.sample import FinishReason, Prompt, Sample, Support, VersionSpan, one_version


def make_sample(sample_id: int, ids: list[int], *, masked: int | None = None, full: bool = False) -> Sample:
    counts = np.arange(1, len(ids) + 1, dtype=np.int32)
    return Sample(
        sample_id=sample_id,
        group_id=sample_id,
        trajectory_id=sample_id,
        prompt=Prompt(0, f"prompt {sample_id}", np.array([5, 6, 7], np.int32)),
        response_ids=np.array(ids, np.int32),
        response_text=f"response {sample_id}",
        rollout_log_probs=np.full(len(ids), -1.0, np.float32),
        support=Support(np.concatenate([np.arange(10, 10 + n, dtype=np.int32) for n in counts]), counts) if full else None,
        loss_mask=np.array([position != masked for position in range(len(ids))]),
        finish=FinishReason.STOP,
        weight_versions=one_version(0, len(ids)),
        full_log_probs=np.full(len(ids), -2.0, np.float32) if full else None,
        reward=0.0,
    )


def spelled(ids: np.ndarray) -> list[str]:
    return [f"<{i}>" for i in ids]


def found_in(samples: list[Sample], gaps: list[float], full_gaps: list[float] | None = None) -> list[GapToken]:
    batch = RolloutBatch.from_samples(3, samples)
    batch = batch.with_columns(old_log_probs=(batch.rollout_log_probs + np.array(gaps, np.float32)))
    if full_gaps is not None:
        batch = batch.with_columns(old_full_log_probs=np.array(full_gaps, np.float32) - np.float32(2))
    return worst_tokens(samples, batch, spelled)


def places(tokens: list[GapToken]) -> list[tuple[int, int]]:
    return [(token.sample_id, token.position) for token in tokens]


def test_worst_tokens_are_ordered_by_size_of_the_difference_without_masked_ones() -> None:
    samples = [make_sample(40, [8, 9]), make_sample(41, [11, 12, 13], masked=1), make_sample(42, [14])]
    tokens = found_in(samples, [0.0, -0.5, 0.25, 9.0, 0.75, -0.25])
    assert places(tokens) == [(41, 2), (40, 1), (41, 0), (42, 0), (40, 0)]
    assert [token.difference for token in tokens] == [0.75, -0.5, 0.25, -0.25, 0.0]


def test_worst_tokens_say_everything_of_a_token() -> None:
    spans = (VersionSpan(3, 0, 1), VersionSpan(4, 1, 3))
    sample = replace(make_sample(41, [11, 12, 13], full=True), weight_versions=spans, num_cached_tokens=2)
    worst = found_in([make_sample(40, [8], full=True), sample], [0.0, 0.0, 0.0, 0.5], [0.0, 0.0, 0.25, 0.25])[0]
    assert worst == GapToken(
        rollout_id=3, sample_id=41, position=2, token_id=13, token="<13>", engine_log_prob=-1.0, trainer_log_prob=-0.5,
        engine_full_log_prob=-2.0, trainer_full_log_prob=-1.75, difference=0.5, support_size=3,
        weight_versions=((3, 0, 1), (4, 1, 3)), num_cached_tokens=2, num_prompt_tokens=3, prompt="prompt 41",
        response="response 41",
    )  # fmt: skip


def test_worst_tokens_a_gap_over_the_full_vocabulary_alone_is_found() -> None:
    [first, second] = found_in([make_sample(40, [8, 9], full=True)], [0.125, 0.0], [0.0, -0.5])
    assert (first.position, first.difference) == (1, -0.5)
    assert (second.position, second.difference) == (0, 0.125)


def test_worst_tokens_without_a_restriction_have_neither_support_nor_second_log_probs() -> None:
    [token] = found_in([make_sample(40, [8])], [0.5])
    assert (token.support_size, token.engine_full_log_prob, token.trainer_full_log_prob) == (None, None, None)


def test_worst_tokens_are_so_many() -> None:
    tokens = found_in([make_sample(40, list(range(50)))], [0.5 + 0.01 * i for i in range(50)])
    assert [token.position for token in tokens] == list(range(49, 49 - NUM_TOKENS, -1))


def test_dump_tokens_writes_a_line_each_and_says_where_and_which_is_the_worst(tmp_path: Path) -> None:
    tokens = found_in([make_sample(40, [8, 9], full=True)], [0.125, 0.0], [0.0, -0.5])
    path = tmp_path / "logs" / "gap.jsonl"
    said = dump_tokens(path, tokens)
    assert said == (
        f"The worst is response token 1 of sample 40, '<9>' (id 9): engine -1, trainer -1 (full vocabulary: -2, -2.5); the worst 2 "
        f"are in {path}"
    )
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert (first["sample_id"], first["position"], first["difference"]) == (40, 1, -0.5)
    assert (second["token"], second["weight_versions"], second["support_size"]) == ("<8>", [[0, 0, 2]], 1)


def test_dump_tokens_into_a_place_that_cannot_be_written_still_says_the_worst(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file")
    said = dump_tokens(tmp_path / "logs" / "gap.jsonl", found_in([make_sample(40, [8])], [0.5]))
    assert said.startswith("The worst is response token 0 of sample 40") and "could not be written" in said


@pytest.mark.parametrize("gap", [0.5, -0.5])
def test_worst_tokens_difference_is_trainer_minus_engine(gap: float) -> None:
    [token] = found_in([make_sample(40, [8])], [gap])
    assert token.difference == token.trainer_log_prob - token.engine_log_prob == gap
