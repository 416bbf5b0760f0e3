"""What the launcher does to a run folder."""

from pathlib import Path

import yaml

from slime_ppo.launch import _claim_run_folder
from tests.helpers.configs import make_config


def test_claim_run_folder_removes_old_records_and_keeps_weights_and_other_files(tmp_path: Path) -> None:
    records = ("metrics.jsonl", "samples.jsonl", "run.json", "report.html")
    kept = ("hf/model.safetensors", "critic/model.safetensors", "tensorboard/events", "notes.txt")
    for name in (*records, *kept):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("old")
    _claim_run_folder(make_config(run__save=str(tmp_path), run__seed=7))
    assert not any((tmp_path / name).exists() for name in records)
    assert all((tmp_path / name).read_text() == "old" for name in kept)
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["run"]["seed"] == 7


def test_claim_run_folder_with_tensorboard_removes_old_events(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").mkdir()
    _claim_run_folder(make_config(run__save=str(tmp_path), tracking__use_tensorboard=True))
    assert not (tmp_path / "tensorboard").exists()
