import json
import math
from dataclasses import replace

import pytest

from slime_ppo.tracking.base import RolloutRecord, RunInfo, SampleRecord
from slime_ppo.tracking.report_payload import SampleKeeper, report_payload, rounded, script_json, thin_samples


def spread(samples: tuple[SampleRecord, ...], num_rollouts: int) -> tuple[SampleRecord, ...]:
    """Two samples of 4 tokens per rollout."""
    return tuple(replace(samples[0], rollout_id=i, sample_id=k) for i in range(num_rollouts) for k in range(2))


def test_payload_has_one_entry_per_rollout_and_null_where_a_metric_is_missing(
    run: RunInfo, records: tuple[RolloutRecord, ...], samples: tuple[SampleRecord, ...]
) -> None:
    payload = report_payload(run, records[::-1], samples)
    assert payload["rollouts"] == [0, 1, 2, 3]
    assert payload["criticOnly"] == [True, False, False, False]
    assert payload["metrics"]["train/pg_loss"] == [None, -0.0031, -0.0031, -0.0031]
    assert payload["metrics"]["eval/math"] == [0.3, None, 0.5, None]
    assert payload["evalSets"] == ("code", "math")
    assert [sample["dataSet"] for sample in payload["samples"]] == ["", "", "", "", "math"]
    assert [phase["name"] for phase in payload["phases"]] == list(records[0].phases)
    assert payload["phrases"][2] == [{"text": "so happy", "share": 0.6}, {"text": "a day", "share": 0.33333}]
    assert payload["samples"][1]["mask"] == [1, 1, 0, 1]
    assert payload["samples"][4]["values"] == []


def test_payload_with_nan_and_infinity_is_json_with_null(run: RunInfo, samples: tuple[SampleRecord, ...]) -> None:
    record = RolloutRecord(0, {"a": math.nan, "b": math.inf}, (), {"generate": math.nan})
    sample = replace(samples[0], reward=-math.inf, values=(math.nan, 1.0, 2.0, 3.0))
    payload = json.loads(script_json(report_payload(run, [record], [sample])))
    assert payload["metrics"] == {"a": [None], "b": [None]}
    assert payload["phases"][0]["seconds"] == [None]
    assert payload["samples"][0]["reward"] is None and payload["samples"][0]["values"][0] is None


def test_rounded_keeps_significant_digits_of_small_and_large_numbers() -> None:
    assert [rounded(value, 3) for value in (5.1234e-6, 123456.0, -0.012345)] == [5.12e-6, 123000.0, -0.0123]


@pytest.mark.parametrize(
    "text", ["</script><b>", "<!-- <script>", 'a"b\\c', "line\nbreak\u2028\u2029", "\ud800 lone", "é∂🙂", "{{payload}}"]
)
def test_script_json_of_any_text_cannot_end_the_element_and_reads_back(text: str) -> None:
    encoded = script_json({"text": text})
    assert "<" not in encoded and encoded.isascii()
    assert json.loads(encoded) == {"text": text}


def test_thin_samples_keeps_first_and_last_rollout_and_spreads_the_rest(samples: tuple[SampleRecord, ...]) -> None:
    kept = thin_samples(spread(samples, 101), max_tokens=8 * 11)
    assert [sample.rollout_id for sample in kept[::2]] == list(range(0, 101, 10))
    assert [sample.sample_id for sample in kept[:2]] == [0, 1], "samples of a rollout stay together"


def test_thin_samples_within_the_limit_changes_nothing(samples: tuple[SampleRecord, ...]) -> None:
    assert thin_samples(samples, max_tokens=17) == samples


def test_thin_samples_of_one_rollout_above_the_limit_keeps_it(samples: tuple[SampleRecord, ...]) -> None:
    assert thin_samples(spread(samples, 1), max_tokens=1) == spread(samples, 1)


def test_sample_keeper_over_a_long_run_stays_bounded_and_keeps_both_ends(samples: tuple[SampleRecord, ...]) -> None:
    keeper = SampleKeeper(max_tokens=80)
    for i in range(500):
        keeper.add(replace(sample, rollout_id=i) for sample in samples[:2])
        assert sum(len(sample.tokens) for sample in keeper.samples) <= 80
    ids = sorted({sample.rollout_id for sample in keeper.samples})
    assert (ids[0], ids[-1]) == (0, 499)
    assert len(ids) >= 5
