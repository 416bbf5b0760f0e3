"""What --dry-run reads, says and refuses: what the run would, and nothing is written."""

import sys
from pathlib import Path

import pytest

from slime_ppo.command import start
from slime_ppo.config.cli import PPO, parse_config
from slime_ppo.config.launcher import RankPlace
from slime_ppo.inputs import read_inputs
from tests.helpers.saved_runs import make_saver, progress_after
from tests.helpers.tiny_llama import make_tiny_llama


class DryRun:
    """`scripts/train_ppo.py --dry-run` in this process, with a model and prompts of its own."""

    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.home, self._monkeypatch, self._capsys = home, monkeypatch, capsys
        self.model = make_tiny_llama(home / "model")
        self.prompts = home / "prompts.jsonl"
        self.prompts.write_text('{"prompt": "a"}\n' * 8, encoding="utf-8")

    def flags(self, *further: str) -> list[str]:
        given = {"hf-checkpoint": self.model, "prompt-data": self.prompts, "save": self.home / "run", "init-value-head": "zeros"}
        given |= {"num-rollout": 10, "rollout-batch-size": 8, "n-samples-per-prompt": 1, "global-batch-size": 8}
        given |= {"rollout-max-prompt-len": 8, "rollout-max-response-len": 8, "launcher": "local", "rm-type": "vader"}
        return [word for name, value in given.items() for word in (f"--{name}", str(value))] + list(further)

    def save_checkpoint(self, rollout_id: int) -> None:
        """As a run leaves it that was killed afterwards."""
        config = parse_config(self.flags()).config
        inputs = read_inputs(config, returns_support=True)
        saver = make_saver(config, shapes=inputs.shapes.by_role)
        saver.save(progress_after(config, rollout_id, prompts=inputs.prompts.state_dict()))

    def __call__(self, *further: str) -> tuple[int, str]:
        """(exit code, what is printed under Start, or the error); nothing on disk has changed."""
        before = self._on_disk()
        self._monkeypatch.setattr(sys, "argv", ["train_ppo.py", *self.flags(*further), "--dry-run"])
        code = start(PPO, RankPlace())
        shown = self._capsys.readouterr()
        assert self._on_disk() == before
        return code, shown.err or shown.out.partition("\nStart\n")[2].partition("\n\n")[0]

    def _on_disk(self) -> dict[Path, int]:
        return {path: 0 if path.is_dir() else path.stat().st_mtime_ns for path in self.home.rglob("*")}


@pytest.fixture
def dry_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> DryRun:
    return DryRun(tmp_path, monkeypatch, capsys)


def test_dry_run_says_where_the_run_would_start(dry_run: DryRun) -> None:
    run = dry_run.home / "run"
    assert dry_run() == (0, f"  the run starts at its beginning, with the weights of {dry_run.model}\n")
    assert dry_run("--load", str(run)) == (0, f"  --load {run} holds no checkpoint yet: the run starts at its beginning\n")
    code, said = dry_run("--load", str(dry_run.model))
    assert code == 0 and said.startswith(f"  --load {dry_run.model} is a Hugging Face folder: its weights only, for the actor;")
    dry_run.save_checkpoint(4)
    code, said = dry_run("--load", str(run), "--lr", "0.25")
    assert code == 0 and said.startswith(f"  resumed from {run} after 4 of 10 rollouts\n  --lr was ")


def test_dry_run_refuses_what_the_run_would_refuse(dry_run: DryRun) -> None:
    run = str(dry_run.home / "run")
    dry_run.save_checkpoint(4)
    assert "already holds a run (run_state.json)" in dry_run()[1]
    assert "nothing is left to do" in dry_run("--load", run, "--num-rollout", "4")[1]
    assert "expected a run folder with a complete checkpoint" in dry_run("--load", f"{run}/nowhere", "--save", f"{run}-2")[1]
    critics = ("--save", f"{run}-2", "--critic-save", f"{run}/critic")
    assert "critic already holds checkpoints (iter_0000004) of run run-1" in dry_run(*critics)[1]
    dumps = ("--debug-train-only", "--load-debug-rollout-data", f"{run}/dumps")
    assert "no file of rollout 4" in dry_run("--load", run, *dumps)[1]
    (Path(run) / "critic" / "iter_0000004" / "__0_0.distcp").unlink()
    code, said = dry_run("--load", run)
    assert code == 2 and "the checkpoint after 4 rollouts" in said and "is damaged" in said
    dry_run.prompts.write_text('{"prompt": 3}\n', encoding="utf-8")
    assert "prompts.jsonl:1: 'prompt' (--input-key) is 3" in dry_run("--save", f"{run}-2")[1]


def test_dry_run_asks_no_reward_server_and_knows_the_names(dry_run: DryRun) -> None:
    served = ("--rm-type", "reward_model", "--rm-url", "http://127.0.0.1:9")
    assert dry_run(*served)[0] == 0
    code, said = dry_run("--rm-type", "maths")
    assert code == 2 and "math" in said


def test_run_that_overwrites_another_may_delete_its_checkpoints(dry_run: DryRun) -> None:
    dry_run.save_checkpoint(4)
    plan = read_inputs(parse_config(dry_run.flags("--overwrite")).config, returns_support=True).save_plan
    assert plan is not None and plan.replaced_runs == {"run-1"}
