"""What the README shows must run."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_readme_example_of_ppo_utils_runs_and_its_loss_falls(capsys: pytest.CaptureFixture[str]) -> None:
    [example] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, object] = {}
    exec("import torch; torch.manual_seed(0)\n" + example, names)
    losses = [float(loss) for loss in re.findall(r"loss (-?\d+\.\d+)", capsys.readouterr().out)]
    assert len(losses) == 4 and losses[-1] < losses[0]
    advantages, mask = names["advantages"], names["mask"]
    assert advantages[~mask].tolist() == [0.0, 0.0]  # type: ignore[index, operator]


def test_readme_names_every_make_target_it_promises() -> None:
    promised = {"quickstart", "test", "lint", "format", "types", "bench", "bench-utils", "clean"}
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert promised <= targets


@pytest.mark.parametrize("engine", ["embedded", "sglang"])
def test_quickstart_takes_the_engine_from_the_environment_and_from_the_command_line(engine: str) -> None:
    for arguments, variables in (([f"ENGINE={engine}"], {}), ([], {"ENGINE": engine})):
        shown = subprocess.run(
            ["make", "--dry-run", "quickstart", *arguments],
            cwd=ROOT,
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            check=True,
        )
        assert f"--rollout-engine {engine}" in shown.stdout
