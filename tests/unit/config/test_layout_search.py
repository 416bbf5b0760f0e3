"""Layouts of so many GPUs, against a count by hand and the run's own checks."""

from pathlib import Path

import pytest

from slime_ppo.config.device_peak import device_plan
from slime_ppo.config.fields import Value
from slime_ppo.config.layout_search import candidates, layouts
from slime_ppo.config.model_shape import ModelShape
from slime_ppo.errors import ConfigError
from slime_ppo.parallel.layout import ParallelLayout
from tests.helpers.configs import make_config, write_model_folder

SHORT: dict[str, Value] = {"data__rollout_max_prompt_len": 32}  # the model has 128 positions
MOE = {
    "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True,
}  # fmt: skip


def test_layouts_are_every_split_once() -> None:
    dense = list(layouts(8, has_experts=False))
    assert len(dense) == len(set(dense)) == 20  # ways to write 2^3 as an ordered product of TP, CP, PP and DP
    assert all(layout.dp_size * layout.tp_size * layout.cp_size * layout.pp_size == 8 for layout in dense)
    experts = list(layouts(4, has_experts=True))
    assert len(experts) == len(set(experts))
    assert {(one.ep_size, one.etp_size) for one in experts if one.tp_size == 2 and one.pp_size == 1} == {
        (1, 1), (2, 1), (4, 1), (1, 2), (2, 2),
    }  # fmt: skip


def test_candidates_plan_what_a_run_takes_and_give_the_reason_of_its_checks_for_the_rest(tmp_path: Path) -> None:
    shape = ModelShape.from_hf_folder(write_model_folder(tmp_path))
    config = make_config(**SHORT, parallel__tensor_model_parallel_size=4, critic__num_gpus_per_node=4)
    shapes = {"actor": shape, "critic": shape}
    found = {one.layout: one for one in candidates(config, shapes, num_gpus=4, gpus_per_node=8)}
    assert len(found) == 10
    # without the critic's own size
    tp2 = make_config(**SHORT, parallel__tensor_model_parallel_size=2, parallel__actor_num_gpus_per_node=4)
    assert found[ParallelLayout(4, tp_size=2, etp_size=2)].plan == device_plan(tp2, shapes)
    refused = {layout: one.problem for layout, one in found.items() if one.plan is None}
    assert list(refused) == [ParallelLayout(4, tp_size=4, etp_size=4)]
    assert "does not divide the 2 key-value heads" in refused[ParallelLayout(4, tp_size=4, etp_size=4)]


def test_candidates_of_several_nodes_keep_tensor_parallel_groups_on_one(tmp_path: Path) -> None:
    shape = ModelShape.from_hf_folder(
        write_model_folder(tmp_path, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=8)
    )
    config = make_config(**SHORT, ppo__advantage_estimator="grpo", rollout__n_samples_per_prompt=2)
    problems = {
        one.layout.tp_size: one.problem for one in candidates(config, {"actor": shape}, num_gpus=8, gpus_per_node=4) if one.problem
    }
    assert list(problems) == [8] and "would lie on two nodes" in problems[8]
    with pytest.raises(ConfigError, match="6 GPUs are no whole number of nodes of 4"):
        list(candidates(config, {"actor": shape}, num_gpus=6, gpus_per_node=4))


def test_candidates_of_a_mixture_share_out_its_experts(tmp_path: Path) -> None:
    shape = ModelShape.from_hf_folder(write_model_folder(tmp_path, **MOE))
    config = make_config(**SHORT, ppo__advantage_estimator="grpo", rollout__n_samples_per_prompt=2)
    plans = {one.layout: one.plan for one in candidates(config, {"actor": shape}, num_gpus=4, gpus_per_node=8)}
    alone, shared = (plans[ParallelLayout(4, ep_size=size)] for size in (1, 4))
    assert alone is not None and shared is not None
    experts = 4 * 8 * 3 * 128 * 64  # layers x experts x matrices of h x f
    assert alone.roles["actor"].resident.params - shared.roles["actor"].resident.params == 4 * experts * 3 // 4
