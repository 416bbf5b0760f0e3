"""The recipes pass --dry-run on the shapes of their models, and their comments hold what it prints."""

import sys
from pathlib import Path

import pytest

from slime_ppo.command import start
from slime_ppo.config.cli import PPO, parse_config
from slime_ppo.config.launcher import RankPlace
from tests.helpers.recipe_models import make_public_model

ROOT = Path(__file__).resolve().parents[3]
RECIPES = sorted(path for path in (ROOT / "configs").glob("*.yaml") if "/shared/" in path.read_text(encoding="utf-8"))


def test_recipes_are_these() -> None:
    assert [path.stem for path in RECIPES] == [
        "llama-3.1-8b_reward_model", "qwen2.5-0.5b_1gpu", "qwen3-30b-a3b_32gpu", "qwen3-4b_8gpu",
    ]  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipe_passes_the_dry_run_and_tells_its_plans(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = _local_paths(recipe, tmp_path)
    monkeypatch.setattr(sys, "argv", ["train_ppo.py", "--config", str(recipe), *flags, "--dry-run"])
    code = start(PPO, RankPlace())
    shown = capsys.readouterr()
    assert (code, shown.err) == (0, "")
    assert "Warnings" not in shown.out
    comments = [line.removeprefix("#").strip() for line in recipe.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    printed = [line.strip() for line in shown.out.splitlines()]
    memory, starts = printed.index("Memory per rank (activations and logits are rough)"), printed.index("Start")
    plans = printed[1 : printed.index("Placement")] + printed[memory + 1 : starts]
    assert printed[starts + 1].endswith("holds no checkpoint yet: the run starts at its beginning")
    explained = "rollout: a rank of a server", "on a GPU what"
    assert [line for line in plans if line and line not in comments and not line.startswith(explained)] == []
    submits = f"-- python scripts/train_ppo.py --config configs/{recipe.name}"
    assert any(line.startswith("ray job submit ") and line.endswith(submits) for line in comments)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipe_has_a_script_that_submits_it(recipe: Path) -> None:
    script = (ROOT / f"scripts/run_{recipe.stem}.sh").read_text(encoding="utf-8")
    assert script.endswith(f'/launch_ray.sh" submit -- --config configs/{recipe.name} "$@"\n')


def _local_paths(recipe: Path, folder: Path) -> list[str]:
    """Flags that put a model of the named shape, a prompt and a key where the recipe says /shared."""
    config = parse_config(["--config", str(recipe)]).config
    (folder / "prompts.jsonl").write_text('{"prompt": "2 + 2 =", "question": "2 + 2 =", "label": "4", "answer": "#### 4"}\n')
    assert config.checkpoint.load == config.run.save, "a job that is submitted again goes on"
    flags = ["--prompt-data", str(folder / "prompts.jsonl"), "--save", str(folder / "run"), "--load", str(folder / "run")]
    for flag, path in (("--hf-checkpoint", config.model.hf_checkpoint), ("--critic-load", config.critic.load)):
        if path is not None:
            flags += [flag, str(make_public_model(folder / flag, Path(path).name))]
    if config.sglang.api_key_file is not None:
        (folder / "key").write_text("only-a-test")
        flags += ["--sglang-api-key-file", str(folder / "key")]
    return flags
