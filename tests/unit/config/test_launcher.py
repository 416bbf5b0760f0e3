"""Who starts the ranks, from config and environment, and which layouts cannot run without Ray."""

import pytest

from slime_ppo.config.fields import Value
from slime_ppo.config.launcher import LauncherName, RankPlace, chosen_launcher, launcher_text
from slime_ppo.errors import ConfigError
from tests.helpers.configs import make_config

ALONE = RankPlace()
SECOND_OF_TWO = RankPlace(1, 2, 1, started_by_torchrun=True)


def test_place_is_torchruns_when_all_its_variables_are_there() -> None:
    environment = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
    assert RankPlace.from_environment(environment) == RankPlace(5, 8, 1, started_by_torchrun=True)
    for name in environment:
        rest = {key: value for key, value in environment.items() if key != name}
        assert RankPlace.from_environment(rest) == ALONE


@pytest.mark.parametrize(
    ("asked", "place", "expected"),
    [
        ("auto", ALONE, "ray"),
        ("auto", RankPlace(0, 1, 0, started_by_torchrun=True), "local"),
        ("local", ALONE, "local"),
        ("ray", ALONE, "ray"),
    ],
)
def test_chosen_launcher_auto_is_local_under_torchrun(asked: str, place: RankPlace, expected: LauncherName) -> None:
    assert chosen_launcher(make_config(cluster__launcher=asked), place) == expected


def test_chosen_launcher_ray_in_many_processes_of_torchrun_is_refused() -> None:
    with pytest.raises(ConfigError, match="--launcher ray in one of 2 processes of torchrun"):
        chosen_launcher(make_config(cluster__launcher="ray"), SECOND_OF_TWO)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"parallel__actor_num_gpus_per_node": 4}, r"asks for 4 ranks .* torchrun has started 2"),
        ({}, r"asks for 1 ranks .* torchrun has started 2"),
        ({"parallel__actor_num_gpus_per_node": 2, "critic__num_gpus_per_node": 1}, "actor has 2 ranks, the critic 1"),
        (
            {
                "parallel__actor_num_gpus_per_node": 2,
                "parallel__pipeline_model_parallel_size": 2,
                "critic__num_virtual_stages_per_pipeline_rank": 2,
            },
            "actor has 1 virtual stages per rank, the critic 2",
        ),
        (
            {"parallel__actor_num_gpus_per_node": 2, "critic__tensor_model_parallel_size": 2},
            "actor has 1 ranks per tensor-parallel group, the critic 2",
        ),
        ({"parallel__actor_num_nodes": 2, "rollout__engine": "sglang"}, r"servers have 2 devices .* on the first node, with 1"),
    ],
)
def test_chosen_launcher_layout_that_the_ranks_do_not_fit_is_refused_with_both_numbers(
    values: dict[str, Value], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        chosen_launcher(make_config(**values), SECOND_OF_TWO)


def test_chosen_launcher_critic_sizes_of_a_run_without_a_critic_do_not_matter() -> None:
    values: dict[str, Value] = {"parallel__actor_num_gpus_per_node": 2, "critic__num_gpus_per_node": 1}
    assert chosen_launcher(make_config(ppo__advantage_estimator="grpo", **values), SECOND_OF_TWO) == "local"


@pytest.mark.parametrize("asked", ["auto", "local"])
def test_chosen_launcher_devices_of_their_own_need_ray(asked: str) -> None:
    config = make_config(cluster__launcher=asked, cluster__colocate=False)
    with pytest.raises(ConfigError, match="--no-colocate without Ray: .* share their devices.* --launcher ray"):
        chosen_launcher(config, RankPlace(0, 1, 0, started_by_torchrun=True))
    assert chosen_launcher(make_config(cluster__colocate=False), ALONE) == "ray"


def test_launcher_text_says_how_many_ranks_and_who_started_them() -> None:
    assert launcher_text("ray", ALONE) == "launcher: ray"
    assert launcher_text("local", ALONE) == "launcher: local, 1 rank, no Ray"
    assert launcher_text("local", SECOND_OF_TWO) == "launcher: local, 2 ranks by torchrun, no Ray"
