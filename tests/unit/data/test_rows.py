"""Both file formats give the same rows: all of them or a slice, in memory a part at a time."""

import gzip
import json
import subprocess
import sys
from datetime import date
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slime_ppo.config.prompt_path import PromptPath
from slime_ppo.data import rows_jsonl
from slime_ppo.data.row import RawRow
from slime_ppo.data.rows import read_rows
from slime_ppo.errors import DataError

MESSAGES = [{"role": "user", "content": "hi"}]


def read(path: str) -> list[RawRow]:
    return list(read_rows(PromptPath.parse(path), origin="--prompt-data"))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The same ten rows, in parquet as row groups of 4, 4 and 2."""
    folder = tmp_path_factory.mktemp("rows")
    rows = [{"prompt": f"p{index}", "level": index} for index in range(10)]
    (folder / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    pq.write_table(pa.Table.from_pylist(rows), folder / "p.parquet", row_group_size=4)
    return {"jsonl": f"{folder}/p.jsonl", "parquet": f"{folder}/p.parquet"}


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    "part", ["", "@[3:5]", "@[:4]", "@[4:]", "@[2:9]", "@[-3:]", "@[:-9]", "@[-7:-5]", "@[8:99]", "@[5:5]", "@[99:]"]
)
def test_read_rows_of_a_slice_keep_their_number_in_the_file(files: dict[str, str], form: str, part: str) -> None:
    path = PromptPath.parse(files[form] + part)
    rows = read(files[form] + part)
    assert [row.index for row in rows] == list(path.rows(10))
    assert [row.content for row in rows] == [{"prompt": f"p{row.index}", "level": row.index} for row in rows]
    assert all(row.is_padded == (form == "parquet") for row in rows)
    places = {"jsonl": "{file}:{line}", "parquet": "{file}[{index}]"}
    assert [row.place for row in rows] == [places[form].format(file=path.file, line=row.index + 1, index=row.index) for row in rows]


def test_read_rows_in_several_batches_counts_on(tmp_path: Path) -> None:
    file = tmp_path / "p.parquet"
    pq.write_table(pa.table({"prompt": [str(index) for index in range(1000)]}), file, row_group_size=600)
    rows = read(f"{file}@[250:990]")
    assert [(row.index, row.content) for row in rows] == [(index, {"prompt": str(index)}) for index in range(250, 990)]


def test_parquet_values_become_what_json_has_and_bytes_are_not_read(tmp_path: Path) -> None:
    table = pa.table(
        {
            "chat": pa.array([MESSAGES], pa.list_(pa.struct({name: pa.string() for name in ("role", "content", "name")}))),
            "day": pa.array([date(2024, 2, 3)]),
            "price": pa.array([Decimal("1.50")]),
            "image": pa.array([{"bytes": b"\x00", "path": "x"}]),
            "raw": pa.array([b"\x00"]),
            "kind": pa.array(["a"]).dictionary_encode(),
            "map": pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64())),
            "nothing": pa.array([None], pa.string()),
            "share": pa.array([0.5]),
        }
    )  # fmt: skip
    pq.write_table(table, tmp_path / "p.parquet")
    [row] = read(str(tmp_path / "p.parquet"))
    assert row.content == {
        "chat": [{"role": "user", "content": "hi", "name": None}],
        "day": "2024-02-03", "price": "1.50", "kind": "a", "map": {"k": 1}, "nothing": None, "share": 0.5,
    }  # fmt: skip


@pytest.mark.parametrize("kept", [0, 3, 200])
def test_parquet_file_that_is_none_or_cut_is_refused(tmp_path: Path, files: dict[str, str], kept: int) -> None:
    file = tmp_path / "p.parquet"
    file.write_bytes(Path(files["parquet"]).read_bytes()[:kept])
    with pytest.raises(
        DataError, match=r"prompt file .*p.parquet \(--prompt-data\) is no parquet file that can be read: .*Copy it"
    ):
        read(str(file))


def test_parquet_file_with_a_damaged_page_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "p.parquet"
    pq.write_table(pa.table({"prompt": [f"text {index}" * 50 for index in range(1000)]}), file, compression="zstd")
    content = bytearray(file.read_bytes())
    content[100:400] = b"\xff" * 300
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"prompt file .*p.parquet \(--prompt-data\) (is no parquet file that can|cannot) be read"):
        read(str(file))


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (pa.array([b"ok", b"a\xff"]).view(pa.string()), "can't decode byte 0xff"),
        (pa.array([1000, 1001], pa.timestamp("ns")), "Nanosecond"),
        (pa.array([0, 10_000_000], pa.date32()), "out of range"),
    ],
)
def test_parquet_value_that_python_cannot_hold_breaks_its_row_alone(tmp_path: Path, values: pa.Array, reason: str) -> None:
    pq.write_table(pa.table({"prompt": ["a", "b"], "value": values}), tmp_path / "p.parquet")
    whole, broken = read(str(tmp_path / "p.parquet"))
    assert isinstance(whole.content, dict) and whole.content["prompt"] == "a" and not whole.problem
    assert (broken.index, broken.place, broken.content) == (1, f"{tmp_path}/p.parquet[1]", None) and reason in broken.problem


@pytest.mark.parametrize("part", ["", "@[-1:]"])
@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_shard_that_leads_nowhere_is_refused_by_its_name(tmp_path: Path, files: dict[str, str], form: str, part: str) -> None:
    (tmp_path / f"a.{form}").symlink_to(files[form])
    (tmp_path / f"b.{form}").symlink_to("gone")
    with pytest.raises(DataError, match=rf"prompt file .*/b.{form} \(--prompt-data\) cannot be read: .*No such file"):
        read(f"{tmp_path}{part}")


@pytest.mark.parametrize("name", ["nowhere.jsonl", "nowhere.parquet"])
def test_file_missing_is_refused_with_its_flag(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=rf"prompt file .*{name} \(--prompt-data\) cannot be read: .*No such file"):
        read(str(tmp_path / name))


def test_jsonl_line_that_never_ends_is_refused_before_it_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_jsonl, "_LONGEST_LINE_BYTES", 40)
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n[' + '{"prompt": "a"},' * 10, encoding="utf-8")
    with pytest.raises(DataError, match="p.jsonl:2: a line of more than 40 bytes. Expected JSON Lines.*single JSON array"):
        read(str(tmp_path / "p.jsonl"))


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b'\xef\xbb\xbf{"a": 1}\n{"a": 2}\n', [{"a": 1}, {"a": 2}]),
        (b'{"a": 1}\r\n{"a": 2}\r\n\r\n', [{"a": 1}, {"a": 2}]),
        (b'{"a": 1}\n\n \t\n\n', [{"a": 1}]),
        (b"\n\n", []),
        (b"\xef\xbb\xbf", []),
        (b'{"a": "x\\u0000y"}', [{"a": "x\0y"}]),
    ],
)
def test_jsonl_as_editors_leave_it_behind_is_read(tmp_path: Path, content: bytes, found: list[object]) -> None:
    """A byte order mark, Windows line ends, blank lines behind the last row, which do not count from the end either."""
    (tmp_path / "p.jsonl").write_bytes(content)
    rows = read(f"{tmp_path}/p.jsonl")
    assert ([row.content for row in rows], [row.problem for row in rows]) == (found, [""] * len(found))
    assert [row.content for row in read(f"{tmp_path}/p.jsonl@[-1:]")] == found[-1:]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"prompt": "a", "x": {"k": 1, "k": 2}}', "the key 'k' stands twice in one object"),
        (b"\0" * 20, "broken line, Expecting value"),
        (b'{"prompt": "\0"}', "Invalid control character"),
        (b"\xef\xbb\xbf{}", "Unexpected UTF-8 BOM"),
        (b"", "blank line; expected one JSON object per line"),
    ],
)
def test_jsonl_line_that_does_not_say_one_thing_is_a_broken_row(tmp_path: Path, line: bytes, problem: str) -> None:
    (tmp_path / "p.jsonl").write_bytes(b'{"prompt": "a"}\n' + line + b'\n{"prompt": "b"}')
    first, broken, last = read(f"{tmp_path}/p.jsonl")
    assert (first.problem, broken.content, broken.place, last.content) == ("", None, f"{tmp_path}/p.jsonl:2", {"prompt": "b"})
    assert problem in broken.problem


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (gzip.compress(b'{"prompt": "a"}'), "compressed by gzip"),
        ('{"prompt": "a"}'.encode("utf-16"), "text in UTF-16"),
        (b"PAR1....PAR1", "a parquet file whose name does not end in .parquet"),
    ],
)
def test_file_of_another_kind_is_refused_as_such(tmp_path: Path, content: bytes, what: str) -> None:
    (tmp_path / "p").write_bytes(content)
    with pytest.raises(DataError, match=rf"prompt file {tmp_path}/p \(--prompt-data\) is {what}. Expected JSON Lines in UTF-8"):
        read(f"{tmp_path}/p")


@pytest.mark.parametrize("line", ["[" * 100_000, "1" * 10_000])
def test_jsonl_line_that_python_cannot_parse_is_a_broken_row(tmp_path: Path, line: str) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": ' + line + "\n", encoding="utf-8")
    [row] = read(str(tmp_path / "p.jsonl"))
    assert row.problem.startswith("broken line, ") and row.content is None


MEASURE = """
import re, sys
from tokenizers import Tokenizer, models
from slime_ppo.data.row_format import RowFormat
from slime_ppo.data.source import PromptSource, RowPolicy
from slime_ppo.data.tokenizer import TextTokenizer

