"""What servers are sent during a push, and above all what they are never sent. The servers are played: they accept everything, as
SGLang does (facts in the module's docstring)."""

import base64
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slime_ppo.config.model_shape import ModelShape
from slime_ppo.errors import RolloutError, WeightSyncError
from slime_ppo.rollout.engine import NO_VERSION
from slime_ppo.rollout.sglang.server import ServerAddress
from slime_ppo.rollout.sglang.updates import ServerUpdates, UpdateSettings
from slime_ppo.weight_sync.base import Meeting
from slime_ppo.weight_sync.bucket import TensorSpec, pack_bucket, plan_buckets
from tests.helpers.tiny_llama import make_tiny_llama

EXPECTED = {"a.weight": ((2, 3), "float32"), "b.weight": ((4,), "float32"), "c.weight": ((5,), "float32")}
SPECS = tuple(TensorSpec(name, shape, dtype) for name, (shape, dtype) in EXPECTED.items())
TENSORS = {spec.name: torch.randn(spec.shape, generator=torch.Generator().manual_seed(1)) for spec in SPECS}
BUCKET_BYTES = 40
BUCKETS = plan_buckets(SPECS, BUCKET_BYTES)
MEETING = Meeting("10.0.0.1", 4000, world_size=4, group_name="group-1", backend="gloo")


@dataclass
class Servers:
    """A fleet of a server with two ranks and one with one rank; `fails` are paths that a server refuses."""

    current: list[ServerAddress]
    posts: list[tuple[str, list[dict[str, Any]]]]
    fails: set[str]
    version: str = "default"
    on_refusal: dict[str, object] = field(default_factory=dict)

    def addresses(self) -> Sequence[ServerAddress]:
        return self.current

    def post(
        self,
        path: str,
        bodies: Sequence[Mapping[str, object]],
        *,
        timeout_s: float,
        on_refusal: tuple[str, Mapping[str, object]] | None = None,
    ) -> list[Any]:
        self.on_refusal[path] = on_refusal
        assert timeout_s == 7.0
        assert len(bodies) == len(self.current)
        self.posts.append((path, [dict(body) for body in bodies]))
        if path in self.fails:
            raise RolloutError(f"http://b{path} answered 400: no")
        self.version = str(bodies[0].get("weight_version", self.version))
        return [{"success": True}] * len(bodies)

    def get(self, path: str, *, timeout_s: float) -> list[Any]:
        assert path == "/model_info"
        return [{"weight_version": "7"}, {"weight_version": self.version}]

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.posts]


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    return ModelShape.from_hf_folder(make_tiny_llama(tmp_path_factory.mktemp("model")))


@pytest.fixture
def servers() -> Servers:
    return Servers([ServerAddress("http://a", 2, 1), ServerAddress("http://b", 1, 1)], [], set())


@pytest.fixture
def updates(servers: Servers, shape: ModelShape) -> ServerUpdates:
    return ServerUpdates(servers, UpdateSettings(EXPECTED, shape, "cpu", timeout_s=7.0))


def push(updates: ServerUpdates, version: int = 7, *, load: Callable[[int], None] | None = None) -> int:
    updates.begin(SPECS, version, bucket_bytes=BUCKET_BYTES, pause_mode="retract")
    for bucket in BUCKETS:
        if load is None:
            updates.load_bucket(bucket.index, pack_bucket(bucket, TENSORS))
        else:
            load(bucket.index)
    return updates.end()


def test_push_of_bytes_pauses_sends_every_bucket_and_only_the_last_carries_the_version(
    updates: ServerUpdates, servers: Servers
) -> None:
    assert push(updates) == updates.version == 7
    update = "/update_weights_from_tensor"
    order = ["/pause_generation", "/end_weight_update", "/begin_weight_update", update, update, "/end_weight_update"]
    assert servers.paths == [*order, "/continue_generation"]
    first, last = (bodies for path, bodies in servers.posts if path == update)
    assert [(body["flush_cache"], body.get("weight_version")) for body in first + last] == [(False, None)] * 2 + [(True, "7")] * 2
    assert [len(body["serialized_named_tensors"]) for body in first] == [2, 1]
    sent = {}
    for body in (first[1], last[1]):
        content = pickle.loads(base64.b64decode(body["serialized_named_tensors"][0]))
        for entry in content["metadata"]:
            flat = content["flattened_tensor"][entry.start_idx : entry.end_idx]
            sent[entry.name] = flat.view(entry.dtype).reshape(entry.shape)
    assert set(sent) == set(TENSORS)
    for name, tensor in TENSORS.items():
        torch.testing.assert_close(sent[name], tensor, rtol=0, atol=0)
    # a session that another push may have left open is closed once
    servers.posts.clear()
    push(updates)
    assert servers.paths[:2] == ["/pause_generation", "/begin_weight_update"]


