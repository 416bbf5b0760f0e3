"""Layouts of so many GPUs, against a count by hand and the run's own checks."""

from pathlib import Path

import pytest

from slime_ppo.config.checks import check_config
from slime_ppo.config.device_peak import device_plan
from slime_ppo.config.fields import Value
from slime_ppo.config.layout_search import candidates, layout_cost, layouts
from slime_ppo.config.model_shape import ModelShape
from slime_ppo.errors import ConfigError
from slime_ppo.parallel.layout import ParallelLayout
from tests.helpers.configs import make_config, write_model_folder

SHORT: dict[str, Value] = {"data__rollout_max_prompt_len": 32}  # the model has 128 positions
ROOM = 2**40
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
    config = make_config(**SHORT, parallel__tensor_model_parallel_size=4)
    shapes = {"actor": shape, "critic": shape}
    found = {one.layout: one for one in candidates(config, shapes, num_gpus=4, gpus_per_node=8, room=ROOM)}
    assert len(found) == 10
    tp2: dict[str, Value] = {"parallel__tensor_model_parallel_size": 2, "parallel__actor_num_gpus_per_node": 4}
    one = found[ParallelLayout(4, tp_size=2, etp_size=2)]
    assert one.critic == ParallelLayout(4), "there is room for the cheapest"
    assert one.plan == device_plan(make_config(**SHORT, **tp2, critic__tensor_model_parallel_size=1), shapes)
    same = found[ParallelLayout(4)]
    assert same.plan == device_plan(make_config(**SHORT, parallel__actor_num_gpus_per_node=4), shapes) and same.critic is None
    refused = {layout: one.problem for layout, one in found.items() if one.plan is None}
    assert list(refused) == [ParallelLayout(4, tp_size=4, etp_size=4)]
    assert "does not divide the 2 key-value heads" in refused[ParallelLayout(4, tp_size=4, etp_size=4)]


def test_candidates_give_the_critic_the_cheapest_layout_that_fits_or_else_the_smallest(tmp_path: Path) -> None:
    """Against a plan of every pair by the run's own configs, in which the critic's flags say its layout."""
    shape = ModelShape.from_hf_folder(write_model_folder(tmp_path))
    shapes = {"actor": shape, "critic": shape}
    config = make_config(**SHORT, cluster__offload=False)
    sizes = [(tp, cp, pp) for tp in (1, 2) for cp in (1, 2, 4) for pp in (1, 2, 4) if 4 % (tp * cp * pp) == 0]
    actor: dict[str, Value] = {"parallel__actor_num_gpus_per_node": 4, "parallel__tensor_model_parallel_size": 2}
    peaks: dict[ParallelLayout, int] = {}
    for tp, cp, pp in sizes:
        critic: dict[str, Value] = {
            "critic__tensor_model_parallel_size": tp,
            "critic__context_parallel_size": cp,
            "critic__pipeline_model_parallel_size": pp,
        }
        tried = make_config(**SHORT, cluster__offload=False, **actor, **critic)
        check_config(tried)
        peaks[ParallelLayout(4, tp, cp, pp, etp_size=tp)] = device_plan(tried, shapes).peak
    for room in (0, *sorted(peaks.values())):
        found = candidates(config, shapes, num_gpus=4, gpus_per_node=8, room=room)
        one = next(one for one in found if one.layout == ParallelLayout(4, tp_size=2, etp_size=2))
        chosen = one.critic or one.layout
        assert one.plan is not None and one.plan.peak == peaks[chosen]
        cheaper = [layout for layout in peaks if layout_cost(layout) < layout_cost(chosen)]
        if room == 0:
            assert peaks[chosen] == min(peaks.values())
        else:
            assert peaks[chosen] <= room and all(peaks[layout] > room for layout in cheaper)


def test_candidates_keep_the_sizes_that_the_critic_is_given(tmp_path: Path) -> None:
    shape = ModelShape.from_hf_folder(write_model_folder(tmp_path))
    config = make_config(**SHORT, critic__pipeline_model_parallel_size=2)
    found = candidates(config, {"actor": shape, "critic": shape}, num_gpus=4, gpus_per_node=8, room=ROOM)
    given = {one.layout: one.critic for one in found if one.plan is not None}
    assert given[ParallelLayout(4)] == ParallelLayout(4, pp_size=2)
    assert given[ParallelLayout(4, tp_size=2, etp_size=2)] == ParallelLayout(4, tp_size=2, pp_size=2, etp_size=2)
    assert given[ParallelLayout(4, pp_size=2)] is None
    problem = next(one.problem for one in found if one.layout == ParallelLayout(4, cp_size=4))
    assert "critic" in problem, "two stages of four ranks a sample do not fit on four"


def test_candidates_of_several_nodes_keep_tensor_parallel_groups_on_one(tmp_path: Path) -> None:
    shape = ModelShape.from_hf_folder(
        write_model_folder(tmp_path, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=8)
    )
    config = make_config(**SHORT, ppo__advantage_estimator="grpo", rollout__n_samples_per_prompt=2)
    problems = {
        one.layout.tp_size: one.problem
        for one in candidates(config, {"actor": shape}, num_gpus=8, gpus_per_node=4, room=ROOM)
        if one.problem
    }
    assert list(problems) == [8] and "would lie on two nodes" in problems[8]
    with pytest.raises(ConfigError, match="6 GPUs are no whole number of nodes of 4"):
        list(candidates(config, {"actor": shape}, num_gpus=6, gpus_per_node=4, room=ROOM))


def test_candidates_of_a_mixture_share_out_its_experts(tmp_path: Path) -> None:
    shape = ModelShape.from_hf_folder(write_model_folder(tmp_path, **MOE))
    config = make_config(**SHORT, ppo__advantage_estimator="grpo", rollout__n_samples_per_prompt=2)
    plans = {one.layout: one.plan for one in candidates(config, {"actor": shape}, num_gpus=4, gpus_per_node=8, room=ROOM)}
    alone, shared = (plans[ParallelLayout(4, ep_size=size)] for size in (1, 4))
    assert alone is not None and shared is not None
    experts = 4 * 8 * 3 * 128 * 64  # layers x experts x matrices of h x f
    assert alone.roles["actor"].resident.params - shared.roles["actor"].resident.params == 4 * experts * 3 // 4
