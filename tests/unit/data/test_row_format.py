from pathlib import Path
from typing import Any

import pytest

from slime_ppo.data.chat import load_chat_template
from slime_ppo.data.row import BrokenRow, RawRow
from slime_ppo.data.row_format import RowFormat
from tests.helpers.chat_templates import make_chat_tokenizer

SHOW = "{{ tools | tojson }}{% for m in messages %}[{{ m | tojson }}]{% endfor %}{% if add_generation_prompt %}>{% endif %}"
REFUSE = "{{ raise_exception('not so') }}"
HELLO = {"role": "user", "content": "hi"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"id": 1}]}


def row(content: object) -> RawRow:
    return RawRow(3, "p.jsonl:4", content)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> RowFormat:
    template = load_chat_template(make_chat_tokenizer(tmp_path_factory.mktemp("chat"), SHOW))
    return RowFormat("q", label_key="a", tool_key="t", chat_template=template)


def test_read_a_text_as_it_stands_and_the_rest_as_metadata() -> None:
    read = RowFormat("q", label_key="a").read(row({"q": " one ", "a": "1", "level": 3}))
    assert (read.index, read.text, read.label, read.metadata) == (3, " one ", "1", {"level": 3})


@pytest.mark.parametrize(
    ("value", "label"),
    [("x", "x"), (72, "72"), (-0.5, "-0.5"), (72.0, "72.0"), (10**30, str(10**30)), (1e-7, "0.0000001")],
)
def test_read_a_number_as_label_gives_its_text(value: object, label: str) -> None:
    assert RowFormat("q", label_key="a").read(row({"q": "one", "a": value})).label == label


@pytest.mark.parametrize("value", [True, None, float("nan"), float("inf"), [7], {"x": 1}])
def test_read_another_value_as_label_is_broken(value: object) -> None:
    with pytest.raises(BrokenRow, match=r"'a' \(--label-key\) is .*; expected a string or a number. Without --label-key it is"):
        RowFormat("q", label_key="a").read(row({"q": "one", "a": value}))


@pytest.mark.parametrize(
    ("given", "tools", "text"),
    [
        ("hi", None, 'null[{"role": "user", "content": "hi"}]>'),
        ([HELLO], [], 'null[{"role": "user", "content": "hi"}]>'),
        ([{"name": None, **HELLO}], [{"x": 1}], '[{"x": 1}][{"role": "user", "content": "hi"}]>'),
        ([HELLO, CALL, {"role": "tool", "content": "3"}], '[{"x": 1}]', '[{"x": 1}][{"role": "user", "content": "hi"}]'
         '[{"role": "assistant", "content": null, "tool_calls": [{"id": 1}]}][{"role": "tool", "content": "3"}]>'),
    ],
)  # fmt: skip
def test_read_messages_or_a_text_with_a_template(chat: RowFormat, given: object, tools: object, text: str) -> None:
    read = chat.read(row({"q": given, "t": tools, "a": "1", "more": 2}))
    assert (read.text, read.label, read.metadata) == (text, "1", {"more": 2})


