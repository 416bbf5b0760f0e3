"""Debug modes: where files are, what excludes what, and what a run without one half has and needs."""

from pathlib import Path

import pytest

from slime_ppo.config.checks import check_config, config_warnings
from slime_ppo.config.debug import rollout_file
from slime_ppo.config.debug_checks import check_rollout_files_free
from slime_ppo.config.dry_run import bundle_tenants, placement_text
from slime_ppo.config.fields import Value
from slime_ppo.config.launcher import RankPlace, chosen_launcher
from slime_ppo.errors import ConfigError
from tests.helpers.configs import make_config

TRAIN_ONLY: dict[str, Value] = {"debug__debug_train_only": True, "debug__load_debug_rollout_data": "dumps"}
ROLLOUT_ONLY: dict[str, Value] = {"debug__debug_rollout_only": True}


def test_rollout_file_is_in_the_folder_or_named_by_the_pattern() -> None:
    assert rollout_file("dumps", 3) == Path("dumps/rollout_0000003.npz")
    assert rollout_file("d/{rollout_id}/x_{rollout_id}.npz", 12) == Path("d/12/x_12.npz")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (ROLLOUT_ONLY | TRAIN_ONLY, "--debug-rollout-only starts no trainer, --debug-train-only no rollout engine"),
        (
            ROLLOUT_ONLY | {"debug__load_debug_rollout_data": "x"},
            "--debug-rollout-only starts no trainer, --load-debug-rollout-data x no rollout",
        ),
        ({"debug__debug_train_only": True}, "--debug-train-only needs --load-debug-rollout-data, the rollouts"),
        ({"debug__load_debug_rollout_data": "x"}, "--load-debug-rollout-data x needs --debug-train-only"),
        ({"debug__save_debug_rollout_data": "x.npz"}, r"is one file, .* as in --save-debug-rollout-data x_.rollout_id..npz"),
        (TRAIN_ONLY | {"debug__save_debug_rollout_data": "./dumps/"}, "is where the rollouts are loaded from"),
    ],
)
def test_modes_that_contradict_each_other_are_refused(values: dict[str, Value], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_config(make_config(**values))


def test_train_only_has_no_engine_and_evaluates_nothing() -> None:
    config = make_config(
        **TRAIN_ONLY,
        rollout__engine="sglang",
        eval__eval_interval=1,
        eval__eval_prompt_data="held",
        parallel__actor_num_gpus_per_node=2,
    )
    check_config(config)
    assert config.num_rollout_devices == 0 and config.engine_bundles == [] and config.eval_files == {}
    assert bundle_tenants(config) == [("actor rank 0", "critic rank 0"), ("actor rank 1", "critic rank 1")]
    assert "rollout engine: none, rollouts are read from files (--debug-train-only)" in placement_text(config, "ray")
    assert not config_warnings(config)
    assert chosen_launcher(make_config(**TRAIN_ONLY, cluster__launcher="local"), RankPlace()) == "local"


@pytest.mark.parametrize("colocate", [True, False])
def test_rollout_only_has_no_roles_and_the_devices_to_itself(colocate: bool) -> None:
    config = make_config(
        **ROLLOUT_ONLY,
        rollout__engine="sglang",
        cluster__colocate=colocate,
        parallel__actor_num_gpus_per_node=4,
        rollout__rollout_batch_size=3,
        ppo__lambd=0.5,
    )
    check_config(config)  # 3 samples fill no step, which nobody asks
    assert config.roles == () and not config.has_critic and not config.offloads and not config.engine_shares_devices
    assert bundle_tenants(config) == [("SGLang server 0",)]
    assert "rollout engine: 1 SGLang server of TP 1; nothing else (--debug-rollout-only)" in placement_text(config, "ray")
    assert not config_warnings(config)
    assert config.eval_files == {}


def test_rollout_only_on_several_ranks_of_torchrun_is_refused() -> None:
    config = make_config(**ROLLOUT_ONLY, cluster__launcher="local", parallel__actor_num_gpus_per_node=2)
    assert chosen_launcher(config, RankPlace()) == "local"
    with pytest.raises(ConfigError, match="--debug-rollout-only in 2 processes of torchrun"):
        chosen_launcher(config, RankPlace(0, 2, 0, started_by_torchrun=True))


def test_rollouts_of_another_run_are_not_overwritten_unless_that_is_said(tmp_path: Path) -> None:
    where = str(tmp_path / "{rollout_id}.npz")
    check_rollout_files_free(make_config(debug__save_debug_rollout_data=where))
    (tmp_path / "3.npz").touch()
    with pytest.raises(ConfigError, match=r"--save-debug-rollout-data .*already holds 3.npz of another run.*--overwrite"):
        check_rollout_files_free(make_config(debug__save_debug_rollout_data=where))
    check_rollout_files_free(make_config(debug__save_debug_rollout_data=where, run__overwrite=True))
    check_rollout_files_free(make_config(debug__save_debug_rollout_data=where, run__num_rollout=3))
