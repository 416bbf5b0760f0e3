"""What the README shows must run."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_readme_example_of_ppo_utils_runs_and_gives_a_gradient() -> None:
    [example] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, object] = {}
    exec(example, names)
    gradient = names["log_probs"].grad  # type: ignore[attr-defined]
    # ratio 1: the gradient is -A / trainable tokens, and 0 at the masked token
    assert gradient[:4].tolist() == (-names["advantages"][:4] / 4).tolist()  # type: ignore[index]
    assert gradient[4] == 0


def test_readme_names_every_make_target_it_promises() -> None:
    promised = {"quickstart", "test", "lint", "format", "types", "bench", "clean"}
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert promised <= targets
