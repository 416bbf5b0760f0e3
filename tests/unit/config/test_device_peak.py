"""The most that a device holds at one time, against sums of the parts."""

from pathlib import Path

import pytest

from slime_ppo.config.device_peak import DevicePlan, device_plan
from slime_ppo.config.fields import Value
from slime_ppo.config.memory_plan import engine_memory, kv_cache, role_memory
from slime_ppo.config.model_shape import ModelShape
from slime_ppo.config.root import Config
from tests.helpers.configs import make_config, write_model_folder


@pytest.fixture
def shape(tmp_path: Path) -> ModelShape:
    return ModelShape.from_hf_folder(write_model_folder(tmp_path))


def _planned(shape: ModelShape, **values: Value) -> tuple[Config, DevicePlan]:
    config = make_config(data__rollout_max_prompt_len=32, **values)
    return config, device_plan(config, {role: shape for role in config.roles})


def test_device_plan_of_tenants_that_take_turns_is_the_largest_alone(shape: ModelShape) -> None:
    config, plan = _planned(shape, batch__micro_batch_size=128)
    actor = role_memory(config, shape, "actor")
    assert (plan.peak, plan.phase) == (actor.total, "actor trains"), "its logits make it larger than the critic"
    assert plan.host == actor.host + role_memory(config, shape, "critic").host
    config, plan = _planned(shape, batch__micro_batch_size=1, rollout__rollout_batch_size=8192, batch__global_batch_size=8)
    assert (plan.peak, plan.phase) == (sum(engine_memory(config, shape)), "rollout")


def test_device_plan_of_an_sglang_server_asks_for_the_cache_of_one_sample_and_of_others_for_nothing(shape: ModelShape) -> None:
    config, plan = _planned(shape, rollout__engine="sglang")
    assert plan.engine == engine_memory(config, shape)[0] + kv_cache(config, shape, 1)
    assert kv_cache(config, shape, 1) == 2 * 4 * 2 * 32 * 4 * 48
    _, plan = _planned(shape, rollout__engine="sglang", sglang__server_urls="http://a:1")
    assert plan.engine == 0


def test_device_plan_of_a_model_split_over_many_devices_is_fullest_when_its_weights_go_to_an_engine_that_is_not(
    shape: ModelShape,
) -> None:
    config, plan = _planned(
        shape,
        rollout__engine="sglang",
        batch__micro_batch_size=1,
        parallel__actor_num_gpus_per_node=16,
        parallel__tensor_model_parallel_size=2,
    )
    weights, params = engine_memory(config, shape)[0], role_memory(config, shape, "actor").resident.params
    assert (plan.peak, plan.phase) == (params + weights, "weights go to the engine")


def test_device_plan_without_offload_adds_all_tenants_up(shape: ModelShape) -> None:
    config, plan = _planned(shape, cluster__offload=False)
    actor, critic = role_memory(config, shape, "actor"), role_memory(config, shape, "critic")
    stays = actor.resident.total + critic.resident.total + sum(engine_memory(config, shape))
    assert (plan.peak, plan.phase) == (stays + actor.activations + actor.logits, "actor trains, all are awake")


def test_device_plan_without_colocation_adds_nothing_up(shape: ModelShape) -> None:
    config, plan = _planned(shape, cluster__colocate=False)
    totals = [role_memory(config, shape, role).total for role in config.roles]
    assert plan.peak == max(*totals, sum(engine_memory(config, shape)))
    assert list(plan.roles) == ["actor", "critic"]


def test_device_plan_of_half_a_run_has_only_its_own_tenants(shape: ModelShape) -> None:
    config = make_config(data__rollout_max_prompt_len=32, debug__debug_rollout_only=True)
    plan = device_plan(config, {"actor": shape})
    assert (dict(plan.roles), plan.peak, plan.phase) == ({}, sum(engine_memory(config, shape)), "rollout")
    _, plan = _planned(shape, debug__debug_train_only=True, debug__load_debug_rollout_data="dumps")
    assert plan.engine == 0 and plan.phase == "actor trains"
