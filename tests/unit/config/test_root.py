"""Derived numbers, role settings and the YAML round trip of the whole config."""

from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slime_ppo.config.cli import merge_settings
from slime_ppo.config.data import DataConfig
from slime_ppo.config.fields import Value
from slime_ppo.config.model import ModelConfig
from slime_ppo.config.root import OPTIONS, SECTIONS, Config
from slime_ppo.config.yaml_file import read_config_file
from tests.helpers.configs import make_config


def test_config_of_required_sections_takes_every_default() -> None:
    config = Config(model=ModelConfig(hf_checkpoint="model"), data=DataConfig(prompt_data="prompts.jsonl"))
    assert config == make_config()
    assert list(config.values()) == [spec.key for spec in OPTIONS]


def test_config_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        make_config().run.seed = 1  # type: ignore[misc]


def test_derived_numbers_follow_the_sections() -> None:
    config = make_config(
        rollout__rollout_batch_size=12,
        rollout__n_samples_per_prompt=4,
        batch__global_batch_size=16,
        ppo__num_epochs_per_rollout=2,
        ppo__num_critic_only_steps=3,
        run__num_rollout=10,
        parallel__actor_num_nodes=2,
        parallel__actor_num_gpus_per_node=4,
        parallel__tensor_model_parallel_size=2,
        critic__num_nodes=1,
        critic__num_gpus_per_node=2,
        critic__tensor_model_parallel_size=1,
    )
    # 12 x 4 samples in steps of 16, twice; the actor trains in 10 - 3 rollouts
    assert (config.samples_per_rollout, config.steps_per_pass, config.steps_per_rollout) == (48, 3, 6)
    assert (config.planned_actor_steps, config.planned_critic_steps) == (42, 60)
    actor, critic = config.role("actor"), config.role("critic")
    assert (actor.num_ranks, actor.dp_size, critic.num_ranks, critic.dp_size) == (8, 4, 2, 2)
    assert config.num_bundles == 8
    assert config.bundles == {"actor": range(8), "critic": range(2), "rollout": range(1)}


def test_bundles_without_colocation_are_one_tenants_each_and_nothing_is_offloaded() -> None:
    values: dict[str, Value] = {"parallel__actor_num_gpus_per_node": 4, "critic__num_gpus_per_node": 2}
    config = make_config(**values, cluster__colocate=False)
    assert config.bundles == {"actor": range(4), "critic": range(4, 6), "rollout": range(6, 7)}
    assert (config.num_bundles, config.offloads, make_config(**values).offloads) == (7, False, True)
    config = make_config(**values, cluster__colocate=False, ppo__advantage_estimator="grpo")
    assert config.bundles == {"actor": range(4), "rollout": range(4, 5)}


def test_roles_context_parallel_size_divides_the_data_parallel_one_and_the_critic_may_have_its_own() -> None:
    values: dict[str, Value] = {"parallel__actor_num_gpus_per_node": 8, "parallel__tensor_model_parallel_size": 2}
    config = make_config(**values, parallel__context_parallel_size=2)
    assert [(config.role(role).cp_size, config.role(role).dp_size) for role in config.roles] == [(2, 2), (2, 2)]
    config = make_config(**values, parallel__context_parallel_size=2, critic__context_parallel_size=4)
    assert [(config.role(role).cp_size, config.role(role).dp_size) for role in config.roles] == [(2, 2), (4, 1)]


def test_roles_without_a_critic_are_the_actor_alone_with_its_bundles_and_steps() -> None:
    values: dict[str, Value] = {"critic__num_gpus_per_node": 4, "parallel__actor_num_gpus_per_node": 2}
    config = make_config(**values, ppo__advantage_estimator="grpo")
    assert (config.has_critic, config.roles, config.num_bundles) == (False, ("actor",), 2)
    assert (config.planned_actor_steps, config.planned_critic_steps) == (25, 0)
    config = make_config(**values)
    assert (config.has_critic, config.roles, config.num_bundles) == (True, ("actor", "critic"), 4)


