"""The memory estimate against hand-made sums."""

from dataclasses import replace
from pathlib import Path

import pytest

from slime_ppo.config.fields import Value
from slime_ppo.config.memory_plan import MicroBatchShare, engine_memory, micro_batch_share, role_memory, stage_memory
from slime_ppo.config.model_shape import ModelShape
from slime_ppo.config.resident_memory import ResidentBytes
from tests.helpers.configs import make_config, write_model_folder

# the quickstart model's published count is 852,608 with an FFN of 341; padding it to 352 adds 4 layers x 3 matrices x 128 x 11
GLASS_PARAMS = 852_608 + 4 * 3 * 128 * 11


@pytest.fixture
def shape(tmp_path: Path) -> ModelShape:
    return ModelShape.from_hf_folder(write_model_folder(tmp_path))


def test_micro_batch_share_is_limited_by_samples_of_the_rank_or_by_tokens() -> None:
    lengths = {"data__rollout_max_prompt_len": 32, "rollout__rollout_max_response_len": 16}
    share = micro_batch_share(make_config(**lengths, batch__micro_batch_size=8), "actor")
    assert share == MicroBatchShare(16, 8 * 48, 8 * 16)
    two_ranks = {"parallel__actor_num_gpus_per_node": 2, "batch__micro_batch_size": 128}
    assert micro_batch_share(make_config(**lengths, **two_ranks), "actor") == MicroBatchShare(1, 64 * 48, 64 * 16)
    dynamic = {"batch__use_dynamic_batch_size": True, "batch__max_tokens_per_gpu": 100}
    assert micro_batch_share(make_config(**lengths, **dynamic), "critic") == MicroBatchShare(64, 100, 34), (
        "two of the longest leave room for a shorter one"
    )
    plenty = dynamic | {"batch__max_tokens_per_gpu": 10**6}
    assert micro_batch_share(make_config(**lengths, **plenty), "critic") == MicroBatchShare(1, 128 * 48, 128 * 16)
    dynamic |= {"batch__max_tokens_per_gpu": 10}
    assert micro_batch_share(make_config(**lengths, **dynamic), "critic") == MicroBatchShare(128, 48, 16)


def test_role_memory_of_one_float32_rank_is_the_sum_by_hand(shape: ModelShape) -> None:
    config = make_config(data__rollout_max_prompt_len=32, batch__micro_batch_size=1, ppo__kl_coef=0.1)
    one = role_memory(config, shape, "actor")
    assert one.resident == ResidentBytes(4 * GLASS_PARAMS, 4 * GLASS_PARAMS, 0, 8 * GLASS_PARAMS)
    assert one.activations == 4 * 48 * 4 * (6 * 128 + 2 * 128 + 2 * 64 + 4 * 352)
    assert one.logits == 2 * 4 * 16 * 1024
    # the reference and the room to swap it in, beside the sleeping actor's weights and moments
    assert one.host == 2 * 4 * GLASS_PARAMS + 4 * GLASS_PARAMS + 8 * GLASS_PARAMS
    assert one.total == 16 * GLASS_PARAMS + one.activations + one.logits


