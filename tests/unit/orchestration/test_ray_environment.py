"""What a local cluster's environment is, and that a cluster to join is left alone."""

from types import SimpleNamespace

import pytest

from slime_ppo.config.cluster import ClusterConfig
from slime_ppo.orchestration.ray_environment import cluster_address, prepare_ray_environment


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    variables: dict[str, str] = {}
    monkeypatch.setattr("slime_ppo.orchestration.ray_environment.os", SimpleNamespace(environ=variables))
    return variables


@pytest.mark.parametrize(
    ("flag", "variable", "address"),
    [
        (None, None, None),
        (None, "10.0.0.1:6379", "10.0.0.1:6379"),
        ("auto", "10.0.0.1:6379", "auto"),
        (None, "", None),
        (None, "local", None),
        ("local", "10.0.0.1:6379", None),
    ],
)
def test_cluster_address_flag_beats_variable_and_local_is_none(
    environ: dict[str, str], flag: str | None, variable: str | None, address: str | None
) -> None:
    environ |= {} if variable is None else {"RAY_ADDRESS": variable}
    assert cluster_address(ClusterConfig(ray_address=flag)) == address


def test_prepare_local_cluster_makes_a_new_token_for_each_run(environ: dict[str, str]) -> None:
    tokens = set()
    for _ in range(2):
        environ.clear()
        prepare_ray_environment(ClusterConfig(num_threads_per_rank=3))
        assert environ["RAY_AUTH_MODE"] == "token"
        assert environ["OMP_NUM_THREADS"] == "3"
        assert environ["RAY_memory_monitor_refresh_ms"] == "0" and environ["RAY_USAGE_STATS_ENABLED"] == "0"
        tokens.add(environ["RAY_AUTH_TOKEN"])
    assert len(tokens) == 2 and {len(bytes.fromhex(token)) for token in tokens} == {32}


@pytest.mark.parametrize(("flag", "given"), [(None, {"RAY_ADDRESS": "10.0.0.1:6379"}), ("10.0.0.1:6379", {})])
def test_prepare_cluster_to_join_sets_nothing(environ: dict[str, str], flag: str | None, given: dict[str, str]) -> None:
    environ |= given
    prepare_ray_environment(ClusterConfig(ray_address=flag))
    assert environ == given


def test_prepare_local_cluster_keeps_the_users_lock_and_settings(environ: dict[str, str]) -> None:
    given = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/secret", "RAY_raylet_start_wait_time_s": "7"}
    environ |= given
    prepare_ray_environment(ClusterConfig())
    assert {name: environ[name] for name in given} == given
    assert "RAY_AUTH_TOKEN" not in environ
    assert environ["RAY_USAGE_STATS_ENABLED"] == "0"


def test_prepare_lock_that_the_user_took_off_stays_off(environ: dict[str, str]) -> None:
    environ["RAY_AUTH_MODE"] = "disabled"
    prepare_ray_environment(ClusterConfig())
    assert environ["RAY_AUTH_MODE"] == "disabled" and "RAY_AUTH_TOKEN" not in environ
