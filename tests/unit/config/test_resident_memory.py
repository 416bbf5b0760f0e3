"""Bytes of parameters, gradients, main parameters and moments against hand-made sums; what ranks really hold is measured in
tests/dist/backends/test_memory.py."""

from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from slime_ppo.config.model_shape import ModelShape, MoeShape
from slime_ppo.config.resident_memory import ResidentBytes, TrainedModel, num_params, resident_bytes
from slime_ppo.parallel.layout import ParallelLayout
from tests.helpers.configs import write_model_folder
from tests.helpers.tiny_family import make_tiny_family

# the quickstart model's published count is 852,608 with an FFN of 341; padding it to 352 adds 4 layers x 3 matrices x 128 x 11
GLASS_PARAMS = 852_608 + 4 * 3 * 128 * 11
EMBEDDING, NORMS = 1024 * 128, 9 * 128
LAYER = (GLASS_PARAMS - EMBEDDING - 128) // 4


@pytest.fixture
def shape(tmp_path: Path) -> ModelShape:
    return ModelShape.from_hf_folder(write_model_folder(tmp_path))


def numbers(shape: ModelShape, layout: ParallelLayout, *, pp_rank: int = 0, value_head: bool = False) -> int:
    """Parameters of a rank in float32."""
    model = TrainedModel(shape, "float32", value_head=value_head, make_vocab_size_divisible_by=128)
    return resident_bytes(model, layout, pp_rank=pp_rank).params // 4


def test_num_params_of_the_quickstart_model_is_its_count(shape: ModelShape) -> None:
    assert num_params(shape) == GLASS_PARAMS
    assert num_params(replace(shape, tie_word_embeddings=False)) == GLASS_PARAMS + EMBEDDING


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("tie", [True, False])
def test_num_params_of_every_family_is_that_of_transformers(tmp_path: Path, *, family: str, tie: bool) -> None:
    folder = make_tiny_family(tmp_path, family, tie=tie, seed=0)
    expected = sum(array.size for array in load_file(folder / "model.safetensors").values())
    assert num_params(ModelShape.from_hf_folder(folder)) == expected


def test_resident_bytes_untied_adds_a_head_and_a_critic_has_a_vector_instead(shape: ModelShape) -> None:
    untied, alone = replace(shape, tie_word_embeddings=False), ParallelLayout(1)
    assert numbers(untied, alone) == GLASS_PARAMS + EMBEDDING
    assert numbers(untied, alone, value_head=True) == numbers(shape, alone, value_head=True) == GLASS_PARAMS + 128


def test_resident_bytes_under_tensor_parallelism_splits_all_but_the_norms(shape: ModelShape) -> None:
    assert numbers(shape, ParallelLayout(2, tp_size=2)) == (GLASS_PARAMS - NORMS) // 2 + NORMS


def test_resident_bytes_of_biases_and_head_norms_under_tensor_parallelism(shape: ModelShape) -> None:
    """Biases of 128 queries, 64 keys and 64 values are split; two norms of 32 are not, and each takes a place of 64."""

    def count(**changes: bool) -> int:
        return numbers(replace(shape, **changes), ParallelLayout(2, tp_size=2))

    assert count(qkv_bias=True) - count() == 4 * (128 + 64 + 64) // 2
    assert count(qk_layernorm=True) - count() == 4 * 2 * 64


def test_resident_bytes_of_stages_have_their_layers_and_the_ends_of_the_model(shape: ModelShape) -> None:
    layout = ParallelLayout(4, pp_size=4)
    first, last = EMBEDDING + LAYER, LAYER + 128
    for tie in (True, False):  # the last stage has a copy of a tied embedding
        stages = [numbers(replace(shape, tie_word_embeddings=tie), layout, pp_rank=stage) for stage in range(4)]
        assert stages == [first, LAYER, LAYER, last + EMBEDDING]
    assert [numbers(shape, layout, pp_rank=stage, value_head=True) for stage in range(4)] == [first, LAYER, LAYER, last + 128]


