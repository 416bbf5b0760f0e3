"""One error lists everything that does not fit between trainer and engine."""

import pytest

from slime_ppo.errors import WeightSyncError
from slime_ppo.weight_sync.base import check_manifest
from slime_ppo.weight_sync.bucket import TensorSpec

EXPECTED = {"a": ((2, 3), "float32"), "b": ((4,), "float32"), "c": ((1,), "bfloat16")}
FITTING = [TensorSpec(name, shape, dtype) for name, (shape, dtype) in EXPECTED.items()]


def test_check_manifest_fitting_in_any_order_passes() -> None:
    check_manifest(FITTING, EXPECTED)
    check_manifest(FITTING[::-1], EXPECTED)


def test_check_manifest_lists_every_problem_in_one_error() -> None:
    specs = [TensorSpec("b", (5,), "float32"), TensorSpec("c", (1,), "float32"), TensorSpec("d", (1,), "float32")]
    with pytest.raises(WeightSyncError) as raised:
        check_manifest([*specs, specs[0]], EXPECTED)
    lines = str(raised.value).split("\n  ")
    assert "trainer's 4 tensors do not fit the engine's 3 parameters" in lines[0]
    assert lines[1:] == [
        "twice: b",
        "missing: a",
        "unexpected: d",
        "b is float32 [5], the engine expects float32 [4]",
        "c is float32 [1], the engine expects bfloat16 [1]",
    ]