def test_role_critic_without_overrides_is_as_the_actor_but_for_its_own_steps_and_folder() -> None:
    config = make_config(optimizer__lr=2e-3, optimizer__lr_warmup_iters=7, ppo__num_critic_only_steps=5, run__save="out/")
    actor, critic = config.role("actor"), config.role("critic")
    assert (critic.lr, critic.lr_warmup_iters, critic.hf_folder) == (actor.lr, actor.lr_warmup_iters, actor.hf_folder)
    assert (actor.save_folder, critic.save_folder) == ("out/hf", "out/critic/hf")
    assert (actor.checkpoint_folder, critic.checkpoint_folder) == ("out/actor", "out/critic")
    assert (actor.lr_decay_iters, critic.lr_decay_iters) == (20, 25)


def test_role_critic_with_overrides_takes_them_even_when_zero() -> None:
    config = make_config(
        critic__lr=5e-3,
        critic__lr_warmup_iters=0,
        critic__clip_grad=0.0,
        critic__load="trunk",
        critic__save="elsewhere",
        optimizer__lr_warmup_iters=7,
        optimizer__lr_decay_iters=99,
    )
    critic = config.role("critic")
    assert (critic.lr, critic.lr_warmup_iters, critic.clip_grad) == (5e-3, 0, 0.0)
    assert (critic.hf_folder, critic.checkpoint_folder, critic.save_folder) == ("trunk", "elsewhere", "elsewhere/hf")
    assert critic.lr_decay_iters == 99
    assert config.role("actor").clip_grad == 1.0


def test_resolved_defaults_of_ppo_rollout_and_eval() -> None:
    config = make_config(ppo__eps_clip=0.3, ppo__lambd=0.9, rollout__rollout_top_k=-1, rollout__rollout_max_response_len=9)
    assert (config.ppo.clip_high, config.ppo.critic_lambd) == (0.3, 0.9)
    assert (config.rollout.sampler_top_k, config.rollout.restricted, config.eval_max_response_len) == (0, False, 9)
    assert config.model.ref_folder == "model"
    changed = make_config(ppo__eps_clip_high=0.28, ppo__lambd_critic=1.0, rollout__rollout_top_k=5, eval__eval_max_response_len=3)
    assert (changed.ppo.clip_high, changed.ppo.critic_lambd) == (0.28, 1.0)
    assert (changed.rollout.restricted, changed.eval_max_response_len) == (True, 3)


@pytest.mark.parametrize(("name", "value"), [("rollout_top_p", 0.9), ("rollout_top_k", 2), ("rollout_min_p", 0.01)])
def test_restricted_is_true_for_each_restriction_alone(name: str, value: float) -> None:
    rollout = make_config(**{f"rollout__{name}": value}).rollout
    assert rollout.restricted and rollout.restrictions == (name,)
    assert make_config().rollout.restrictions == ()


def test_to_yaml_is_nested_by_section() -> None:
    assert list(yaml.safe_load(make_config().to_yaml())) == list(SECTIONS)


@settings(max_examples=30, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
    number=st.floats(min_value=0, max_value=1),
    count=st.integers(min_value=0, max_value=2**63 - 1),
)
def test_to_yaml_read_again_gives_an_equal_config(tmp_path: Path, text: str, number: float, count: int) -> None:
    config = make_config(run__save=text, model__ref_load=text, optimizer__lr=number, ppo__lambd_critic=number, run__seed=count)
    assert _read_again(tmp_path, config) == config


@pytest.mark.parametrize(
    "text", ["null", "~", "true", "12", "1e-6", " # x", "a: b", "2020-01-01", "=", "é\n", "'", "a\x85b", "\u2028", "\ufeff", "\t"]
)
def test_to_yaml_of_a_text_that_looks_like_another_type_reads_back_as_text(tmp_path: Path, text: str) -> None:
    config = make_config(data__label_key=text, optimizer__lr=1e-6)
    assert _read_again(tmp_path, config) == config


def _read_again(folder: Path, config: Config) -> Config:
    path = folder / "config.yaml"
    path.write_text(config.to_yaml(), encoding="utf-8")
    return merge_settings(read_config_file(str(path)))[0]
