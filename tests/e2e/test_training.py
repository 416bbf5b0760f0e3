"""Whole runs that must succeed: they learn, they repeat, and the answer does not depend on the layout."""

import json
import re
from pathlib import Path

import pytest
import yaml
from transformers import AutoModelForCausalLM

from slime_ppo.conversion.hf_io import HfWeights
from tests.e2e.conftest import SMALL, Runs, metrics_of

GAP = 5e-5
DP2 = ("--actor-num-gpus-per-node", "2")
PP2 = ("--actor-num-gpus-per-node", "2", "--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "2")
CRITIC_TP2 = (
    "--critic-tensor-model-parallel-size", "2", "--critic-pipeline-model-parallel-size", "1",
    "--critic-num-virtual-stages-per-pipeline-rank", "1",
)  # fmt: skip


def test_quickstart_learns_and_leaves_everything_a_user_expects(local_runs: Runs, tmp_path: Path) -> None:
    save = tmp_path / "run"
    code, output = local_runs.finish(save, timeout_s=900)
    assert code == 0, output
    rollouts = metrics_of(save)
    assert len(rollouts) == 25
    rewards = [rollout["rollout/raw_reward"] for rollout in rollouts]
    assert sum(rewards[-5:]) / 5 >= 0.75
    assert rollouts[-1]["eval/heldout"] >= 0.85 > 0.2 >= rollouts[0]["eval/heldout"]
    assert max(rollout["rollout/logprob_gap_max"] for rollout in rollouts) <= GAP
    assert [("train/pg_loss" in rollout) for rollout in rollouts] == [False] * 3 + [True] * 22
    assert not re.search(r"Traceback|Warning|raylet", output)
    assert "lexicon reward is easily flattered" in output
    page = (save / "report.html").read_text(encoding="utf-8")
    assert "lexicon reward is easily flattered" in page
    AutoModelForCausalLM.from_pretrained(save / "hf")
    assert HfWeights(save / "critic" / "hf")["score.weight"].abs().max() > 0
    assert yaml.safe_load((save / "config.yaml").read_text(encoding="utf-8"))["optimizer"]["lr"] == 1e-3


def test_resolved_config_of_a_run_reproduces_every_metric_bit_for_bit(joined_runs: Runs, one_rank: Path, tmp_path: Path) -> None:
    code, output = joined_runs.finish(
        tmp_path / "again", "--config", str(one_rank / "config.yaml"), "--save", str(tmp_path / "again")
    )
    assert code == 0, output
    assert metrics_of(tmp_path / "again") == metrics_of(one_rank)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param((*DP2, "--critic-num-gpus-per-node", "1", "--no-colocate"), id="actor-DP2-critic-1-devices-of-their-own"),
        pytest.param((*PP2, *CRITIC_TP2), id="actor-PP2-critic-TP2"),
    ],
)
def test_layout_gives_the_numbers_of_one_rank(joined_runs: Runs, one_rank: Path, tmp_path: Path, layout: tuple[str, ...]) -> None:
    code, output = joined_runs.finish(tmp_path / "run", *SMALL, *layout)
    assert code == 0, output
    alone, split = metrics_of(one_rank), metrics_of(tmp_path / "run")
    assert split[0]["rollout/raw_reward"] == alone[0]["rollout/raw_reward"]
    for ours, theirs in zip(split, alone, strict=True):
        assert ours.keys() == theirs.keys()
        for name in ("train/grad_norm", "train/critic-grad_norm", "train/critic-value_loss", "rollout/entropy"):
            if name in theirs:
                assert ours[name] == pytest.approx(theirs[name], rel=1e-5), name
        # next to 0 at first, where one part in 1e5 is below float32's grain
        assert ours["rollout/kl"] == pytest.approx(theirs["rollout/kl"], rel=1e-5, abs=1e-6)
        assert ours.get("train/pg_loss", 0.0) == pytest.approx(theirs.get("train/pg_loss", 0.0), abs=1e-6)


