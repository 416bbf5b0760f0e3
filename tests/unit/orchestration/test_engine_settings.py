"""What SGLang's servers and their client are started with, and the way of the weights, by config and device."""

import socket
from pathlib import Path
from typing import Any

import pytest

from slime_ppo.config.root import Config
from slime_ppo.errors import ConfigError
from slime_ppo.orchestration.engine_settings import (
    check_sglang,
    engine_settings,
    external_servers,
    meeting_host,
    server_specs,
    weight_sync,
)
from slime_ppo.weight_sync.disk import DiskSync
from slime_ppo.weight_sync.distributed import DistributedSync
from slime_ppo.weight_sync.tensor import SharedMemorySync, TensorSync
from tests.helpers.configs import make_config
from tests.helpers.tiny_llama import make_tiny_llama

NOBODY: Any = None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model") / "a", seed=0)


def _sglang(folder: Path, **values: Any) -> Config:
    return make_config(model__hf_checkpoint=str(folder), rollout__engine="sglang", **values)


@pytest.mark.parametrize(
    ("values", "device", "expected"),
    [
        ({}, "cpu", DistributedSync),
        ({}, "cuda", SharedMemorySync),
        ({"cluster__colocate": False}, "cuda", DistributedSync),
        ({"sglang__server_urls": "http://a:1"}, "cuda", DistributedSync),
        ({"rollout__weight_sync": "tensor"}, "cpu", TensorSync),
        ({"rollout__weight_sync": "disk"}, "cuda", DiskSync),
        ({"rollout__engine": "embedded"}, "cuda", TensorSync),
    ],
)
def test_weight_sync_auto_and_named_ways(folder: Path, values: dict[str, Any], device: Any, expected: type) -> None:
    config = make_config(model__hf_checkpoint=str(folder), **({"rollout__engine": "sglang"} | values))
    assert type(weight_sync(config, NOBODY, NOBODY, device=device)) is expected


def test_weight_sync_folder_that_several_runs_are_given_has_one_of_its_own_for_each(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    monkeypatch.setattr("slime_ppo.orchestration.engine_settings.DiskSync", lambda *_, folder, **__: made.append(folder))
    given = {"rollout__weight_sync": "disk", "rollout__weight_sync_folder": "/shared/w"}
    runs = [{"run__save": str(tmp_path / place / "ppo")} for place in ("a", "b", "a")]
    for values in (*({**given, **run} for run in runs), {"rollout__weight_sync": "disk", "run__save": "runs/x"}):
        weight_sync(_sglang(folder, **values), NOBODY, NOBODY, device="cpu")
    first, second, again, default = made
    assert first.startswith("/shared/w/ppo-") and first == again != second
    assert default == "runs/x/weight_sync"


@pytest.mark.parametrize(
    ("urls", "expected"),
    [(None, "127.0.0.1"), ("http://localhost:1", "127.0.0.1"), ("http://127.0.0.1:1,http://192.0.2.7:1", "10.1.2.3")],
)
def test_meeting_host_is_loopback_unless_a_server_is_elsewhere(
    folder: Path, monkeypatch: pytest.MonkeyPatch, urls: str | None, expected: str
) -> None:
    """192.0.2.7 (RFC 5737) is nobody's; the way to it is played."""

    class Way(socket.socket):
        def connect(self, address: Any) -> None:
            self.name = "10.1.2.3" if address[0] == "192.0.2.7" else "127.0.0.1"

        def getsockname(self) -> Any:
            return (self.name, 1)

    monkeypatch.setattr("slime_ppo.orchestration.engine_settings.socket.socket", Way)
    assert meeting_host(_sglang(folder, sglang__server_urls=urls)) == expected


def test_meeting_host_of_a_server_whose_name_nobody_knows_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"--sglang-server-urls http://no-such-host\.invalid:1: no way leads there"):
        meeting_host(_sglang(folder, sglang__server_urls="http://127.0.0.1:1,http://no-such-host.invalid:1"))


def test_server_specs_one_per_engine_with_ports_seeds_and_logs_of_their_own(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret", encoding="utf-8")
    config = _sglang(
        folder,
        parallel__actor_num_gpus_per_node=4,
        rollout__rollout_num_gpus_per_engine=2,
        sglang__port=30000,
        sglang__api_key_file=str(tmp_path / "key"),
        sglang__server_args="--mem-fraction-static 0.5",
        run__seed=7,
    )
    first, second = server_specs(config, device="cpu", log_dir=str(tmp_path))
    assert (first.tp_size, first.port, first.random_seed, first.api_key) == (2, 30000, 7, "secret")
    assert (second.port, second.random_seed) == (30001, 8)
    assert first.extra == (("mem_fraction_static", ("0.5",)),)
    assert first.log_file != second.log_file
    assert "secret" not in repr(first)
    assert engine_settings(config, device="cuda").trainer_ranks == ((0, 1), (2, 3))
    assert engine_settings(config, device="cpu").trainer_ranks is None


def test_external_servers_are_those_of_the_list_and_none_is_started(folder: Path) -> None:
    config = _sglang(folder, sglang__server_urls="http://a:1, http://b:2/")
    assert len(external_servers(config)) == 2
    assert server_specs(config, device="cpu", log_dir="logs") == []


def test_check_sglang_refuses_arguments_and_key_files_before_anything_starts(folder: Path) -> None:
    check_sglang(_sglang(folder))
    with pytest.raises(ConfigError, match="did you mean --mem-fraction-static"):
        check_sglang(_sglang(folder, sglang__server_args="--mem-fraction-statc 0.5"))
    with pytest.raises(ConfigError, match="cannot be read"):
        check_sglang(_sglang(folder, sglang__api_key_file="/no/such/key"))
    for host in ("0.0.0.0", "::1"):
        with pytest.raises(ConfigError, match="--sglang-host: host"):
            check_sglang(_sglang(folder, sglang__host=host))
    check_sglang(make_config(model__hf_checkpoint="/nowhere", sglang__server_args="--nonsense"))
