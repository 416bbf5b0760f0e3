import pytest

from slime_ppo.config.prompt_path import PromptPath


@pytest.mark.parametrize(
    ("text", "file", "rows"),
    [
        ("p.jsonl", "p.jsonl", [0, 1, 2, 3, 4]),
        ("p.jsonl@[1:3]", "p.jsonl", [1, 2]),
        ("a@b/p.jsonl@[:2]", "a@b/p.jsonl", [0, 1]),
        ("p.jsonl@[3:]", "p.jsonl", [3, 4]),
        ("p.jsonl@[-2:]", "p.jsonl", [3, 4]),
        ("p.jsonl@[:-2]", "p.jsonl", [0, 1, 2]),
        ("p.jsonl@[:]", "p.jsonl", [0, 1, 2, 3, 4]),
        ("p.jsonl@[3:99]", "p.jsonl", [3, 4]),
        ("p.jsonl@[4:2]", "p.jsonl", []),
        ("p@file[1].jsonl", "p@file[1].jsonl", [0, 1, 2, 3, 4]),
    ],
)
def test_parse_gives_file_and_rows_as_a_python_slice(text: str, file: str, rows: list[int]) -> None:
    path = PromptPath.parse(text)
    assert (path.file, list(path.rows(5))) == (file, rows)


def test_counts_from_end_only_where_the_number_of_rows_matters() -> None:
    texts = ("p@[-2:]", "p@[:-1]", "p@[1:2]", "p@[:]", "p")
    assert [PromptPath.parse(text).counts_from_end for text in texts] == [True, True, False, False, False]


@pytest.mark.parametrize("text", ["p.jsonl@[1]", "p.jsonl@[1:2:3]", "p.jsonl@[a:b]", "p.jsonl@[1:2", "@[1:2]", "p@[1.5:]"])
def test_parse_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no path@\[start:end\] with two whole numbers"):
        PromptPath.parse(text)