def test_read_of_a_padded_row_shows_no_key_that_only_other_rows_have(chat: RowFormat) -> None:
    call = {"role": "assistant", "content": None, "name": None, "tool_calls": [{"id": None, "arguments": {"x": None, "y": [None]}}]}
    tools = [{"properties": {"x": None, "y": {"type": "int", "enum": [1, None]}}}]
    padded = RawRow(0, "p.parquet[0]", {"q": [call, HELLO], "t": tools, "a": "1", "more": {"x": None}}, is_padded=True)
    read = chat.read(padded)
    assert read.text == (
        '[{"properties": {"y": {"type": "int", "enum": [1, null]}}}][{"role": "assistant", "content": null, "tool_calls": '
        '[{"arguments": {"y": [null]}}]}][{"role": "user", "content": "hi"}]>'
    )
    assert read.metadata == {"more": {"x": None}}
    assert '"x": null' in chat.read(row(padded.content)).text, "in JSON Lines somebody has written it"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"q": [], "t": None}, r"'q' \(--input-key\) is \[\], a list; expected messages, or the text of a user's message"),
        ({"q": 5, "t": None}, r"'q' \(--input-key\) is 5, a int; expected messages"),
        ({"q": ["hi"], "t": None}, r"message 0 of 'q' .* is 'hi', a str; expected an object with role and content"),
        ({"q": [HELLO, {"content": "x"}], "t": None}, "message 1 of 'q' .*; expected an object with role and content"),
        ({"q": [HELLO, {"role": "user"}], "t": None}, r"message 1 of 'q' \(--input-key\) has no content"),
        ({"q": [HELLO, {"role": "assistant", "content": "x"}], "t": None}, "the last message of 'q' .* is the assistant's"),
        ({"q": [{"role": "user", "content": [{"type": "image"}]}], "t": None}, "message 0 of 'q' .* has a part that is no text"),
        ({"q": [{"role": "user", "content": ["hi"]}], "t": None}, "message 0 of 'q' .* has a part that is no text"),
        ({"q": "hi"}, r"no key 't' \(--tool-key\)"),
        ({f"k{index:02}": 1 for index in range(30)}, r"no key 'q' \(--input-key\); the line has .*'k18'\] and 11 more. Fix"),
        ({"q": "hi", "t": "["}, r"'t' \(--tool-key\) is a text that is no JSON"),
        ({"q": "hi", "t": ["x"]}, r"'t' \(--tool-key\) is \['x'\], a list; expected a list of JSON schemas"),
    ],
)
def test_read_messages_or_tools_of_another_form_are_broken(chat: RowFormat, content: dict[str, Any], problem: str) -> None:
    with pytest.raises(BrokenRow, match=problem):
        chat.read(row({"a": "1", **content}))


def test_read_what_the_template_refuses_is_broken(chat: RowFormat, tmp_path_factory: pytest.TempPathFactory) -> None:
    refusing = load_chat_template(make_chat_tokenizer(tmp_path_factory.mktemp("chat"), REFUSE))
    with pytest.raises(BrokenRow, match="the chat template of .* cannot render it: TemplateError: not so"):
        RowFormat("q", chat_template=refusing).read(row({"q": "hi"}))


def test_read_content_in_parts_needs_a_template_that_knows_them(tmp_path: Path) -> None:
    """One that does not would train on what Python shows of a list."""
    texts = "{% for m in messages %}{{ m.content | trim }}{% endfor %}"
    parts = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
    of_texts, of_parts = (
        RowFormat("q", chat_template=load_chat_template(make_chat_tokenizer(tmp_path / name, source)))
        for name, source in (("texts", texts), ("parts", parts))
    )
    given = row({"q": [HELLO, {"role": "user", "content": [{"type": "text", "text": "ho"}, {"type": "text", "text": "hi"}]}]})
    with pytest.raises(BrokenRow, match="the chat template takes the content of message 1 for a text, and it is a list"):
        of_texts.read(given)
    assert of_parts.read(given).text == "hohi"


def test_read_messages_without_a_template_are_broken() -> None:
    with pytest.raises(BrokenRow, match="a list; expected a string, or messages with --apply-chat-template"):
        RowFormat("q").read(row({"q": [HELLO]}))


def test_read_half_a_surrogate_pair_is_broken() -> None:
    with pytest.raises(BrokenRow, match=r"'q' \(--input-key\) is no text: surrogates not allowed"):
        RowFormat("q").read(row({"q": "a\ud800"}))
    with pytest.raises(BrokenRow, match=r"'a' \(--label-key\) is no text: surrogates not allowed"):
        RowFormat("q", label_key="a").read(row({"q": "a", "a": "\udc00"}))


def test_identity_depends_on_what_the_row_says_and_not_on_how_it_is_rendered(chat: RowFormat) -> None:
    content = {"q": "hi", "t": None, "a": "1", "more": "\ud800"}
    first = chat.read(row(content)).identity
    assert first == RowFormat("q", label_key="a", tool_key="t").read(row({"q": "hi", "a": "1", "more": "\ud800"})).identity
    others = [{"q": "ho"}, {"t": [{}]}, {"a": "2"}, {"more": "x"}]
    assert len({first, *(chat.read(row(content | other)).identity for other in others)}) == 5