def test_role_memory_of_bfloat16_ranks_splits_main_params_and_moments_over_data_parallel_ranks(shape: ModelShape) -> None:
    config = make_config(model__dtype="bfloat16", parallel__actor_num_gpus_per_node=2, cluster__offload=False)
    one = role_memory(config, shape, "actor")
    assert one.resident == ResidentBytes(2 * GLASS_PARAMS, 4 * GLASS_PARAMS, 4 * GLASS_PARAMS // 2, 8 * GLASS_PARAMS // 2)
    assert one.host == 0
    assert role_memory(make_config(cluster__colocate=False), shape, "actor").host == 0, "nobody sleeps on devices of their own"


def test_role_memory_under_context_parallelism_holds_chunks_of_samples_and_a_share_of_the_moments(shape: ModelShape) -> None:
    config = make_config(
        data__rollout_max_prompt_len=30,
        batch__micro_batch_size=1,
        parallel__actor_num_gpus_per_node=4,
        parallel__context_parallel_size=2,
    )
    one = role_memory(config, shape, "actor")
    # 46 tokens in 4 chunks of 12: 24 a rank, of which at most all 16 response tokens
    assert micro_batch_share(config, "actor") == MicroBatchShare(64, 24, 16)
    assert one.resident == ResidentBytes(4 * GLASS_PARAMS, 4 * GLASS_PARAMS, 0, 8 * GLASS_PARAMS // 4)
    assert one.activations == 4 * 24 * 4 * (6 * 128 + 2 * 128 + 2 * 64 + 4 * 352)


def test_micro_batch_share_under_context_parallelism_has_no_more_response_tokens_than_tokens() -> None:
    config = make_config(
        data__rollout_max_prompt_len=2,
        rollout__rollout_max_response_len=46,
        batch__micro_batch_size=1,
        parallel__actor_num_gpus_per_node=4,
        parallel__context_parallel_size=4,
    )
    assert micro_batch_share(config, "actor") == MicroBatchShare(128, 12, 12)


def test_role_memory_counts_the_reference_twice_with_a_kl_and_not_at_all_without(shape: ModelShape) -> None:
    def host(**kl: Value) -> int:
        return role_memory(make_config(model__dtype="bfloat16", cluster__offload=False, **kl), shape, "actor").host

    assert host() == 0
    assert host(ppo__kl_coef=0.1) == host(ppo__use_kl_loss=True, ppo__kl_loss_coef=0.1) == 2 * 2 * GLASS_PARAMS


def test_role_memory_of_the_critic_has_neither_logits_nor_reference(shape: ModelShape) -> None:
    one = role_memory(make_config(cluster__offload=False, ppo__kl_coef=0.1), shape, "critic")
    assert (one.logits, one.host) == (0, 0)
    assert one.resident.params == 4 * (GLASS_PARAMS + 128)


def test_role_memory_under_tensor_parallelism_splits_activations_and_logits(shape: ModelShape) -> None:
    one, two = (
        role_memory(
            make_config(
                data__rollout_max_prompt_len=32,
                batch__micro_batch_size=1,
                parallel__actor_num_gpus_per_node=size,
                parallel__tensor_model_parallel_size=size,
            ),
            shape,
            "actor",
        )
        for size in (1, 2)
    )
    assert (2 * two.activations, 2 * two.logits) == (one.activations, one.logits)


def test_stage_memory_makes_logits_on_the_last_stage_and_keeps_fewer_micro_batches_on_later_ones(shape: ModelShape) -> None:
    config = make_config(
        data__rollout_max_prompt_len=32,
        batch__micro_batch_size=1,
        parallel__actor_num_gpus_per_node=4,
        parallel__pipeline_model_parallel_size=4,
    )
    stages = stage_memory(config, shape, "actor")
    one_layer = 4 * 48 * (6 * 128 + 2 * 128 + 2 * 64 + 4 * 352)
    assert [stage.activations for stage in stages] == [4 * one_layer, 3 * one_layer, 2 * one_layer, one_layer]
    assert [stage.logits for stage in stages] == [0, 0, 0, 2 * 4 * 16 * 1024]
    assert role_memory(config, shape, "actor") == stages[0]
    # three micro-batches do not fill four stages
    config = replace(config, batch=replace(config.batch, global_batch_size=3))
    assert [stage.activations for stage in stage_memory(config, shape, "actor")[:2]] == [3 * one_layer, 3 * one_layer]


def test_stage_memory_with_virtual_stages_counts_the_longer_warm_up(shape: ModelShape) -> None:
    """Megatron's schedule, two ranks of two stages: rank 0 has 2 x 1 + 2 passes in flight before it goes back and forth."""
    config = make_config(
        data__rollout_max_prompt_len=32,
        batch__micro_batch_size=1,
        parallel__actor_num_gpus_per_node=2,
        parallel__pipeline_model_parallel_size=2,
        parallel__num_virtual_stages_per_pipeline_rank=2,
    )
    one_layer = 4 * 48 * (6 * 128 + 2 * 128 + 2 * 64 + 4 * 352)
    assert [stage.activations for stage in stage_memory(config, shape, "actor")] == [5 * one_layer, 3 * one_layer]
    config = replace(config, batch=replace(config.batch, global_batch_size=2))
    assert [stage.activations for stage in stage_memory(config, shape, "actor")] == [4 * one_layer, 3 * one_layer]


@pytest.mark.parametrize(
    ("recompute", "kept", "again"),
    [
        ({}, (0, 4, 4), (0, 0)),
        ({"granularity": "full", "method": "uniform", "num_layers": 2}, (2, 0, 0), (2, 2)),
        ({"granularity": "full", "method": "block", "num_layers": 3}, (3, 1, 1), (1, 1)),
        ({"granularity": "selective"}, (0, 4, 4), (0, 0)),
        ({"granularity": "selective", "modules": "core_attn,mlp"}, (0, 4, 0), (0, 1)),
    ],
)
def test_role_memory_recomputed_layers_keep_their_input(
    shape: ModelShape, recompute: dict[str, Value], kept: tuple[int, int, int], again: tuple[int, int]
) -> None:
    """Kept of four layers: inputs, attention and norms, MLPs; made again at one time: attention and norms, MLPs."""
    values = {f"recompute__recompute_{name}": value for name, value in recompute.items()}
    one = role_memory(make_config(data__rollout_max_prompt_len=32, batch__micro_batch_size=1, **values), shape, "actor")
    outside, mlp = 6 * 128 + 2 * 128 + 2 * 64, 4 * 352
    numbers = kept[0] * 128 + (kept[1] + again[0]) * outside + (kept[2] + again[1]) * mlp
    assert one.activations == 4 * 48 * numbers


def test_engine_memory_counts_weights_and_the_cache_of_a_rollout(shape: ModelShape) -> None:
    # keys and values, 4 layers, 2 heads of 32, float32, 128 samples of 48 tokens
    assert engine_memory(make_config(data__rollout_max_prompt_len=32), shape) == (4 * GLASS_PARAMS, 2 * 4 * 2 * 32 * 4 * 128 * 48)


def test_engine_memory_of_sglang_is_that_of_one_rank_of_a_server(shape: ModelShape) -> None:
    sizes = {"rollout__engine": "sglang", "rollout__rollout_num_gpus": 4, "rollout__rollout_num_gpus_per_engine": 2}
    weights, cache = engine_memory(make_config(data__rollout_max_prompt_len=32), shape)
    assert engine_memory(make_config(data__rollout_max_prompt_len=32, **sizes), shape) == (weights // 2, cache // 4)


def test_engine_memory_of_a_float32_head_counts_it_in_full(shape: ModelShape) -> None:
    half, wide = (engine_memory(make_config(model__dtype="bfloat16", model__fp32_lm_head=fp32), shape)[0] for fp32 in (False, True))
    assert (half, wide) == (2 * GLASS_PARAMS, 2 * GLASS_PARAMS + 2 * 1024 * 128)