tokenizer = TextTokenizer(None, (0,), 1, Tokenizer(models.WordLevel({"?": 0}, unk_token="?")))
def load(path):
    source = PromptSource(path, tokenizer, row_format=RowFormat("prompt"), policy=RowPolicy(200), shuffle=True, seed=0)
    assert [len(prompt.text) for prompt in source.next_prompts(100)] == [20_000] * 100
    # ru_maxrss would begin with the parent's
    return len(source), int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]) // 1024
for form in ("jsonl", "parquet"):
    print(*load(f"{sys.argv[1]}/600.{form}"), *load(f"{sys.argv[1]}/3000.{form}"))
"""


def test_source_of_a_large_file_takes_no_more_memory_than_of_a_small_one(tmp_path: Path) -> None:
    """3,000 rows of 20 kB, 60 MB, after a file of 600, which come in three blocks; parquet as a single row group."""
    for num_rows in (600, 3000):
        texts = [f"{index:09} " * 2000 for index in range(num_rows)]
        lines = (f'{{"prompt": "{text}"}}\n' for text in texts)
        (tmp_path / f"{num_rows}.jsonl").write_text("".join(lines), encoding="utf-8")
        table = pa.table({"prompt": texts})
        pq.write_table(table, tmp_path / f"{num_rows}.parquet", compression="none", use_dictionary=False)
    command = [sys.executable, "-c", MEASURE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        some, before, rows, after = map(int, line.split())
        assert (some, rows) == (600, 3000)
        assert after - before < 50, f"{after - before} MB more"
