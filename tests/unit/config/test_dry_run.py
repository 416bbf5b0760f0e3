"""The text of --dry-run."""

from pathlib import Path

from slime_ppo.config.dry_run import bundle_tenants, dry_run_report, placement_text
from slime_ppo.config.model_shape import ModelShape
from tests.helpers.configs import make_config, write_model_folder


def test_bundle_tenants_of_uneven_roles_share_bundles_rank_by_rank() -> None:
    config = make_config(parallel__actor_num_gpus_per_node=2, critic__num_gpus_per_node=1)
    assert bundle_tenants(config) == [("actor rank 0", "critic rank 0", "rollout engine"), ("actor rank 1",)]
    config = make_config(critic__num_gpus_per_node=2)
    assert bundle_tenants(config) == [("actor rank 0", "critic rank 0", "rollout engine"), ("critic rank 1",)]


def test_bundle_tenants_without_colocation_live_alone() -> None:
    config = make_config(parallel__actor_num_gpus_per_node=2, critic__num_gpus_per_node=1, cluster__colocate=False)
    assert bundle_tenants(config) == [("actor rank 0",), ("actor rank 1",), ("critic rank 0",), ("rollout engine",)]


def test_placement_text_says_how_the_devices_are_shared() -> None:
    text = placement_text(make_config(), "ray")
    assert "rollout engine: 1 process; all share the devices, one is awake at a time" in text
    text = placement_text(make_config(cluster__offload=False), "ray")
    assert "all share the devices, all stay in memory" in text
    text = placement_text(make_config(cluster__colocate=False, cluster__device="cuda"), "ray")
    assert "each has devices of its own, critic and actor train side by side" in text
    assert "bundle 2 (1 CPU + 1 GPU): rollout engine\n" in text
    text = placement_text(make_config(cluster__colocate=False, ppo__advantage_estimator="grpo"), "ray")
    assert "each has devices of its own\n" in text and "critic" not in text


def test_placement_text_names_sglang_servers_and_their_ranks() -> None:
    text = placement_text(make_config(rollout__engine="sglang", rollout__rollout_num_gpus=2), "ray")
    assert "rollout engine: 2 SGLang servers of TP 1; all share the devices, one is awake at a time" in text
    config = make_config(rollout__engine="sglang", rollout__rollout_num_gpus=4, rollout__rollout_num_gpus_per_engine=2)
    assert "rollout engine: 2 SGLang servers of TP 2;" in placement_text(config, "ray")
    assert bundle_tenants(config)[0] == ("actor rank 0", "critic rank 0", "SGLang server 0 rank 0")
    assert bundle_tenants(config)[1:] == [("SGLang server 0 rank 1",), ("SGLang server 1 rank 0",), ("SGLang server 1 rank 1",)]


def test_dry_run_report_of_servers_of_others_estimates_no_memory_of_theirs(tmp_path: Path) -> None:
    shape = ModelShape.from_hf_folder(write_model_folder(tmp_path))
    own, others = (
        dry_run_report(make_config(rollout__engine="sglang", sglang__server_urls=urls), shape)
        for urls in (None, "http://a:1,http://b:1")
    )
    assert "rollout engine: 2 SGLang servers that others have started (--sglang-server-urls); the roles share" in others
    assert "SGLang servers that others" in others and "(KV)" not in others
    assert "(KV)" in own and "--sglang-mem-fraction-static" in own


def test_dry_run_report_without_ray_names_processes_and_no_bundle(tmp_path: Path) -> None:
    shape = ModelShape.from_hf_folder(write_model_folder(tmp_path))
    config = make_config(parallel__actor_num_gpus_per_node=2, cluster__device="cpu")
    report = dry_run_report(config, shape, launcher="local")
    assert "process 0 (1 CPU): actor rank 0, critic rank 0, rollout engine" in report
    assert "process 1 (1 CPU): actor rank 1, critic rank 1" in report
    assert "bundle" not in report


