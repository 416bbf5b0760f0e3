"""Supervised fine-tuning as a user runs it: alone, resumed, and on two ranks under Ray."""

from pathlib import Path

import pytest

from tests.e2e.conftest import Runs, metrics_of

SCRIPT = {"script": "scripts/train_sft.py", "config": "configs/sft_cpu.yaml"}
SHORT = ("--num-rollout", "6", "--global-batch-size", "16", "--eval-interval", "0")
TP2 = ("--actor-num-gpus-per-node", "2", "--tensor-model-parallel-size", "2")


def test_fine_tuning_learns_goes_on_bit_for_bit_and_is_the_same_on_two_ranks_of_ray(
    local_runs: Runs, joined_runs: Runs, tmp_path: Path
) -> None:
    whole, resumed, ranks = (tmp_path / name for name in ("whole", "resumed", "ranks"))
    code, output = local_runs.finish(whole, *SHORT, "--save-interval", "3", **SCRIPT)
    assert code == 0, output
    assert "Fine-tuning of glass-en: 6 batches into" in output and "batch 5/6  nll" in output
    expected = metrics_of(whole)
    assert expected[-1]["eval/nll"] < 0.6 * expected[0]["eval/nll"]
    assert expected[-1]["train/loss"] == pytest.approx(expected[-1]["train/nll"], rel=1e-6)
    assert (whole / "report.html").is_file() and (whole / "hf" / "tokenizer.json").is_file()

    code, output = local_runs.finish(resumed, *SHORT, "--load", str(whole), "--ckpt-step", "3", **SCRIPT)
    assert code == 0, output
    assert "after 3 of 6 rollouts: weights and optimizer of actor, place in the prompts, weight version 3" in output
    assert metrics_of(resumed) == expected
    file = "hf/model.safetensors"
    assert (resumed / file).read_bytes() == (whole / file).read_bytes()

    code, output = joined_runs.finish(ranks, *SHORT, *TP2, "--launcher", "ray", "--no-save-checkpoints", **SCRIPT)
    assert code == 0, output
    for found, other in zip(metrics_of(ranks), expected, strict=True):
        assert found.keys() == other.keys()
        assert found == pytest.approx(other, rel=1e-4)
