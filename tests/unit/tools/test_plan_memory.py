"""tools/plan_memory.py as a user types it."""

import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from slime_ppo.config.dry_run import dry_run_report
from slime_ppo.config.model_shape import ModelShape
from tests.helpers.configs import make_config, write_model_folder
from tests.helpers.recipe_models import make_public_model

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    main = runpy.run_path(str(ROOT / "tools/plan_memory.py"))["main"]

    def run(*argv: str) -> tuple[int, str, str]:
        code = main(argv)
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run


def test_plan_memory_of_one_layout_is_that_of_the_dry_run_and_needs_no_weights(
    plan: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    folder = write_model_folder(tmp_path)
    (folder / "model.safetensors").unlink()
    code, out, _ = plan("--hf-checkpoint", str(folder / "config.json"), "--micro-batch-size", "4")
    assert code == 0
    table = [
        line.strip() for line in out.splitlines() if line.lstrip().startswith(("actor  ", "critic  ", "rollout  ", "a device"))
    ]
    assert len(table) == 4
    report = dry_run_report(make_config(batch__micro_batch_size=4), ModelShape.from_hf_folder(folder))
    assert [line for line in table if line not in report] == []


def test_plan_memory_of_a_public_model_lists_what_fits_the_nearest_misses_and_refusals(
    plan: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    model = make_public_model(tmp_path / "m", "Qwen3-4B")
    argv = ["--config", str(ROOT / "configs/qwen3-4b_8gpu.yaml"), "--hf-checkpoint", str(model), "--num-gpus", "8"]
    code, out, _ = plan(*argv, "--gpu-memory-gb", "40")
    assert code == 0
    lines = [line.split() for line in out.splitlines()]
    head = next(number for number, line in enumerate(lines) if line[:4] == ["TP", "CP", "PP", "DP"])
    rows = [line for line in lines[head + 1 : head + 16]]
    assert "15 of 20 layouts fit into 32.0 GiB a GPU" in out
    assert [row[:4] for row in rows[:2]] == [["2", "1", "1", "4"], ["1", "1", "2", "4"]], "two ranks a sample; pipelines idle"
    assert all(row[4:6] == ["TP2", "DP4"] for row in rows), "the cheapest for the critic, which does not fit on one rank"
    ranks_per_sample = [int(row[0]) * int(row[1]) * int(row[2]) for row in rows]
    assert ranks_per_sample == sorted(ranks_per_sample) and len(rows) == 15
    assert "4 need more memory, the nearest first" in out and "-1.5 GiB" in out
    assert "--pipeline-model-parallel-size 8 of the actor does not divide the 36 layers" in out
    given = plan(*argv, "--gpu-memory-gb", "40", "--critic-tensor-model-parallel-size", "8")[1]
    assert "critic at" in given and " TP8 " in given and "TP2 DP4" not in given
    code, out, _ = plan(*argv, "--gpu-memory-gb", "12")
    assert code == 1 and "0 of 20 layouts fit into 4.0 GiB" in out and "and 9 more, up to" in out
    assert "and 9 more" not in plan(*argv, "--gpu-memory-gb", "12", "--all")[1]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--num-gpus", "8"), "--num-gpus needs --gpu-memory-gb"),
        (("--gpu-memory-gb", "80"), "is used only with --num-gpus"),
        (("--num-gpus", "0", "--gpu-memory-gb", "80"), "--num-gpus: invalid"),
        (("--num-gpu", "8"), "unknown flag --num-gpu"),
        (("--num-gpus", "12", "--gpu-memory-gb", "80"), "12 GPUs are no whole number of nodes of 8"),
    ],
)
def test_plan_memory_refuses_wrong_options(
    plan: Callable[..., tuple[int, str, str]], tmp_path: Path, argv: tuple[str, ...], said: str
) -> None:
    code, out, err = plan("--hf-checkpoint", str(write_model_folder(tmp_path)), *argv)
    assert (code, out) == (2, "") and said in err


def test_plan_memory_of_a_missing_model_says_so_and_help_has_an_example(
    plan: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = plan("--hf-checkpoint", "nowhere")
    assert code == 2 and "nowhere: no such folder" in err
    monkeypatch.setattr(sys, "argv", ["plan_memory.py"])
    with pytest.raises(SystemExit) as end:
        plan("--help")
    assert end.value.code == 0 and "--num-gpus 16 --gpu-memory-gb 80" in capsys.readouterr().out
