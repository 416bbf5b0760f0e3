"""Samples as arrays and back: equal samples, whatever some of them have and others do not."""

import json
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from slime_ppo.errors import DataError
from slime_ppo.types.sample import FinishReason, Prompt, Sample, Support, VersionSpan
from slime_ppo.types.sample_arrays import PackedSamples, pack_samples, unpack_samples
from tests.helpers.rollout_samples import assert_same_samples, make_samples


def test_unpack_gives_back_equal_samples_that_share_their_prompts() -> None:
    samples = make_samples()
    again = unpack_samples(pack_samples(samples))
    assert_same_samples(again, samples)
    assert again[0].prompt is again[1].prompt is not again[2].prompt
    assert [type(sample.sample_id) for sample in again] == [int] * 4


def test_packed_texts_are_json_and_keep_odd_text_and_odd_metadata() -> None:
    prompt = Prompt(
        0, 'lone \ud800, quote ", newline \n, 雪', np.array([1], np.int32), metadata={"at": object, "of": (1, {"x": None})}
    )
    packed = pack_samples([replace(make_samples()[0], prompt=prompt)])
    [again] = unpack_samples(PackedSamples(packed.arrays, json.loads(json.dumps(packed.texts))))
    assert again.prompt.text == prompt.text
    assert again.prompt.metadata == {"at": str(object), "of": [1, {"x": None}]}


def test_no_samples_are_none() -> None:
    assert unpack_samples(pack_samples([])) == []


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("response_ids", lambda array: array[:-1], "response_ids has 9 entries, expected 10"),
        ("prompt_lens", lambda array: array + 1, "prompt_ids has 5 entries, expected 7"),
        ("support_ids", lambda array: array[1:], "support_ids has 4 entries, expected 5"),
        ("weight_versions", lambda array: array[1:], "weight_versions has 4 entries, expected 5"),
        ("finish", lambda array: array + 7, "IndexError"),
        ("rewards", None, "KeyError: 'rewards'"),
        ("has_loss_mask", lambda array: array & False, "loss_mask has 10 entries, expected 0"),
    ],
)
def test_unpack_arrays_that_do_not_fit_together_are_an_error(name: str, change: Any, message: str) -> None:
    packed = pack_samples(make_samples())
    arrays = dict(packed.arrays)
    if change is None:
        del arrays[name]
    else:
        arrays[name] = change(arrays[name])
    with pytest.raises(DataError, match=message):
        unpack_samples(PackedSamples(arrays, packed.texts))


def test_every_field_of_a_sample_is_compared_by_these_tests() -> None:
    names = {field.name for field in fields(Sample)}
    default = make_samples()[0]
    other: dict[str, Any] = {
        "sample_id": 99,
        "group_id": 99,
        "trajectory_id": 99,
        "prompt": Prompt(5, "other", np.array([9], np.int32)),
        "response_ids": default.response_ids + 1,
        "response_text": "other",
        "rollout_log_probs": default.rollout_log_probs - 1,
        "support": Support(np.array([8, 9, 8], np.int32), np.array([1, 1, 1], np.int32)),
        "loss_mask": ~default.loss_mask,
        "finish": FinishReason.ABORT,
        "weight_versions": (VersionSpan(9, 0, 3),),
        "num_cached_tokens": 99,
        "full_log_probs": default.rollout_log_probs - 2,
        "reward": 99.0,
        "process_rewards": np.full(3, 9, np.float32),
        "reward_cut": True,
    }
    assert other.keys() == names
    for name, value in other.items():
        [changed] = unpack_samples(pack_samples([replace(default, **{name: value})]))
        with pytest.raises(AssertionError):
            assert_same_samples([changed], [default])
