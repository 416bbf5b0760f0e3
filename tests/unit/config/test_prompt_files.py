"""What is read of a folder, and folders that no one can have meant."""

from pathlib import Path

import pytest

from slime_ppo.config.prompt_files import prompt_files
from slime_ppo.errors import DataError


def _fill(folder: Path, *names: str) -> str:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return str(folder)


def _names(path: str) -> list[str]:
    return [Path(file).name for file in prompt_files(path, origin="--prompt-data")]


@pytest.mark.parametrize(
    "names",
    [
        ["p1.jsonl", "p2.jsonl", "p10.jsonl"],
        [f"train-{number:05}-of-00012.parquet" for number in range(12)],
        ["train-00000-of-00002-0a1b2c.parquet", "train-00001-of-00002-9f8e7d.parquet"],
        ["2023-part-2.jsonl", "2024-part-1.jsonl", "a.jsonl"],
        ["x-1-of-2.jsonl", "x-2-of-2.jsonl"],
        ["latest.jsonl", "trained.jsonl"],
    ],
)
def test_prompt_files_of_a_folder_are_its_shards_in_the_order_of_their_numbers(tmp_path: Path, names: list[str]) -> None:
    beside = [
        ".gitattributes",
        ".cache/huggingface/x.jsonl",
        "_SUCCESS",
        "README.md",
        "LICENSE",
        "dataset_infos.json",
        "old/o.jsonl",
    ]
    folder = _fill(tmp_path, *reversed(names), *beside)
    assert _names(folder) == names


def test_prompt_files_of_links_are_read_and_of_no_folder_are_itself(tmp_path: Path) -> None:
    """Hugging Face's cache is made of links."""
    _fill(tmp_path, "blobs/0a1b")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "a.parquet").symlink_to("../blobs/0a1b")
    assert _names(str(tmp_path / "snapshot")) == ["a.parquet"]
    assert prompt_files("nowhere.jsonl", origin="--prompt-data") == ("nowhere.jsonl",)
    (tmp_path / "blobs/0a1b").unlink()
    assert _names(str(tmp_path / "snapshot")) == ["a.parquet"], "one that leads nowhere is an error to whoever reads it"


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        ([], "holds no prompts: expected .parquet or .jsonl files in it. Subfolders"),
        (["data/train.jsonl", "README.md"], "holds no prompts"),
        (["a.csv"], r"holds no prompts: .*; it has a.csv"),
        (["a.jsonl", "b.parquet", "c.parquet"], "mixes formats: 2 .parquet files and 1 .jsonl files. Name one file"),
        (["a.jsonl", "b.jsonl.gz"], "holds b.jsonl.gz beside its 1 shards. Take away what is no shard"),
        (["train.parquet", "test.parquet"], r"holds several splits \(test, train\): test.parquet, train.parquet. Name one"),
        (["gsm8k-train-0.jsonl", "GSM8K_Test.jsonl"], r"holds several splits \(test, train\)"),
        (
            ["train-00000-of-00003.parquet", "train-00002-of-00003.parquet"],
            "has 2 of the 3 shards of 'train'; number 1 is missing. Copy the folder again",
        ),
    ],
)
def test_prompt_files_of_a_folder_that_is_no_data_set_are_refused(tmp_path: Path, names: list[str], problem: str) -> None:
    with pytest.raises(DataError, match=rf"prompt folder {tmp_path} \(--prompt-data\) {problem}"):
        prompt_files(_fill(tmp_path, *names), origin="--prompt-data")