def test_push_to_servers_that_are_paused_neither_pauses_nor_continues_them(updates: ServerUpdates, servers: Servers) -> None:
    updates.begin(SPECS, 7, bucket_bytes=1000, pause_mode=None)
    updates.load_bucket(0, pack_bucket(plan_buckets(SPECS, 1000)[0], TENSORS))
    assert updates.end() == 7
    assert {"/pause_generation", "/continue_generation"}.isdisjoint(servers.paths)


def test_push_by_broadcast_names_the_tensors_as_they_lie_in_the_bucket(updates: ServerUpdates, servers: Servers) -> None:
    updates.join_group(MEETING)
    [(path, bodies)] = servers.posts
    assert path == "/init_weights_update_group"
    assert [(body["rank_offset"], body["world_size"], body["master_port"]) for body in bodies] == [(1, 4, 4000), (3, 4, 4000)]
    push(updates, load=updates.receive_bucket)
    received = [bodies[0] for path, bodies in servers.posts if path == "/update_weights_from_distributed"]
    assert [body["names"] for body in received] == [[spec.name for spec in bucket.specs] for bucket in BUCKETS]
    assert received[0]["shapes"] == [[2, 3], [4]]
    assert [body.get("weight_version") for body in received] == [None, "7"]
    assert {body["load_format"] for body in received} == {"flattened_bucket"}
    assert servers.on_refusal["/update_weights_from_distributed"] == ("/destroy_weights_update_group", {"group_name": "group-1"})
    updates.leave_group()
    updates.leave_group()
    assert [bodies[0] for path, bodies in servers.posts if path.startswith("/destroy")] == [{"group_name": "group-1"}]
    with pytest.raises(WeightSyncError, match="joined no group"):
        push(updates, load=updates.receive_bucket)


def test_push_through_shared_memory_gives_every_rank_the_handle_of_the_trainers_rank_on_its_gpu(
    servers: Servers, shape: ModelShape
) -> None:
    settings = UpdateSettings(EXPECTED, shape, "cuda", timeout_s=7.0, trainer_ranks=((2, 3), (0,)))
    updates = ServerUpdates(servers, settings)
    assert push(updates, load=lambda index: updates.load_shared(index, [f"handle {index} of {rank}" for rank in range(4)])) == 7
    sent = [bodies for path, bodies in servers.posts if path == "/update_weights_from_tensor"]
    assert [body["serialized_named_tensors"] for body in sent[1]] == [["handle 1 of 2", "handle 1 of 3"], ["handle 1 of 0"]]
    elsewhere = ServerUpdates(servers, replace(settings, trainer_ranks=None))
    with pytest.raises(WeightSyncError, match="servers that are not on the trainer's"):
        push(elsewhere, load=lambda index: elsewhere.load_shared(index, ["handle"] * 4))


def test_join_group_of_another_size_is_refused_before_any_server_hears_of_it(updates: ServerUpdates, servers: Servers) -> None:
    with pytest.raises(WeightSyncError, match="a group of 5 ranks for 3 ranks of servers"):
        updates.join_group(replace(MEETING, world_size=5))
    assert servers.posts == []


@pytest.mark.parametrize(
    ("manifest", "told"),
    [
        ((*SPECS, TensorSpec("typo.weight", (1,), "float32")), "unexpected: typo.weight"),
        (SPECS[:2], "missing: c.weight"),
        ((*SPECS[:2], TensorSpec("c.weight", (6,), "float32")), r"c.weight is float32 \[6\], the engine expects float32 \[5\]"),
        ((*SPECS[:2], TensorSpec("c.weight", (5,), "bfloat16")), r"c.weight is bfloat16 \[5\], the engine expects float32 \[5\]"),
        ((*SPECS, SPECS[0]), "twice: a.weight"),
    ],
)
def test_manifest_that_does_not_fit_is_refused_before_any_server_hears_of_it(
    updates: ServerUpdates, servers: Servers, manifest: tuple[TensorSpec, ...], told: str
) -> None:
    """An unknown name or half of the tensors SGLang would accept, a wrong type it would cast, and of a wrong shape it would die."""
    with pytest.raises(WeightSyncError, match=told):
        updates.begin(manifest, 7, bucket_bytes=BUCKET_BYTES, pause_mode="retract")
    assert servers.posts == []
    with pytest.raises(WeightSyncError, match="no push was under way"):
        updates.load_bucket(0, pack_bucket(BUCKETS[0], TENSORS))
    assert servers.posts == []


