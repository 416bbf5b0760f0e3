import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slime_ppo.data.chat import load_chat_template
from slime_ppo.data.row_format import RowFormat
from slime_ppo.data.source import DataSource, PromptSource, RowPolicy
from slime_ppo.data.tokenizer import TextTokenizer, load_tokenizer
from slime_ppo.errors import DataError
from tests.helpers.chat_templates import LLAMA_3, make_chat_tokenizer
from tests.helpers.tiny_llama import make_tiny_llama


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return load_tokenizer(make_tiny_llama(tmp_path_factory.mktemp("model")))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Seven prompts "p0" ... "p6"."""
    return write(tmp_path, [json.dumps({"prompt": f"p{index}"}) for index in range(7)])


def write(folder: Path, lines: list[str]) -> Path:
    file = folder / "prompts.jsonl"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def source(file: Path | str, tokenizer: TextTokenizer, **changes: Any) -> PromptSource:
    options: dict[str, Any] = {"input_key": "prompt", "max_prompt_len": 100, "shuffle": True, "seed": 0} | changes
    row_format = RowFormat(**{name: options.pop(name) for name in ("input_key", "label_key", "chat_template") if name in options})
    policy = RowPolicy(
        **{name: options.pop(name) for name in ("max_prompt_len", "overlong_prompt", "broken_row") if name in options}
    )
    return PromptSource(str(file), tokenizer, row_format=row_format, policy=policy, **options)


def texts(data: DataSource, n: int) -> list[str]:
    return [prompt.text for prompt in data.next_prompts(n)]


def test_prompt_fields_come_from_the_line(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    file = write(tmp_path, ['{"q": "one", "a": "1", "level": 3, "tags": ["x"]}', '{"a": "2", "q": "two\u2028lines"}'])
    first, second = source(file, tokenizer, input_key="q", label_key="a", shuffle=False).next_prompts(2)
    assert (first.index, first.text, first.label, first.metadata) == (0, "one", "1", {"level": 3, "tags": ["x"]})
    assert first.token_ids.tolist() == tokenizer.encode("one").tolist()
    assert (second.index, second.text, second.label, second.metadata) == (1, "two\u2028lines", "2", {})


def test_label_key_unset_leaves_the_label_in_metadata(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    file = write(tmp_path, ['{"prompt": "one", "label": 7}'])
    (prompt,) = source(file, tokenizer).next_prompts(1)
    assert (prompt.label, prompt.metadata) == (None, {"label": 7})


def test_last_line_without_newline_and_carriage_returns_are_read(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b'{"prompt": "a"}\r\n{"prompt": "b"}')
    assert texts(source(file, tokenizer, shuffle=False), 2) == ["a", "b"]


def test_next_prompts_unshuffled_runs_over_epoch_ends(file: Path, tokenizer: TextTokenizer) -> None:
    data = source(file, tokenizer, shuffle=False)
    assert len(data) == 7
    assert texts(data, 3) + texts(data, 3) + texts(data, 10) == [f"p{index % 7}" for index in range(16)]


def test_next_prompts_shuffled_visits_each_once_per_epoch(file: Path, tokenizer: TextTokenizer) -> None:
    drawn = texts(source(file, tokenizer), 21)
    epochs = [drawn[:7], drawn[7:14], drawn[14:]]
    assert all(sorted(epoch) == [f"p{index}" for index in range(7)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_order_depends_on_the_seed_alone(file: Path, tokenizer: TextTokenizer) -> None:
    assert texts(source(file, tokenizer, seed=4), 14) == texts(source(file, tokenizer, seed=4), 14)
    assert texts(source(file, tokenizer, seed=4), 14) != texts(source(file, tokenizer, seed=5), 14)


@pytest.mark.parametrize("shuffle", [True, False])
def test_state_resumes_at_every_row(file: Path, tokenizer: TextTokenizer, shuffle: bool) -> None:
    whole = texts(source(file, tokenizer, shuffle=shuffle), 30)
    for drawn in range(16):
        first = source(file, tokenizer, shuffle=shuffle)
        first.next_prompts(drawn)
        state = json.loads(json.dumps(first.state_dict()))
        resumed = source(file, tokenizer, shuffle=shuffle)
        resumed.next_prompts(5)
        resumed.load_state_dict(state)
        assert texts(resumed, 14) == whole[drawn : drawn + 14]


def test_state_of_a_changed_file_is_refused(file: Path, tokenizer: TextTokenizer) -> None:
    state = source(file, tokenizer).state_dict()
    file.write_text(file.read_text(encoding="utf-8").replace("p3", "px"), encoding="utf-8")
    with pytest.raises(
        DataError, match=r"does not fit .*prompts.jsonl \(--prompt-data\): fingerprint was .* and is .* now. Resume"
    ):
        source(file, tokenizer).load_state_dict(state)


@pytest.mark.parametrize("change", [{"seed": 1}, {"shuffle": False}])
def test_state_of_another_order_is_refused(file: Path, tokenizer: TextTokenizer, change: dict[str, object]) -> None:
    with pytest.raises(DataError, match=f"{next(iter(change))} was .* when it was saved"):
        source(file, tokenizer, **change).load_state_dict(source(file, tokenizer).state_dict())


def test_state_of_another_limit_is_refused(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    file = write(tmp_path, ['{"prompt": "ab"}', '{"prompt": "abc"}'])
    state = source(file, tokenizer).state_dict()
    with pytest.raises(DataError, match="num_prompts was 2 when it was saved and is 1 now"):
        source(file, tokenizer, max_prompt_len=2, overlong_prompt="drop").load_state_dict(state)


def test_state_with_other_keys_is_refused(file: Path, tokenizer: TextTokenizer) -> None:
    with pytest.raises(DataError, match=r"has the keys \['epoch'\], expected"):
        source(file, tokenizer).load_state_dict({"epoch": 1})


@pytest.mark.parametrize("place", [{"epoch": -1}, {"position": 8}, {"position": "3"}])
def test_state_with_impossible_place_is_refused(file: Path, tokenizer: TextTokenizer, place: dict[str, object]) -> None:
    data = source(file, tokenizer)
    with pytest.raises(DataError, match="saved data state has epoch .*, position .*has 7 prompts"):
        data.load_state_dict(data.state_dict() | place)


def test_overlong_prompt_is_an_error_by_default(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    file = write(tmp_path, ['{"prompt": "abc"}', '{"prompt": "abcd"}', '{"prompt": "abcde"}'])
    with pytest.raises(
        DataError, match=r"prompts.jsonl:2: prompt of 4 tokens, the limit is 3 \(--rollout-max-prompt-len\); 2 of 3 "
    ):
        source(file, tokenizer, max_prompt_len=3)


def test_overlong_prompt_dropped_is_counted_and_rows_keep_their_index(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    file = write(tmp_path, ['{"prompt": "abcd"}', '{"prompt": "abc"}', '{"prompt": "abcde"}', '{"prompt": "x"}'])
    data = source(file, tokenizer, max_prompt_len=3, overlong_prompt="drop", shuffle=False)
    assert len(data) == 2
    assert data.left_out == (f"{file}: 2 prompts of more than 3 tokens left out, the first: {file}:1: prompt of 4 tokens",)
    assert [(prompt.index, prompt.text) for prompt in data.next_prompts(2)] == [(1, "abc"), (3, "x")]


def test_overlong_prompt_that_would_take_minutes_to_encode_is_not_encoded(
    tmp_path: Path, tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """50 MB took 16 GB of memory and four minutes. The block ends with it, and the rows around it are read as ever."""
    encoded: list[list[str]] = []
    encode = TextTokenizer.encode_batch
    monkeypatch.setattr(TextTokenizer, "encode_batch", lambda self, given: encoded.append(given) or encode(self, given))
    file = write(tmp_path, [json.dumps({"prompt": text}) for text in ("a", "b" * 10, "word " * 60_000, "c", "d" * 1281)])
    data = source(file, tokenizer, max_prompt_len=10, overlong_prompt="drop", shuffle=False)
    assert [(prompt.index, prompt.text) for prompt in data.next_prompts(3)] == [(0, "a"), (1, "b" * 10), (3, "c")]
    assert encoded == [["a", "b" * 10, ""], ["c", ""]]
    [line] = data.left_out
    assert line == f"{file}: 2 prompts of more than 10 tokens left out, the first: {file}:3: prompt of 300000 characters"


def test_overlong_prompts_all_dropped_is_an_error(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    file = write(tmp_path, ['{"prompt": "abcd"}'])
    with pytest.raises(DataError, match="all 1 prompts are longer than 3 tokens .* nothing is left"):
        source(file, tokenizer, max_prompt_len=3, overlong_prompt="drop")


def test_file_missing_is_refused(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    with pytest.raises(DataError, match=r"prompt file .*nowhere.jsonl \(--eval-prompt-data\) cannot be read: No such file"):
        source(tmp_path / "nowhere.jsonl", tokenizer, origin="--eval-prompt-data")


def test_file_empty_is_refused(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    file = tmp_path / "prompts.jsonl"
    file.touch()
    with pytest.raises(DataError, match=r"prompts.jsonl \(--prompt-data\) is empty; expected one JSON object per line"):
        source(file, tokenizer)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a"', r"prompts.jsonl:2: broken line, Expecting.*found b'{\"prompt\": \"a\"'"),
        ("", r"prompts.jsonl:2: blank line"),
        ('["a"]', r"prompts.jsonl:2: found a JSON list, expected an object with the key 'prompt'"),
        ('{"text": "a", "id": 1}', r"prompts.jsonl:2: no key 'prompt' \(--input-key\); the line has \['id', 'text'\]"),
        ('{"prompt": 5}', r"prompts.jsonl:2: 'prompt' \(--input-key\) is 5, a int; expected a string"),
        ('{"prompt": null}', r"prompts.jsonl:2: 'prompt' \(--input-key\) is None, a NoneType"),
        ('{"prompt": ""}', r"prompts.jsonl:2: prompt '' has no tokens"),
    ],
)
def test_line_bad_is_refused_with_its_number(tmp_path: Path, tokenizer: TextTokenizer, line: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        source(write(tmp_path, ['{"prompt": "fine"}', line, '{"prompt": "fine"}']), tokenizer)


def test_line_not_utf8_is_refused_with_its_number(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    with pytest.raises(DataError, match=r"prompts.jsonl:2: not UTF-8 \(byte 13 of the line\)"):
        source(file, tokenizer)


def test_label_missing_or_of_wrong_type_is_refused(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    with pytest.raises(DataError, match=r"prompts.jsonl:1: no key 'label' \(--label-key\)"):
        source(write(tmp_path, ['{"prompt": "a"}']), tokenizer, label_key="label")
    with pytest.raises(
        DataError, match=r"prompts.jsonl:1: 'label' \(--label-key\) is \[7\], a list; expected a string or a number"
    ):
        source(write(tmp_path, ['{"prompt": "a", "label": [7]}']), tokenizer, label_key="label")


def write_parquet(file: Path, rows: list[dict[str, object]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), file, row_group_size=3)
    return file


def test_parquet_draws_what_the_same_rows_as_json_lines_draw(file: Path, tokenizer: TextTokenizer, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    parquet = source(write_parquet(tmp_path / "p.parquet", lines), tokenizer)
    ours = source(file, tokenizer)
    assert [(p.index, p.text, p.token_ids.tolist()) for p in parquet.next_prompts(20)] == [
        (p.index, p.text, p.token_ids.tolist()) for p in ours.next_prompts(20)
    ]
    assert parquet.state_dict() == ours.state_dict()


def test_parquet_resumes_at_every_row_and_refuses_changed_rows(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    rows: list[dict[str, object]] = [{"prompt": f"p{index}", "level": index} for index in range(7)]
    file = write_parquet(tmp_path / "p.parquet", rows)
    whole = texts(source(file, tokenizer), 30)
    for drawn in range(16):
        first, resumed = source(file, tokenizer), source(file, tokenizer)
        first.next_prompts(drawn)
        resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert texts(resumed, 14) == whole[drawn : drawn + 14]
    state = source(file, tokenizer).state_dict()
    write_parquet(file, [*rows[:-1], {"prompt": "p6", "level": 7}])
    with pytest.raises(DataError, match=r"p.parquet \(--prompt-data\): fingerprint was"):
        source(file, tokenizer).load_state_dict(state)


def test_slice_draws_its_rows_alone_and_counts_them_as_the_file_does(file: Path, tokenizer: TextTokenizer) -> None:
    data = source(f"{file}@[2:5]", tokenizer)
    assert len(data) == 3
    assert sorted((prompt.index, prompt.text) for prompt in data.next_prompts(3)) == [(2, "p2"), (3, "p3"), (4, "p4")]


def test_slice_state_belongs_to_these_rows_whatever_comes_behind_them(file: Path, tokenizer: TextTokenizer) -> None:
    state = source(f"{file}@[:5]", tokenizer).state_dict()
    file.write_text(file.read_text(encoding="utf-8") + '{"prompt": "p7"}\n', encoding="utf-8")
    source(f"{file}@[:5]", tokenizer).load_state_dict(state)
    with pytest.raises(DataError, match="fingerprint was"):
        source(f"{file}@[1:6]", tokenizer).load_state_dict(state)


@pytest.mark.parametrize("part", ["@[3:3]", "@[7:]", "@[5:2]"])
def test_slice_without_a_row_is_refused(file: Path, tokenizer: TextTokenizer, part: str) -> None:
    with pytest.raises(DataError, match=r"\(--prompt-data\) names no row: the slice is empty, or the file has fewer rows"):
        source(f"{file}{part}", tokenizer)


BROKEN = ['{"prompt": "a"', "", "[]", '{"text": "a"}', '{"prompt": 5}', '{"prompt": ""}', '{"prompt": "\\ud800"}']


def test_broken_rows_are_skipped_and_counted_when_asked_for(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    file = write(tmp_path, ['{"prompt": "first"}', *BROKEN, '{"prompt": "last"}', '{"prompt": "too long"}'])
    data = source(file, tokenizer, broken_row="skip", max_prompt_len=5, overlong_prompt="drop", shuffle=False)
    assert [(prompt.index, prompt.text) for prompt in data.next_prompts(2)] == [(0, "first"), (8, "last")]
    overlong, broken = data.left_out
    assert overlong == f"{file}: 1 prompts of more than 5 tokens left out, the first: {file}:10: prompt of 8 tokens"
    assert broken.startswith(f"{file}: 7 broken rows left out, the first: {file}:2: broken line, ")


@pytest.mark.parametrize("line", BROKEN)
def test_broken_rows_end_the_run_by_default(tmp_path: Path, tokenizer: TextTokenizer, line: str) -> None:
    with pytest.raises(DataError, match=r"prompts.jsonl:2: "):
        source(write(tmp_path, ['{"prompt": "fine"}', line, '{"prompt": "fine"}']), tokenizer)


def test_broken_rows_alone_are_an_error_also_when_skipped(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    with pytest.raises(DataError, match="all 7 rows are broken and were left out .* nothing is left. The first: .*:1: broken line"):
        source(write(tmp_path, BROKEN), tokenizer, broken_row="skip")


def test_file_longer_than_a_block_is_read_whole(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    file = write(tmp_path, [f'{{"prompt": "{index}"}}' for index in range(1000)])
    assert texts(source(file, tokenizer, shuffle=False), 1000) == [str(index) for index in range(1000)]


@pytest.fixture(params=["jsonl", "parquet"])
def shards(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Rows p0 ... p6 in shards of 2, 0, 3 and 2, of which the last begins with a 10."""
    folder, form = tmp_path / "shards", request.param
    folder.mkdir()
    texts = [f"p{index}" for index in range(7)]
    for name, part in (("1", texts[:2]), ("2", []), ("9", texts[2:5]), ("10", texts[5:])):
        if form == "parquet":
            pq.write_table(pa.table({"prompt": pa.array(part, pa.string())}), folder / f"{name}.parquet")
        else:
            (folder / f"{name}.jsonl").write_text("".join(f'{{"prompt": "{text}"}}\n' for text in part), encoding="utf-8")
    return folder


