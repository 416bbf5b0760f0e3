"""What the embedded engine adds to the contract: start-up state, several samplers in one call, manifest, checksums."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from slime_ppo.errors import RolloutError, WeightSyncError
from slime_ppo.rollout.embedded.engine import EmbeddedEngine
from slime_ppo.rollout.engine import NO_VERSION, EnginePart, check_results
from slime_ppo.types.sample import SamplingParams
from slime_ppo.weight_sync.bucket import bucket_checksums, pack_bucket, plan_buckets, tensor_checksum
from tests.helpers.engine_harness import BUCKET_BYTES, folder_tensors, make_requests, push_folder
from tests.helpers.tiny_llama import make_tiny_llama

SAMPLING = SamplingParams(max_new_tokens=5)


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return make_tiny_llama(tmp_path, tie=request.param, layers=1)


def test_engine_after_start_is_awake_without_a_version(folder: Path) -> None:
    engine = EmbeddedEngine(folder)
    assert engine.health().awake == EnginePart.ALL
    assert engine.weight_version() == NO_VERSION
    with pytest.raises(RolloutError, match="after start"):
        engine.generate(make_requests(1, SAMPLING))


def test_engine_manifest_names_exactly_the_tensors_of_the_folder(folder: Path) -> None:
    engine = EmbeddedEngine(folder)
    assert {spec.name: spec.shape for spec in engine.manifest()} == {n: tuple(t.shape) for n, t in folder_tensors(folder).items()}


def test_engine_push_restores_offloaded_weights_bit_exactly(folder: Path) -> None:
    engine = EmbeddedEngine(folder)
    loaded = engine.checksums()
    engine.offload(EnginePart.ALL)
    with pytest.raises(WeightSyncError, match="offloaded"):
        engine.checksums()
    engine.wake(EnginePart.WEIGHTS)
    push_folder(engine, folder, 1)
    assert engine.checksums() == loaded


def test_engine_checksums_equal_those_of_the_pushed_buckets_and_catch_one_changed_bit(folder: Path) -> None:
    engine = EmbeddedEngine(folder)
    push_folder(engine, folder, 0)
    tensors = folder_tensors(folder)
    sent: dict[str, str] = {}
    for bucket in plan_buckets(engine.manifest(), BUCKET_BYTES):
        sent |= bucket_checksums(bucket, pack_bucket(bucket, tensors))
    assert engine.checksums() == sent == {name: tensor_checksum(name, tensor) for name, tensor in tensors.items()}
    assert engine.checksums(["model.norm.weight"]) == {"model.norm.weight": sent["model.norm.weight"]}
    with torch.no_grad():
        engine._model.model.norm.weight.view(torch.int32)[3] ^= 1
    assert {name for name, value in engine.checksums().items() if value != sent[name]} == {"model.norm.weight"}


def test_engine_several_samplers_in_one_call_equal_separate_calls(folder: Path) -> None:
    engine = EmbeddedEngine(folder)
    push_folder(engine, folder, 0)
    changes = ({}, {"top_k": 4}, {"temperature": 0.0}, {"temperature": 0.5}, {"min_p": 0.3})
    samplers = [replace(SAMPLING, **change) for change in changes]
    requests = [replace(r, sampling=samplers[i % 5]) for i, r in enumerate(make_requests(10, SAMPLING))]
    mixed = engine.generate(requests)
    check_results(requests, mixed)
    for start in range(5):
        for alone, together in zip(engine.generate(requests[start::5]), mixed[start::5], strict=True):
            np.testing.assert_array_equal(alone.response_ids, together.response_ids)
            np.testing.assert_array_equal(alone.log_probs, together.log_probs)


def test_engine_failed_begin_leaves_no_valid_version(folder: Path) -> None:
    engine = EmbeddedEngine(folder)
    push_folder(engine, folder, 0)
    with pytest.raises(WeightSyncError, match="missing: model.norm.weight"):
        engine.begin_update(tuple(s for s in engine.manifest() if s.name != "model.norm.weight"), 1, bucket_bytes=BUCKET_BYTES)
    with pytest.raises(RolloutError, match="before a weight version was pushed"):
        engine.generate(make_requests(1, SAMPLING))


def test_engine_offload_in_the_middle_of_a_push_ends_it(folder: Path) -> None:
    engine = EmbeddedEngine(folder)
    engine.begin_update(engine.manifest(), 1, bucket_bytes=BUCKET_BYTES)
    engine.offload(EnginePart.WEIGHTS)
    engine.wake(EnginePart.WEIGHTS)
    with pytest.raises(WeightSyncError, match="no push was under way"):
        engine.end_update()


def test_engine_num_threads_is_set(folder: Path) -> None:
    before = torch.get_num_threads()
    EmbeddedEngine(folder, num_threads=2)
    found = torch.get_num_threads()
    torch.set_num_threads(before)
    assert found == 2


def test_engine_bfloat16_generates_and_receives_bfloat16(folder: Path) -> None:
    engine = EmbeddedEngine(folder, dtype="bfloat16")
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in folder_tensors(folder).items()}
    engine.begin_update(engine.manifest(), 4, bucket_bytes=BUCKET_BYTES)
    for bucket in plan_buckets(engine.manifest(), BUCKET_BYTES):
        engine.load_bucket(bucket.index, pack_bucket(bucket, tensors))
    assert engine.end_update() == 4
    requests = make_requests(3, SAMPLING)
    results = engine.generate(requests)
    check_results(requests, results)
    assert results[0].log_probs.dtype == np.float32