@pytest.mark.parametrize("missing", [-4, 4])
def test_bucket_of_other_length_than_its_tensors_is_refused_before_it_is_sent(
    updates: ServerUpdates, servers: Servers, missing: int
) -> None:
    updates.begin(SPECS, 7, bucket_bytes=BUCKET_BYTES, pause_mode="retract")
    servers.posts.clear()
    flat = np.zeros(BUCKETS[0].num_bytes - missing, np.uint8)
    with pytest.raises(WeightSyncError, match=rf"arrived as uint8 \[{len(flat)}\], expected uint8 \[40\]"):
        updates.load_bucket(0, flat)
    assert servers.posts == []
    with pytest.raises(WeightSyncError, match="no push was under way"):
        updates.load_bucket(0, pack_bucket(BUCKETS[0], TENSORS))


def test_push_without_its_last_bucket_is_no_push(updates: ServerUpdates, servers: Servers) -> None:
    updates.begin(SPECS, 7, bucket_bytes=BUCKET_BYTES, pause_mode="retract")
    updates.load_bucket(0, pack_bucket(BUCKETS[0], TENSORS))
    with pytest.raises(WeightSyncError, match=r"after 1 of 2 buckets; missing \[1\], first tensor c.weight"):
        updates.end()
    assert updates.version == NO_VERSION
    assert all("weight_version" not in body for _, bodies in servers.posts for body in bodies)
    assert "/continue_generation" not in servers.paths


@pytest.mark.parametrize(("index", "told"), [(0, "pushed twice"), (2, "expected 0 to 1"), (-1, "expected 0 to 1")])
def test_bucket_twice_or_of_another_plan_is_refused(updates: ServerUpdates, servers: Servers, index: int, told: str) -> None:
    updates.begin(SPECS, 7, bucket_bytes=BUCKET_BYTES, pause_mode="retract")
    updates.load_bucket(0, pack_bucket(BUCKETS[0], TENSORS))
    sent = len(servers.posts)
    with pytest.raises(WeightSyncError, match=told):
        updates.load_bucket(index, pack_bucket(BUCKETS[0], TENSORS))
    assert len(servers.posts) == sent


@pytest.mark.parametrize(
    "path",
    ["/pause_generation", "/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update", "/continue_generation"],
)
def test_server_that_refuses_any_step_leaves_no_version_until_a_whole_push(
    updates: ServerUpdates, servers: Servers, path: str
) -> None:
    push(updates)
    servers.fails.add(path)
    with pytest.raises(WeightSyncError, match=f"http://b{path} answered 400: no. The engine has no valid weights: push all again"):
        push(updates)
    assert updates.version == NO_VERSION
    with pytest.raises(WeightSyncError, match="no push was under way"):
        updates.end()
    servers.fails.clear()
    servers.posts.clear()
    assert push(updates) == updates.version == 7
    left_open = path in ("/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update")
    assert (servers.paths[1] == "/end_weight_update") == left_open


def test_server_that_reports_another_version_or_was_started_anew_is_an_error(updates: ServerUpdates, servers: Servers) -> None:
    with pytest.raises(WeightSyncError, match="version 8 was pushed, http://a reports '7'"):
        push(updates, 8)
    updates.begin(SPECS, 7, bucket_bytes=1000, pause_mode="retract")
    updates.load_bucket(0, pack_bucket(plan_buckets(SPECS, 1000)[0], TENSORS))
    servers.current[1] = replace(servers.current[1], incarnation=2)
    with pytest.raises(WeightSyncError, match="started anew during the push"):
        updates.end()
    assert updates.version == NO_VERSION


def test_folder_that_does_not_fit_is_refused_before_any_server_reads_it(
    servers: Servers, shape: ModelShape, tmp_path: Path
) -> None:
    """SGLang dies of a checkpoint with another shape."""
    from slime_ppo.weight_sync.folder import served_tensors

    good, wrong = make_tiny_llama(tmp_path / "good"), make_tiny_llama(tmp_path / "wrong", intermediate=96)
    expected = served_tensors(good, "float32")
    updates = ServerUpdates(servers, UpdateSettings(expected, shape, "cpu", timeout_s=7.0))
    manifest = tuple(TensorSpec(name, *entry) for name, entry in expected.items())
    updates.begin(manifest, 7, bucket_bytes=1 << 30, pause_mode="retract")
    servers.posts.clear()
    with pytest.raises(WeightSyncError, match=r"down_proj.weight is \[64, 96\], the engine expects \[64, 128\]"):
        updates.load_folder(str(wrong))
    assert servers.posts == []
    updates.begin(manifest, 7, bucket_bytes=1 << 30, pause_mode="retract")
    updates.load_folder(str(good))
    assert servers.posts[-1] == (
        "/update_weights_from_disk",
        [{"model_path": str(good), "flush_cache": True, "weight_version": "7"}] * 2,
    )
    assert updates.end() == 7