@pytest.mark.parametrize("part", ["", "@[:4]", "@[3:]", "@[2:5]", "@[-3:-1]", "@[5:6]", "@[-99:]", "@[3:99999999999999999999]"])
def test_folder_of_shards_is_the_file_of_all_their_rows(file: Path, shards: Path, tokenizer: TextTokenizer, part: str) -> None:
    """Numbers, order, slices and the state that resumes: one may take the other's place."""
    whole, sharded = source(f"{file}{part}", tokenizer), source(f"{shards}{part}", tokenizer)
    drawn = [(prompt.index, prompt.text) for prompt in sharded.next_prompts(5)]
    assert drawn == [(prompt.index, prompt.text) for prompt in whole.next_prompts(5)]
    assert all(text == f"p{index}" for index, text in drawn)
    source(f"{shards}{part}", tokenizer).load_state_dict(whole.state_dict())


def test_folder_of_shards_names_the_shard_of_a_broken_row(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    for name, lines in (("a", ['{"prompt": "fine"}']), ("b", ['{"prompt": "fine"}', "{"])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(DataError, match="b.jsonl:2: broken line"):
        source(tmp_path, tokenizer)


def test_draw_over_an_epoch_end_and_several_epochs_takes_each_prompt_once_an_epoch(file: Path, tokenizer: TextTokenizer) -> None:
    """Batches of 4 of 7 rows; and one of 30, more than four epochs."""
    batches, whole = source(file, tokenizer), source(file, tokenizer)
    drawn = [text for _ in range(7) for text in texts(batches, 4)]
    assert drawn == texts(whole, 30)[:28]
    assert all(sorted(drawn[start : start + 7]) == [f"p{index}" for index in range(7)] for start in range(0, 28, 7))


def test_chat_prompts_are_rendered_and_resume_with_the_same_template_alone(tmp_path: Path) -> None:
    """Also on another day than the one the run began, which the template writes down."""
    folder = make_chat_tokenizer(tmp_path / "model", LLAMA_3)
    (folder / "config.json").write_text('{"eos_token_id": 1}', encoding="utf-8")
    chat = load_tokenizer(folder)
    file = write(tmp_path, ['{"prompt": "hi"}', '{"prompt": [{"role": "user", "content": "ho"}]}'])
    first = source(file, chat, chat_template=load_chat_template(folder), shuffle=False)
    for prompt, said in zip(first.next_prompts(2), ("hi", "ho"), strict=True):
        assert prompt.text.endswith(f"{said}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n")
        assert prompt.token_ids.tolist() == chat.encode(prompt.text).tolist()
    state = first.state_dict()
    tomorrow = load_chat_template(folder)
    for compiled in tomorrow._compiled.values():
        compiled.globals["strftime_now"] = lambda form: "tomorrow"
    resumed = source(file, chat, chat_template=tomorrow, shuffle=False)
    resumed.load_state_dict(state)
    assert "Today: tomorrow" in resumed.next_prompts(1)[0].text
    with pytest.raises(DataError, match="chat_template was '.*' when it was saved and is '.*' now"):
        other = load_chat_template(folder, variables={"date_string": "1 Jan 2024"})
        source(file, chat, chat_template=other, shuffle=False).load_state_dict(state)