def test_dry_run_report_has_plan_placement_memory_and_warnings(tmp_path: Path) -> None:
    shape = ModelShape.from_hf_folder(write_model_folder(tmp_path))
    config = make_config(
        parallel__actor_num_gpus_per_node=2,
        parallel__tensor_model_parallel_size=2,
        critic__num_gpus_per_node=1,
        critic__tensor_model_parallel_size=1,
        cluster__device="cuda",
        ppo__kl_coef=0.1,
        ppo__kl_reward_type="k2",
    )
    lines = [" ".join(line.split()) for line in dry_run_report(config, shape).splitlines()]
    assert [line for line in lines if line in ("Batch plan", "Placement", "Warnings")] == ["Batch plan", "Placement", "Warnings"]
    assert "rollout_batch_size 128 prompts per rollout" in lines
    assert "actor: 2 ranks = TP 2 x DP 1" in lines
    assert "critic: 1 rank = TP 1 x DP 1" in lines
    assert "bundle 0 (1 CPU + 1 GPU): actor rank 0, critic rank 0, rollout engine" in lines
    assert any(line.startswith("actor 1.7 MiB 1.7 MiB 0.0 MiB 3.3 MiB") for line in lines)
    assert any(line.startswith("critic 3.3 MiB 3.3 MiB 0.0 MiB 6.6 MiB") for line in lines)
    assert any(line.startswith("--kl-reward-type k2") for line in lines)


def test_dry_run_report_names_the_context_parallel_size_of_a_role_that_has_one(tmp_path: Path) -> None:
    shape = ModelShape.from_hf_folder(write_model_folder(tmp_path))
    config = make_config(
        parallel__actor_num_gpus_per_node=8,
        parallel__tensor_model_parallel_size=2,
        parallel__context_parallel_size=2,
        critic__context_parallel_size=1,
    )
    report = dry_run_report(config, shape)
    assert "actor: 8 ranks = TP 2 x CP 2 x DP 2" in report and "critic: 8 ranks = TP 2 x DP 4" in report


def test_dry_run_report_of_a_pipeline_has_a_row_per_distinct_stage(tmp_path: Path) -> None:
    shape = ModelShape.from_hf_folder(write_model_folder(tmp_path))
    config = make_config(
        parallel__actor_num_gpus_per_node=4,
        parallel__pipeline_model_parallel_size=4,
        critic__num_gpus_per_node=1,
        critic__pipeline_model_parallel_size=1,
    )
    lines = [line.strip() for line in dry_run_report(config, shape).splitlines()]
    memory = lines[next(place for place, line in enumerate(lines) if line.startswith("Memory")) + 1 :]
    labels = [line.split("  ")[0] for line in memory[1:6]]
    assert labels == ["actor stage 0", "actor stages 1-2", "actor stage 3", "critic", "rollout"]
    assert memory[2].split()[3:9] == ["0.7", "MiB", "0.7", "MiB", "0.0", "MiB"]  # a layer of 184,704 numbers


def test_dry_run_report_with_another_critic_uses_its_shape(tmp_path: Path) -> None:
    shape = ModelShape.from_hf_folder(write_model_folder(tmp_path / "a"))
    small = ModelShape.from_hf_folder(write_model_folder(tmp_path / "b", num_hidden_layers=1))
    [critic] = [line for line in dry_run_report(make_config(), shape, critic_shape=small).splitlines() if " critic  " in line]
    assert critic.split()[1:3] == ["1.2", "MiB"]


def test_dry_run_report_without_a_critic_names_none(tmp_path: Path) -> None:
    shape = ModelShape.from_hf_folder(write_model_folder(tmp_path))
    config = make_config(
        ppo__advantage_estimator="grpo", parallel__actor_num_gpus_per_node=2, critic__num_gpus_per_node=4, critic__lr=1e-3
    )
    assert bundle_tenants(config) == [("actor rank 0", "rollout engine"), ("actor rank 1",)]
    report, _, warnings = dry_run_report(config, shape).partition("Warnings")
    assert "actor: 2 ranks" in report and "critic" not in report
    assert "--critic-lr 0.001 has no effect" in warnings and "--critic-num-gpus-per-node 4 has no effect" in warnings
