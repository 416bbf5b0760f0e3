"""Filling shards from a Hugging Face folder that does not fit: one error with everything that is wrong."""

from dataclasses import replace
from pathlib import Path

import pytest

from slime_ppo.config.ppo import PpoConfig
from slime_ppo.parallel.layout import ParallelLayout
from slime_ppo.parallel.worker_settings import BatchSettings
from tests.dist.backends.cases import RANKS
from tests.dist.backends.conftest import CaseMaker
from tests.helpers.rank_pool import RankPool

LAYOUTS = {"one_rank": ParallelLayout(1), "tp2": ParallelLayout(2, tp_size=2), "pp2": ParallelLayout(2, pp_size=2)}
LAYER = "model.layers.1."


@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        (LAYER + "self_attn.k_proj.weight", (31, 64), [32, 64]),  # does not even divide by the query groups
        (LAYER + "self_attn.q_proj.weight", (128, 64), [64, 64]),
        ("model.embed_tokens.weight", (300, 64), [100, 64]),  # more rows than the padded vocabulary
        ("model.embed_tokens.weight", (101, 64), [100, 64]),  # would hide in the padding
        (LAYER + "mlp.down_proj.weight", (64, 64), [64, 128]),
        ("model.norm.weight", (32,), [64]),
    ],
)
def test_load_wrong_shape_names_tensor_and_both_shapes(
    megatron_pool: RankPool, make_case: CaseMaker, tmp_path: Path, *, name: str, shape: tuple, expected: list, layout: str
) -> None:
    case = make_case(PpoConfig()).on(LAYOUTS[layout], BatchSettings(1, None), tmp_path)
    messages = megatron_pool.run(
        f"{RANKS}:load_weights", world=case.layout.num_ranks, case=case, changes={name: shape}, head="language_model"
    )
    told = [message for message in messages if message]
    # of a pipeline the ranks that hold the tensor: the tied embedding lies on both stages
    assert len(told) == (1 if layout == "pp2" and "embed" not in name else len(messages))
    for message in told:
        assert message == f"the folder does not have the shapes of its config.json: {name} is {list(shape)}, expected {expected}"


def test_load_several_wrong_shapes_lists_all(megatron_pool: RankPool, make_case: CaseMaker) -> None:
    changes = {"model.norm.weight": (32,), LAYER + "mlp.up_proj.weight": (1, 64)}
    (message,) = megatron_pool.run(
        f"{RANKS}:load_weights", world=1, case=make_case(PpoConfig()), changes=changes, head="language_model"
    )
    assert all(name in message for name in changes)


def test_load_missing_and_unused_names_are_listed_together(megatron_pool: RankPool, make_case: CaseMaker) -> None:
    changes = {"model.norm.weight": None, LAYER + "mlp.up_proj.weight": None, "model.rotary.bias": (3,)}
    (message,) = megatron_pool.run(
        f"{RANKS}:load_weights", world=1, case=make_case(PpoConfig()), changes=changes, head="language_model"
    )
    assert message == (
        "the folder does not fit the llama table: missing: model.layers.1.mlp.up_proj.weight, model.norm.weight; "
        "not used: model.rotary.bias"
    )


@pytest.mark.parametrize(
    ("head", "tie", "changes", "start", "accepted"),
    [
        ("language_model", False, {"lm_head.weight": None}, "zeros", False),
        ("language_model", True, {"score.weight": (1, 64)}, "zeros", False),
        ("value", True, {"score.weight": None}, "zeros", True),
        ("value", True, {"score.weight": None}, None, False),
        ("value", False, {"score.weight": None}, "zeros", True),  # a policy's folder: its lm_head has no place in a critic
    ],
)
def test_load_heads_that_may_be_there_or_not(
    megatron_pool: RankPool, make_case: CaseMaker, *, head: str, tie: bool, changes: dict, start: str | None, accepted: bool
) -> None:
    case = make_case(PpoConfig(), tie=tie)
    loads = replace(case, init_value_head=start)
    (message,) = megatron_pool.run(f"{RANKS}:load_weights", world=1, case=loads, changes=changes, head=head)
    assert (message == "") == accepted
    assert accepted or next(iter(changes)) in message


def test_load_tied_output_layer_that_is_stored_again_must_be_the_embedding(megatron_pool: RankPool, make_case: CaseMaker) -> None:
    """transformers unties the two when they differ: its engine would have an output layer that the trainer does not push."""
    case = make_case(PpoConfig(), tie=True)
    same = {"lm_head.weight": (100, 64), "model.embed_tokens.weight": (100, 64)}
    other = {"lm_head.weight": (100, 64)}
    messages = [
        megatron_pool.run(f"{RANKS}:load_weights", world=1, case=case, changes=changes, head="language_model")[0]
        for changes in (same, other)
    ]
    assert messages[0] == ""
    assert messages[1] == (
        "the folder: config.json has tie_word_embeddings true, but lm_head.weight differs from model.embed_tokens.weight. Set "
        "tie_word_embeddings to false, or save the model again"
    )


def test_critic_from_a_policys_folder_starts_with_a_head_of_zeros(megatron_pool: RankPool, make_case: CaseMaker) -> None:
    case = make_case(PpoConfig())
    case = replace(case, critic_folder=case.actor_folder)
    head, values = megatron_pool.run(f"{RANKS}:value_head_after_loading_without_one", world=1, case=case)[0]
    assert head.shape == (1, 64) and head.dtype == "float32" and not head.any() and not values.any()