def test_devices_of_their_own_give_the_metrics_of_shared_ones_bit_for_bit(
    joined_runs: Runs, one_rank: Path, tmp_path: Path
) -> None:
    code, output = joined_runs.finish(tmp_path / "run", *SMALL, "--no-colocate")
    assert code == 0, output
    assert metrics_of(tmp_path / "run") == metrics_of(one_rank)
    assert "3 bundles on cpu" in output
    times = [json.loads(line)["phases"] for line in (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [phases["both train"] > 0 for phases in times] == [False, True, True, True]
    for phases in times:
        assert phases["wake"] == phases["offload"] == 0


def test_restricted_sampler_with_adaptive_kl_trains_on_recorded_supports(joined_runs: Runs, tmp_path: Path) -> None:
    flags = (
        "--rollout-top-p",
        "0.9",
        "--rollout-top-k",
        "64",
        "--kl-controller",
        "adaptive",
        "--kl-target",
        "0.1",
        "--kl-horizon",
        "64",
    )
    code, output = joined_runs.finish(tmp_path / "run", *SMALL, *flags, "--use-dynamic-batch-size", "--max-tokens-per-gpu", "200")
    assert code == 0, output
    for rollout in metrics_of(tmp_path / "run"):
        assert rollout["rollout/logprob_gap_max"] <= GAP
        assert 0.05 < rollout["rollout/outside_mass"] < 0.5
    # critic-only: frozen; then the KL is below its target: each rollout lowers beta by at most 20% of 16/64
    betas = [rollout["rollout/kl_coef"] for rollout in metrics_of(tmp_path / "run")]
    assert betas[0] == betas[1] == 0.02
    assert betas[2] == pytest.approx(0.02 * (1 - 0.2 * 16 / 64))


def test_critic_free_run_with_correction_trains_the_actor_alone(joined_runs: Runs, tmp_path: Path) -> None:
    flags = (
        "--advantage-estimator", "grpo", "--num-critic-only-steps", "0", "--num-rollout", "3",
        "--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--rollout-min-p", "0.02",
        "--policy-loss", "gspo", "--eps-clip", "null", "--rollout-correction", "tis", "--rollout-rejection", "geometric",
        "--kl-coef", "0", "--use-kl-loss", "--kl-loss-coef", "0.02",
    )  # fmt: skip
    code, output = joined_runs.finish(tmp_path / "run", *SMALL, *flags)
    assert code == 0, output
    assert sorted(path.name for path in (tmp_path / "run" / "logs").glob("*-0.log")) == ["actor-0.log"]
    assert "--critic-lr 0.001 has no effect" in output
    steps = [line for line in output.splitlines() if line.startswith("  step")]
    assert len(steps) == 6 and all("pg " in line and "critic" not in line for line in steps)
    for rollout in metrics_of(tmp_path / "run"):
        assert not [name for name in rollout if "critic" in name or name == "rollout/values"]
        # the engine holds the actor's weights: every ratio is 1 up to rounding, nothing is rejected
        assert rollout["train/train_rollout_logprob_abs_diff"] == rollout["rollout/logprob_gap_mean"] <= GAP
        assert rollout["rollout/ess"] == pytest.approx(1.0, abs=1e-6)
        assert (rollout["rollout/rejected_samples"], rollout["train/denominator_trajectories"]) == (0.0, 16.0)
        assert abs(rollout["rollout/advantages"]) < 1.0
        assert rollout["train/grad_norm"] > 0 and rollout["train/ppo_kl"] > 0 and rollout["train/kl_loss"] >= 0


def test_turns_keep_one_tenant_awake_except_for_weight_sync(one_rank: Path) -> None:
    log = (one_rank / "logs" / "driver.log").read_text(encoding="utf-8")
    events = re.findall(r"turns (wake|offload) (\w+): [\d.]+ MB -> ([\d.]+) MB", log)
    assert len(events) > 20
    awake: set[str] = set()
    together = set()
    for verb, tenant, megabytes in events:
        if verb == "wake":
            awake.add(tenant)
            assert float(megabytes) > 0
        else:
            awake.remove(tenant)
            assert float(megabytes) == 0
        together |= {frozenset(awake)} if len(awake) > 1 else set()
    assert together == {frozenset({"actor", "rollout"})}


def test_submitted_job_trains_on_the_cluster_and_its_exit_code_comes_back(
    joined_runs: Runs, one_rank: Path, tmp_path: Path
) -> None:
    flags = ("--config", "configs/quickstart_cpu.yaml", "--hf-checkpoint", str(joined_runs.model), *SMALL)
    code, output = joined_runs.submit(*flags, "--save", str(tmp_path / "run"), "--num-rollout", "2")
    assert code == 0, output
    assert "rollout 1/2 " in output, "its log was followed"
    assert metrics_of(tmp_path / "run")[0] == metrics_of(one_rank)[0], "the LR schedule of fewer rollouts shows later"
    code, output = joined_runs.submit("--config", "configs/quickstart_cpu.yaml", "--kl-coeff", "1")
    assert code == 2 and "unknown flag --kl-coeff" in output
