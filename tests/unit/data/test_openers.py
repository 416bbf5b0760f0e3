"""The prompt files of the quickstart: neutral, readable by its model, and without overlap."""

import json
from pathlib import Path

import pytest
from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

from slime_ppo.data.tokenizer import TextTokenizer, load_tokenizer
from tools.convert_glass_to_hf import convert

FOLDER = Path(__file__).parents[3] / "configs" / "data"
UNK_ID = 1


def prompts(name: str) -> list[str]:
    rows = [json.loads(line) for line in (FOLDER / name).read_text(encoding="utf-8").splitlines()]
    assert all(list(row) == ["prompt"] for row in rows)
    return [row["prompt"] for row in rows]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    folder = tmp_path_factory.mktemp("models") / "glass-en"
    convert(folder, force=False)
    return load_tokenizer(folder)


@pytest.mark.parametrize(("name", "fewest"), [("openers_train.jsonl", 110), ("openers_heldout.jsonl", 64)])
def test_openers_are_neutral_and_short(name: str, fewest: int, tokenizer: TextTokenizer) -> None:
    analyzer = SentimentIntensityAnalyzer()
    texts = prompts(name)
    assert len(texts) >= fewest
    assert [text for text in texts if analyzer.polarity_scores(text)["compound"] != 0.0] == []
    assert [text for text in texts if UNK_ID in tokenizer.encode(text)] == []
    assert [text for text in texts if len(tokenizer.encode(text)) > 16] == []
    assert [text for text in texts if not 4 <= len(text.split()) <= 6] == []


def test_openers_none_is_written_twice() -> None:
    texts = prompts("openers_train.jsonl") + prompts("openers_heldout.jsonl")
    assert len({text.lower() for text in texts}) == len(texts)
