"""The command lines of the converters and of what looks at their folders: what they print, write and return."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime_ppo.checkpoint.files import file_sizes
from slime_ppo.checkpoint.run_state import Checkpoint, RunState, SavedState
from tests.helpers.tiny_family import make_tiny_family
from tests.helpers.tiny_llama import make_tiny_llama
from tests.helpers.tiny_reward_model import make_reward_model
from tools import check_conversion, convert_hf_to_torch_dist, convert_torch_dist_to_hf, inspect_checkpoint

TOOLS: dict[str, Any] = {
    "to_torch_dist": convert_hf_to_torch_dist,
    "to_hf": convert_torch_dist_to_hf,
    "check": check_conversion,
    "inspect": inspect_checkpoint,
}
Run = Callable[..., tuple[int, list[str], str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """(exit code, lines of the output, errors) of a tool called with arguments."""

    def call(tool: str, *args: object) -> tuple[int, list[str], str]:
        code = TOOLS[tool].main([str(one) for one in args])
        captured = capsys.readouterr()
        return code, captured.out.splitlines(), captured.err

    return call


@pytest.fixture
def folders(tmp_path: Path, run: Run) -> tuple[Path, Path]:
    """A tiny Llama, and what the converter makes of it."""
    source, out = make_tiny_llama(tmp_path / "hf", tie=False), tmp_path / "torch_dist"
    assert run("to_torch_dist", source, out)[0] == 0
    return source, out


@pytest.mark.parametrize("tool", list(TOOLS))
def test_help_has_an_example_and_every_tool_a_dry_run(tool: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        TOOLS[tool].main(["--help"])
    text = capsys.readouterr().out
    assert f"example:\n  python tools/{TOOLS[tool].__name__.split('.')[-1]}.py" in text and "--dry-run" in text


def test_conversion_says_what_it_writes_and_the_way_back_is_equal(tmp_path: Path, run: Run) -> None:
    source, middle, back = make_tiny_llama(tmp_path / "hf"), tmp_path / "middle", tmp_path / "back"
    code, lines, _ = run("to_torch_dist", source, middle)
    assert code == 0 and lines[0] == f"{source}: llama actor, 14 Megatron tensors, 321.8 KB to write"
    code, lines, _ = run("to_hf", middle, back, "--max-shard-size", "200KB")
    assert code == 0
    assert lines[0] == f"{middle}/iter_0000000: llama actor, 20 Hugging Face tensors, 321.8 KB in 2 files to write"
    assert sorted(path.name for path in back.glob("*.safetensors")) == ["model-00001.safetensors", "model-00002.safetensors"]
    code, lines, _ = run("check", source, back)
    assert code == 0 and "weights: all 20 tensors are equal bit for bit" in lines


@pytest.mark.parametrize("tool", ["to_torch_dist", "to_hf"])
def test_dry_run_writes_nothing_and_a_filled_folder_needs_force(folders: tuple[Path, Path], tool: str, run: Run) -> None:
    source = folders[0] if tool == "to_torch_dist" else folders[1]
    out = source.parent / "out"
    code, lines, _ = run(tool, source, out, "--dry-run")
    assert code == 0 and lines[-1] == f"dry run: nothing written to {out}" and not out.exists()
    assert run(tool, source, out)[0] == 0
    assert run(tool, source, out)[::2] == (
        2,
        f"error: {out} is not empty. Write to a new folder, or replace an earlier conversion with --force\n",
    )
    assert run(tool, source, out, "--force")[0] == 0
    aside = out.rename(source.parent / "out.old")
    for dry_run in ([], ["--dry-run"]):
        code, _, errors = run(tool, source, out, *dry_run)
        assert code == 2 and errors.startswith(f"error: {aside} is not empty, and is removed when {out} is written. Write to a new")
    assert not out.exists() and run(tool, source, out, "--force")[0] == 0 and not aside.exists()


@pytest.mark.parametrize(
    ("tool", "args", "words"),
    [
        ("to_torch_dist", ("nowhere", "out"), "nowhere: no such folder"),
        ("to_torch_dist", ("hf", "out", "--make-vocab-size-divisible-by", "0"), "expected 1 to 1,048,576"),
        ("to_hf", ("nowhere", "out"), "nowhere: no such folder"),
        ("to_hf", ("torch_dist", "out", "--max-shard-size", "5"), "'5' is no size"),
        ("to_hf", ("hf", "out"), "holds neither .metadata nor latest_checkpointed_iteration.txt"),
        ("check", ("hf", "nowhere"), "nowhere: no such folder"),
        ("check", ("hf", "torch_dist", "--prompt", ""), "--prompt '' is no tokens by "),
        ("inspect", ("nowhere",), "nowhere: no such folder"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, run: Run, *, tool: str, args: tuple[str, ...], words: str
) -> None:
    monkeypatch.chdir(folders[0].parent)
    code, _, errors = run(tool, *args)
    assert code == 2 and errors.startswith("error: ") and errors.count("\n") == 1 and words in errors
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("source", "lie in each other"),
        ("source/inside", "lie in each other"),
        (".", "lie in each other"),
        ("file", "is a file"),
        ("file/below", "is a file"),
        ("notes", "holds thesis.txt"),
        ("staged", "staged.partial holds thesis.txt"),
        ("link", "holds thesis.txt"),
        ("mounted", "is a mount point"),
        ("locked/new", "cannot be written: it is read-only"),
        ("full/new", "Make room"),
    ],
)
@pytest.mark.parametrize("tool", ["to_torch_dist", "to_hf"])
def test_dry_run_refuses_what_the_run_refuses_and_both_leave_everything_as_it_is(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, run: Run, *, tool: str, case: str, words: str
) -> None:
    root = folders[0].parent
    monkeypatch.chdir(root)
    source = folders[0] if tool == "to_torch_dist" else folders[1] / "iter_0000000"
    for name in ("notes", "staged.partial"):
        Path(name).mkdir()
        Path(name, "thesis.txt").touch()
    for name in ("mounted", "locked", "full"):
        Path(name).mkdir()
    Path("link").symlink_to("notes")
    Path("file").touch()
    usage = shutil.disk_usage(root)
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path).name == "mounted")
    monkeypatch.setattr(os, "access", lambda path, _: Path(path).name != "locked")  # root may write everywhere
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000) if Path(path).name == "full" else usage)
    out, before = case.replace("source", str(source)), file_sizes(root)
    found = [run(tool, source, out, "--force", *more) for more in ((), ("--dry-run",))]
    assert found[0] == found[1]
    assert found[0][0] == 2 and words in found[0][2] and file_sizes(root) == before


@pytest.mark.parametrize("tool", ["to_torch_dist", "to_hf"])
def test_interrupt_is_one_line_and_leaves_the_earlier_output_alone(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, run: Run, tool: str
) -> None:
    source, out = folders[0 if tool == "to_torch_dist" else 1], folders[0].parent / "out"
    assert run(tool, source, out)[0] == 0
    before = file_sizes(out)

    @contextmanager
    def interrupted(*_: object) -> Iterator[Callable[[int], None]]:
        def advance(_: int) -> None:
            raise KeyboardInterrupt

        yield advance

    monkeypatch.setattr(TOOLS[tool], "progress_bar", interrupted)
    code, _, errors = run(tool, source, out, "--force")
    assert code == 130
    assert errors == "interrupted: an output is there as a whole or not at all, and nothing half-written is left\n"
    assert file_sizes(out) == before and [path.name for path in out.parent.glob("out*")] == ["out"]


def test_check_names_the_tensor_that_differs_and_shows_the_logits(folders: tuple[Path, Path], run: Run) -> None:
    source, middle = folders
    code, lines, _ = run("check", source, middle, "--prompt", "hello there")
    assert code == 0
    assert lines[-1].startswith("logits at 11 tokens of 'hello there': largest difference 0.000e+00, largest value ")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] += 0.5
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    code, lines, _ = run("check", source, middle)
    assert code == 1
    assert [line.split() for line in lines if line.startswith(("layer 1 ", "  model"))] == [
        ["layer", "1", "8/9", "5.000e-01", lines[5].split()[-1]],
        ["model.layers.1.mlp.up_proj.weight", "0/1", "5.000e-01", lines[6].split()[-1]],
    ]
    assert any(line.startswith("weights: 1 of 21 tensors differ, first model.layers.1.mlp.up_proj") for line in lines)
    assert "largest difference 0.000e+00" not in lines[-1]
    assert run("check", source, middle, "--no-logits", "--tolerance", "0.6")[0] == 0


def test_check_of_numbers_that_are_not_finite_never_passes(folders: tuple[Path, Path], run: Run) -> None:
    source, middle = folders
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    code, lines, _ = run("check", source, middle, "--no-logits", "--tolerance", "1000")
    assert code == 1 and any("nan" in line for line in lines if line.startswith("final layernorm"))


@pytest.mark.parametrize("kind", ["reward model", "experts"])
def test_check_of_a_critic_compares_scores_and_of_another_type_after_rounding(tmp_path: Path, kind: str, run: Run) -> None:
    source = make_tiny_family(tmp_path / "policy", "qwen2" if kind == "reward model" else "qwen3_moe", tie=False, seed=1)
    if kind == "reward model":
        source = make_reward_model(source, tmp_path / "reward", seed=2)
    assert run("to_torch_dist", source, tmp_path / "out", "--dtype", "bfloat16")[0] == 0
    code, lines, _ = run("check", source, tmp_path / "out")
    assert code == 0 and any("are equal bit for bit (compared in the narrower of float32 and bfloat16)" in one for one in lines)
    start = "score of" if kind == "reward model" else "logits at 32 tokens of"
    assert lines[-1].startswith(f"{start} the token ids 0 to 31 (")


def test_check_of_a_critic_against_its_policy_says_what_only_one_has(folders: tuple[Path, Path], run: Run) -> None:
    reward = make_reward_model(folders[0], folders[0].parent / "reward", seed=1)
    code, lines, _ = run("check", folders[1], reward, "--dry-run")
    assert code == 1 and lines[2:4] == ["only in A: lm_head.weight", "only in B: score.weight"]


def test_inspect_folds_layers_that_are_alike_and_hashes_on_demand(folders: tuple[Path, Path], run: Run) -> None:
    source, middle = folders
    code, lines, _ = run("inspect", middle)
    words = [line.split() for line in lines]
    assert code == 0 and lines[0].startswith(f"{middle}/iter_0000000: torch_dist, llama language model, 15 tensors, 0.1 million")
    assert ["{0-1}", "6", "tensors", "x", "2", "295.9", "KB"] in words
    assert ["linear_qkv.weight", "F32", "[128,", "64]", "32.8", "KB"] in words
    assert (
        sum("linear_qkv" in line for line in lines) == 1
        and sum("linear_qkv" in one for one in run("inspect", middle, "--all")[1]) == 2
    )
    norm = load_file(source / "model.safetensors")["model.norm.weight"]
    expected = sha256(norm.numpy().tobytes()).hexdigest()[:16]
    for folder, name in ((source, "norm.weight"), (middle, "final_layernorm.weight")):
        (line,) = [one for one in run("inspect", folder, "--hash")[1] if one.split()[:1] == [name]]
        assert line.split()[-1] == expected


def test_inspect_lists_what_is_missing_and_too_much(folders: tuple[Path, Path], run: Run) -> None:
    source, middle = folders
    tensors = load_file(source / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors | {"more": torch.ones(1)}, source / "model.safetensors", metadata={"format": "pt"})
    code, lines, _ = run("inspect", source, "--dry-run")
    assert code == 1 and lines[1:] == ["problem: missing: model.norm.weight", "problem: not used: more"]
    config = json.loads((middle / "hf" / "config.json").read_text())
    (middle / "hf" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    code, lines, _ = run("inspect", middle, "--dry-run")
    assert code == 1 and len(lines) == 8 and all("not used: decoder.layers.1." in line for line in lines[2:])


def test_inspect_run_folder_checks_the_files_of_every_checkpoint(folders: tuple[Path, Path], tmp_path: Path, run: Run) -> None:
    middle, run_folder = folders[1], tmp_path / "run"
    checkpoints = []
    for rollout in (10, 20):
        actor = run_folder / "actor" / f"iter_{rollout:07d}"
        actor.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(middle / "iter_0000000", actor)
        state = SavedState({}, {}, {}, {"actor": file_sizes(actor)}).to_json()
        (run_folder / f"state_{rollout}.json").write_bytes(state)
        checkpoints.append(
            Checkpoint(rollout, {"actor": f"actor/{actor.name}"}, f"state_{rollout}.json", sha256(state).hexdigest())
        )
    RunState("ab12", tuple(checkpoints)).write(run_folder)
    code, lines, _ = run("inspect", run_folder)
    assert code == 0 and lines[0] == f"{run_folder}: run ab12, 2 checkpoints"
    assert lines[1].startswith("  after rollout 10: actor, ") and lines[1].endswith(": whole")
    damaged = run_folder / "actor" / "iter_0000020" / "__0_1.distcp"
    damaged.write_bytes(b"short")
    code, lines, _ = run("inspect", run_folder)
    assert code == 1 and lines[3].endswith(": 1 problem")
    assert lines[-1].startswith(f"problem: {damaged} has 5 bytes, ") and lines[-1].endswith(" were written")


def test_inspect_of_types_that_do_not_convert_counts_their_bytes(folders: tuple[Path, Path], run: Run) -> None:
    source = folders[0]
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].double()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    code, lines, _ = run("inspect", source)
    assert code == 1 and ["norm.weight", "F64", "[64]", "512", "bytes"] in [line.split() for line in lines]


def test_mark_of_the_latest_checkpoint_that_is_no_text_is_refused(folders: tuple[Path, Path], run: Run) -> None:
    (folders[1] / "latest_checkpointed_iteration.txt").write_bytes(b"\xff\xfe")
    code, _, errors = run("inspect", folders[1])
    assert code == 2 and "the checkpoint is incomplete" in errors
