"""What each rank of each role is told, from a config in which no two numbers are alike."""

import os
from dataclasses import replace

import pytest

from slime_ppo.config.fields import Value
from slime_ppo.orchestration.worker_settings import worker_settings
from slime_ppo.parallel.layout import ParallelLayout
from slime_ppo.parallel.worker_settings import BatchSettings, ModelSettings, OptimizerSettings, RankSettings, WorkerSettings
from tests.helpers.configs import make_config

VALUES: dict[str, Value] = {
    "run__seed": 11,
    "run__deterministic": False,
    "model__hf_checkpoint": "actor-folder",
    "model__ref_load": "ref-folder",
    "model__dtype": "bfloat16",
    "model__transformer_impl": "local",  # whatever the environment of the tests has
    "model__make_vocab_size_divisible_by": 64,
    "optimizer__clip_grad": 0.5,
    "optimizer__weight_decay": 0.01,
    "optimizer__adam_beta1": 0.8,
    "optimizer__adam_beta2": 0.98,
    "optimizer__adam_eps": 1e-7,
    "batch__micro_batch_size": 3,
    "batch__max_tokens_per_gpu": 900,  # without effect until batches are dynamic
    "parallel__actor_num_nodes": 2,
    "parallel__actor_num_gpus_per_node": 2,
    "parallel__tensor_model_parallel_size": 2,
    "critic__load": "critic-folder",
    "critic__num_nodes": 1,
    "critic__num_gpus_per_node": 2,
    "critic__tensor_model_parallel_size": 1,
    "critic__context_parallel_size": 2,
    "critic__clip_grad": 0.25,
    "cluster__num_threads_per_rank": 5,
    "cluster__call_timeout_s": 77.0,
    "ppo__kl_coef": 0.1,
}


def rank_settings(rank: int) -> RankSettings:
    return RankSettings(
        rank=rank, init_method="tcp://a:1", device="cuda", seed=11, num_threads=5, deterministic=False, collective_timeout_s=77.0
    )


OPTIMIZER = OptimizerSettings(clip_grad=0.5, weight_decay=0.01, adam_beta1=0.8, adam_beta2=0.98, adam_eps=1e-7)


def test_worker_settings_actor_has_the_reference_and_one_entry_per_rank() -> None:
    found = worker_settings(make_config(**VALUES), "actor", init_method="tcp://a:1", device="cuda")
    model = ModelSettings(
        hf_folder=os.path.abspath("actor-folder"),
        ref_folder=os.path.abspath("ref-folder"),
        dtype="bfloat16",
        make_vocab_size_divisible_by=64,
    )
    assert found == [
        WorkerSettings(
            rank=rank_settings(rank),
            layout=ParallelLayout(num_ranks=4, tp_size=2, etp_size=2),
            model=model,
            optimizer=OPTIMIZER,
            batch=BatchSettings(micro_batch_size=3, max_tokens=None),
            starts_offloaded=True,
        )
        for rank in range(4)
    ]


def test_worker_settings_critic_has_its_own_folder_layout_and_clip_and_no_reference() -> None:
    found = worker_settings(make_config(**VALUES), "critic", init_method="tcp://a:1", device="cuda")
    assert [one.rank for one in found] == [rank_settings(0), rank_settings(1)]
    assert {one.layout for one in found} == {ParallelLayout(num_ranks=2, tp_size=1, cp_size=2)}
    assert {(one.model.hf_folder, one.model.ref_folder) for one in found} == {(os.path.abspath("critic-folder"), None)}
    assert {one.optimizer for one in found} == {replace(OPTIMIZER, clip_grad=0.25)}


@pytest.mark.parametrize(
    ("values", "folder"),
    [({"ppo__kl_coef": 0.0}, None), ({"ppo__kl_coef": 0.0, "ppo__use_kl_loss": True}, "ref-folder"), ({}, "ref-folder")],
)
def test_worker_settings_reference_only_where_the_kl_is_used(values: dict[str, Value], folder: str | None) -> None:
    found = worker_settings(make_config(**(VALUES | values)), "actor", init_method="tcp://a:1", device="cpu")
    assert {one.model.ref_folder for one in found} == {folder and os.path.abspath(folder)}
    assert {one.rank.device for one in found} == {"cpu"}


def test_worker_settings_dynamic_batches_count_tokens_alone() -> None:
    config = make_config(
        **(VALUES | {"batch__use_dynamic_batch_size": True, "batch__max_tokens_per_gpu": 500, "batch__balance_by": "flops"})
    )
    for role in ("actor", "critic"):
        found = worker_settings(config, role, init_method="tcp://a:1", device="cpu")
        assert {one.batch for one in found} == {BatchSettings(micro_batch_size=None, max_tokens=500, balance_by="flops")}


def test_worker_settings_context_parallel_size_is_the_roles() -> None:
    config = make_config(**(VALUES | {"parallel__context_parallel_size": 2, "critic__context_parallel_size": 1}))
    sizes = {role: worker_settings(config, role, init_method="tcp://a:1", device="cpu")[0].layout for role in config.roles}
    assert sizes == {"actor": ParallelLayout(4, tp_size=2, cp_size=2, etp_size=2), "critic": ParallelLayout(2)}


def test_worker_settings_without_offload_ranks_stay_awake() -> None:
    config = make_config(**(VALUES | {"cluster__offload": False}))
    found = worker_settings(config, "actor", init_method="tcp://a:1", device="cpu")
    assert not any(one.starts_offloaded for one in found)
