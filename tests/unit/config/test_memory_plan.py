"""The memory estimate against hand-made sums and the parameter count of a real model."""

from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from slime_ppo.config.fields import Value
from slime_ppo.config.memory_plan import engine_memory, micro_batch_tokens, num_params, role_memory
from slime_ppo.config.model_shape import ModelShape
from tests.helpers.configs import make_config, write_model_folder
from tests.helpers.tiny_family import make_tiny_family

# the quickstart model's published count is 852,608 with an FFN of 341; padding it to 352 adds 4 layers x 3 matrices x 128 x 11
GLASS_PARAMS = 852_608 + 4 * 3 * 128 * 11


@pytest.fixture
def shape(tmp_path: Path) -> ModelShape:
    return ModelShape.from_hf_folder(write_model_folder(tmp_path))


def test_num_params_of_the_quickstart_model_is_its_count(shape: ModelShape) -> None:
    assert num_params(shape, tp_size=1, divisible_by=128, value_head=False) == GLASS_PARAMS


def test_num_params_untied_adds_a_head_and_a_critic_has_a_vector_instead(shape: ModelShape) -> None:
    untied = replace(shape, tie_word_embeddings=False)
    assert num_params(untied, tp_size=1, divisible_by=128, value_head=False) == GLASS_PARAMS + 1024 * 128
    assert num_params(untied, tp_size=1, divisible_by=128, value_head=True) == GLASS_PARAMS + 129


def test_num_params_under_tensor_parallelism_splits_all_but_the_norms(shape: ModelShape) -> None:
    norms = 9 * 128
    assert num_params(shape, tp_size=2, divisible_by=128, value_head=False) == (GLASS_PARAMS - norms) // 2 + norms


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("tie", [True, False])
def test_num_params_of_every_family_is_that_of_transformers(tmp_path: Path, *, family: str, tie: bool) -> None:
    folder = make_tiny_family(tmp_path, family, tie=tie, seed=0)
    expected = sum(array.size for array in load_file(folder / "model.safetensors").values())
    assert num_params(ModelShape.from_hf_folder(folder), tp_size=1, divisible_by=1, value_head=False) == expected


def test_num_params_of_biases_and_head_norms_under_tensor_parallelism(shape: ModelShape) -> None:
    """Biases of 128 queries, 64 keys and 64 values are split; two norms of 32 are not."""

    def count(**changes: bool) -> int:
        return num_params(replace(shape, **changes), tp_size=2, divisible_by=128, value_head=False)

    assert count(qkv_bias=True) - count() == 4 * (128 + 64 + 64) // 2
    assert count(qk_layernorm=True) - count() == 4 * 2 * 32


def test_micro_batch_tokens_are_limited_by_samples_of_the_rank_or_by_tokens() -> None:
    lengths = {"data__rollout_max_prompt_len": 32, "rollout__rollout_max_response_len": 16}
    assert micro_batch_tokens(make_config(**lengths, batch__micro_batch_size=8), "actor") == (8 * 48, 8 * 16)
    two_ranks = {"parallel__actor_num_gpus_per_node": 2, "batch__micro_batch_size": 128}
    assert micro_batch_tokens(make_config(**lengths, **two_ranks), "actor") == (64 * 48, 64 * 16)
    dynamic = {"batch__use_dynamic_batch_size": True, "batch__max_tokens_per_gpu": 100}
    assert micro_batch_tokens(make_config(**lengths, **dynamic), "critic") == (2 * 48, 2 * 16)
    assert micro_batch_tokens(make_config(**lengths, **(dynamic | {"batch__max_tokens_per_gpu": 10})), "critic") == (48, 16)


def test_role_memory_of_one_float32_rank_is_the_sum_by_hand(shape: ModelShape) -> None:
    config = make_config(data__rollout_max_prompt_len=32, batch__micro_batch_size=1, ppo__kl_coef=0.1)
    one = role_memory(config, shape, "actor")
    assert (one.params, one.grads, one.optimizer) == (4 * GLASS_PARAMS, 4 * GLASS_PARAMS, 8 * GLASS_PARAMS)
    assert one.activations == 4 * 48 * 4 * (6 * 128 + 2 * 128 + 2 * 64 + 4 * 352)
    assert one.logits == 2 * 4 * 16 * 1024
    # the reference and the room to swap it in, beside the sleeping actor's weights and moments
    assert one.host == 2 * 4 * GLASS_PARAMS + 4 * GLASS_PARAMS + 8 * GLASS_PARAMS
    assert one.total == one.params + one.grads + one.optimizer + one.activations + one.logits


def test_role_memory_of_bfloat16_ranks_splits_main_params_and_moments_over_data_parallel_ranks(shape: ModelShape) -> None:
    config = make_config(model__dtype="bfloat16", parallel__actor_num_gpus_per_node=2, cluster__offload=False)
    one = role_memory(config, shape, "actor")
    assert (one.params, one.grads, one.optimizer) == (2 * GLASS_PARAMS, 4 * GLASS_PARAMS, 12 * GLASS_PARAMS // 2)
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
    assert micro_batch_tokens(config, "actor") == (24, 16)
    assert (one.params, one.grads, one.optimizer) == (4 * GLASS_PARAMS, 4 * GLASS_PARAMS, 8 * GLASS_PARAMS // 4)
    assert one.activations == 4 * 24 * 4 * (6 * 128 + 2 * 128 + 2 * 64 + 4 * 352)


def test_role_memory_counts_the_reference_twice_with_a_kl_and_not_at_all_without(shape: ModelShape) -> None:
    def host(**kl: Value) -> int:
        return role_memory(make_config(model__dtype="bfloat16", cluster__offload=False, **kl), shape, "actor").host

    assert host() == 0
    assert host(ppo__kl_coef=0.1) == host(ppo__use_kl_loss=True, ppo__kl_loss_coef=0.1) == 2 * 2 * GLASS_PARAMS


def test_role_memory_of_the_critic_has_neither_logits_nor_reference(shape: ModelShape) -> None:
    one = role_memory(make_config(cluster__offload=False, ppo__kl_coef=0.1), shape, "critic")
    assert (one.logits, one.host) == (0, 0)
    assert one.params == 4 * (GLASS_PARAMS + 129)


def test_engine_memory_counts_weights_and_the_cache_of_a_rollout(shape: ModelShape) -> None:
    # keys and values, 4 layers, 2 heads of 32, float32, 128 samples of 48 tokens
    assert engine_memory(make_config(data__rollout_max_prompt_len=32), shape) == (4 * GLASS_PARAMS, 2 * 4 * 2 * 32 * 4 * 128 * 48)
