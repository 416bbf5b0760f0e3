import re
from pathlib import Path

import numpy as np
import pytest

from slime_ppo.data.row_format import RowFormat
from slime_ppo.data.source import PromptSource, RowPolicy
from slime_ppo.data.tokenizer import load_tokenizer
from slime_ppo.rewards.base import RewardInput
from slime_ppo.rewards.math import MathReward
from slime_ppo.types.sample import FinishReason
from tests.helpers.tiny_llama import make_tiny_llama
from tools import make_word_problems as tool


def test_rows_every_step_is_right_and_the_last_one_is_the_answer() -> None:
    operations = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "x": lambda a, b: a * b, "/": lambda a, b: a / b}
    rows = list(tool.problems(400, seed=3))
    assert len({row["question"] for row in rows}) == 400
    for row in rows:
        steps, answer = row["answer"].split("\n#### ")
        found = re.findall(r"(\d+) ([-+x/]) (\d+) = (\d+)", steps)
        assert len(found) >= 2
        assert [operations[sign](int(a), int(b)) == int(c) for a, sign, b, c in found] == [True] * len(found), row
        assert found[-1][3] == answer and int(answer) >= 0
        assert {found[0][0], found[0][2]} - {"2"} <= set(re.findall(r"\d+", row["question"]))


def test_rows_depend_on_the_seed_alone() -> None:
    assert list(tool.problems(20, seed=1)) == list(tool.problems(20, seed=1))
    assert list(tool.problems(20, seed=1)) != list(tool.problems(20, seed=2))


def test_file_is_read_as_prompts_whose_labels_the_math_reward_understands(tmp_path: Path) -> None:
    out = tmp_path / "made" / "sums.jsonl"
    assert tool.main([str(out), "--rows", "12"]) == 0
    source = PromptSource(
        f"{out}@[4:]", load_tokenizer(make_tiny_llama(tmp_path / "model")), row_format=RowFormat("question", "answer"),
        policy=RowPolicy(1000), shuffle=False, seed=0,
    )  # fmt: skip
    one = np.ones(1, np.int32)
    right = [prompt.label.split("#### ")[1] for prompt in source.prompts if prompt.label]
    inputs = [
        RewardInput(prompt.index, prompt.text, f"I say \\boxed{{{said}}}", prompt.label, {}, FinishReason.STOP, one, one)
        for prompt, said in zip(source.prompts, [*right[:-1], "-1"], strict=True)
    ]
    assert MathReward()(inputs) == [1.0] * 7 + [0.0]


def test_file_that_exists_is_kept_unless_forced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "sums.jsonl"
    out.write_text("mine")
    assert tool.main([str(out)]) == 1
    assert "exists; choose another name, or replace it with --force" in capsys.readouterr().err
    assert out.read_text() == "mine"
    assert tool.main([str(out), "--force", "--rows", "3"]) == 0
    assert len(out.read_text().splitlines()) == 3
    assert [file.name for file in tmp_path.iterdir()] == ["sums.jsonl"]


def test_dry_run_shows_a_row_of_each_kind_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main([str(tmp_path / "sums.jsonl"), "--dry-run"]) == 0
    assert capsys.readouterr().out.count('"question"') == 4
    assert list(tmp_path.iterdir()) == []


def test_rows_out_of_bounds_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tool.main([str(tmp_path / "sums.jsonl"), "--rows", "0"])
    assert "--rows 0: expected 1 to 100000" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