def test_resident_bytes_of_virtual_stages_are_those_of_one_stage_with_the_same_layers(shape: ModelShape) -> None:
    for stage in (0, 1):
        virtual = numbers(shape, ParallelLayout(2, pp_size=2, vpp_size=2), pp_rank=stage)
        assert virtual == numbers(shape, ParallelLayout(2, pp_size=2), pp_rank=stage)


def test_resident_bytes_in_bfloat16_splits_main_params_and_moments_over_data_and_context_ranks(shape: ModelShape) -> None:
    model = TrainedModel(shape, "bfloat16", value_head=False, make_vocab_size_divisible_by=128)
    found = resident_bytes(model, ParallelLayout(4, cp_size=2), pp_rank=0)
    assert found == ResidentBytes(2 * GLASS_PARAMS, 4 * GLASS_PARAMS, GLASS_PARAMS, 2 * GLASS_PARAMS)
    assert found.total == 9 * GLASS_PARAMS


def test_resident_bytes_of_a_bfloat16_critic_keeps_the_head_in_float32_in_a_buffer_of_its_own(shape: ModelShape) -> None:
    model = TrainedModel(shape, "bfloat16", value_head=True, make_vocab_size_divisible_by=128)
    found = resident_bytes(model, ParallelLayout(1), pp_rank=0)
    all_of_it = GLASS_PARAMS + 128
    assert found == ResidentBytes(2 * GLASS_PARAMS + 4 * 128, 4 * all_of_it, 4 * GLASS_PARAMS, 8 * all_of_it)


def test_resident_bytes_round_the_buffer_up_to_equal_shards(shape: ModelShape) -> None:
    """Three shards: a multiple of 384, of which the parameters fill all but what is missing."""
    model = TrainedModel(shape, "float32", value_head=False, make_vocab_size_divisible_by=128)
    found = resident_bytes(model, ParallelLayout(3), pp_rank=0)
    padded = -(-GLASS_PARAMS // 384) * 384
    assert padded > GLASS_PARAMS
    assert found == ResidentBytes(4 * padded, 4 * padded, 0, 8 * padded // 3)


def test_resident_bytes_round_a_tied_embedding_on_a_pipeline_up_by_itself(shape: ModelShape) -> None:
    """A vocabulary of 1025 x 128 numbers on three data-parallel ranks, and the layers, each to a multiple of 384."""
    odd, layout = replace(shape, vocab_size=1025), ParallelLayout(6, pp_size=2)
    model = TrainedModel(odd, "float32", value_head=False, make_vocab_size_divisible_by=1)
    embedding, layers = (-(-size // 384) * 384 for size in (1025 * 128, 2 * LAYER))
    assert embedding + layers > -(-(1025 * 128 + 2 * LAYER) // 384) * 384
    assert resident_bytes(model, layout, pp_rank=0).params == 4 * (embedding + layers)


def test_resident_bytes_of_experts_are_split_over_expert_ranks_and_their_moments_over_the_expert_replicas(
    shape: ModelShape,
) -> None:
    """8 experts of 96 columns each in the place of the MLP; 8 ranks: 2 experts on a rank, each halved, 1 expert replica, while TP 1
    leaves 8 replicas of the rest. A router of 8 x 128 per layer stays whole."""
    experts = replace(shape, moe=MoeShape(num_experts=8, top_k=2, ffn_hidden_size=96, norm_topk_prob=True))
    mlp = 3 * 128 * 96
    rest = GLASS_PARAMS - 4 * 3 * 128 * 352 + 4 * 8 * 128
    assert num_params(experts) == rest + 4 * 8 * mlp
    model = TrainedModel(experts, "bfloat16", value_head=False, make_vocab_size_divisible_by=128)
    found = resident_bytes(model, ParallelLayout(8, ep_size=4, etp_size=2), pp_rank=0)
    own = 4 * 2 * mlp // 2
    assert found == ResidentBytes(2 * (rest + own), 4 * (rest + own), 4 * (rest // 8 + own), 8 * (rest // 8 + own))
