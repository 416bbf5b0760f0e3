"""Chat templates, held against transformers' own rendering of the same template in the same folder."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from slime_ppo.data.chat import ChatTemplate, load_chat_template
from slime_ppo.data.tokenizer import TextTokenizer, load_tokenizer
from slime_ppo.errors import DataError
from tests.helpers.chat_templates import LLAMA_3, MISTRAL, QWEN, make_chat_tokenizer

USER = {"role": "user", "content": " How many are <3 & >1? é€🙂 "}
SYSTEM = {"role": "system", "content": " Be kind. "}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [2.5, "<é>", None]}}}],
}
TOOL_ANSWER = {"role": "tool", "name": "add", "content": "3"}
TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "Adds a & b <fast>", "parameters": {"a": {"type": "é"}}}},
    {"type": "function", "function": {"name": "pi", "description": "", "parameters": {}}},
]
TURNS = [SYSTEM, USER, {"role": "assistant", "content": "<think>\nhm\n</think>\n\n 2 "}, {"role": "user", "content": "Sure?"}]
CONVERSATIONS = {
    "one message": ([USER], None),
    "a system message and turns": (TURNS, None),
    "tools": ([SYSTEM, USER], TOOLS),
    "tools without a system message": ([USER], TOOLS),
    "a call and its answers": ([USER, CALL, TOOL_ANSWER, TOOL_ANSWER], TOOLS),
}
FAMILIES = {"llama 3": LLAMA_3, "qwen": QWEN, "mistral": MISTRAL}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_tokenizer(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> TextTokenizer:
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder))


def template(folder: Path, source: str, variables: Mapping[str, object] | None = None) -> ChatTemplate:
    file = folder / "given.jinja"
    file.write_text(source, encoding="utf-8")
    return load_chat_template(folder, file=str(file), variables=variables)


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_render_is_what_transformers_renders_and_its_tokens_too(
    folder: Path, tokenizer: TextTokenizer, theirs: Any, family: str, conversation: str
) -> None:
    messages, tools = CONVERSATIONS[conversation]
    if family == "mistral" and CALL in messages:
        messages = [USER]  # what a Mistral template does with calls is not in this small one
    for generation, variables in ((True, {}), (False, {}), (True, {"enable_thinking": False, "date_string": "2 Feb 2022"})):
        ours = template(folder, FAMILIES[family], variables).render(messages, tools, add_generation_prompt=generation)
        options = {"chat_template": FAMILIES[family], "tools": tools, "add_generation_prompt": generation} | variables
        assert ours == theirs.apply_chat_template(messages, tokenize=False, **options)
        assert tokenizer.encode(ours).tolist() == theirs.apply_chat_template(messages, return_dict=False, **options)


@pytest.mark.parametrize(
    ("family", "start", "end"),
    [
        ("llama 3", "<s><|start_header_id|>system", "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"),
        ("qwen", "<|im_start|>system\n Be kind. <|im_end|>\n", "Sure?<|im_end|>\n<|im_start|>assistant\n"),
        ("mistral", "<s>[INST]  How many", "[INST]  Be kind. \n\nSure?[/INST]"),
    ],
)
def test_render_begins_with_one_bos_and_ends_with_the_generation_prompt(
    folder: Path, tokenizer: TextTokenizer, family: str, start: str, end: str
) -> None:
    """The tokenizer puts a BOS in front of what it encodes, the template another: there must be one, or none where it has none."""
    text = template(folder, FAMILIES[family]).render(TURNS)
    assert text.startswith(start) and text.endswith(end)
    bos = tokenizer.backend.token_to_id("<s>")
    for ids in (tokenizer.encode(text), *tokenizer.encode_batch([text])):
        assert ids.tolist().count(bos) == (0 if family == "qwen" else 1)
    assert tokenizer.backend.encode("a").ids[0] == bos


def test_render_variables_reach_the_template(folder: Path) -> None:
    thinking = template(folder, QWEN).render([USER])
    assert template(folder, QWEN, {"enable_thinking": False}).render([USER]) == thinking + "<think>\n\n</think>\n\n"


def test_render_special_tokens_have_their_names(folder: Path, theirs: Any) -> None:
    source = "{{ bos_token }}|{{ eos_token }}|{{ image_token }}|{{ pad_token is defined }}|{{ add_bos_token is defined }}"
    assert template(folder, source).render([USER]) == "<s>|</s>|[INST]|False|False"
    assert theirs.apply_chat_template([USER], tokenize=False, chat_template=source) == "<s>|</s>|[INST]|False|False"


def test_render_special_tokens_of_an_older_folder(folder: Path, tmp_path: Path) -> None:
    older = make_chat_tokenizer(tmp_path / "older", "{{ bos_token }}{{ eos_token }}")
    (older / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "[INST]"}}), encoding="utf-8")
    assert load_chat_template(older).render([USER]) == "[INST]</s>"


@pytest.mark.parametrize(
    ("source", "messages", "problem"),
    [
        (MISTRAL, [USER, USER], "TemplateError: roles must alternate"),
        ("{{ messages[0].content + messages[0].nothing }}", [USER], "UndefinedError: .*no attribute 'nothing'"),
        ("{{ messages[0].content + 1 }}", [USER], "TypeError: "),
        ("{{ messages.append(1) }}", [USER], "SecurityError: "),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", [USER], "SecurityError: "),
    ],
)
def test_render_refused_by_the_template_says_why(folder: Path, source: str, messages: list[Any], problem: str) -> None:
    with pytest.raises(DataError, match=f"the chat template of .*given.jinja cannot render it: {problem}"):
        template(folder, source).render(messages)


def test_load_prefers_the_file_to_the_config_as_transformers_does(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = make_chat_tokenizer(tmp_path, "in the config")
    assert load_chat_template(folder).render([USER]) == "in the config"
    (folder / "chat_template.jinja").write_text("in the file", encoding="utf-8")
    assert load_chat_template(folder).render([USER]) == "in the file"
    assert AutoTokenizer.from_pretrained(str(folder)).apply_chat_template([USER], tokenize=False) == "in the file"


@pytest.mark.parametrize("place", ["config", "folder"])
def test_load_named_templates_takes_that_for_tools_where_there_are_tools(tmp_path: Path, place: str) -> None:
    named = {"default": "plain", "tool_use": "with tools"}
    listed = [{"name": name, "template": text} for name, text in named.items()]
    folder = make_chat_tokenizer(tmp_path, listed if place == "config" else None)
    if place == "folder":
        (folder / "additional_chat_templates").mkdir()
        (folder / "chat_template.jinja").write_text(named["default"], encoding="utf-8")
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(named["tool_use"], encoding="utf-8")
    loaded = load_chat_template(folder)
    assert (loaded.render([USER]), loaded.render([USER], TOOLS)) == ("plain", "with tools")


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (None, r"has no chat template \(chat_template.jinja, or chat_template in tokenizer_config.json\): found none. Give one"),
        ([{"name": "rag", "template": ""}], "found only templates named rag"),
        (5, "tokenizer_config.json: chat_template is a int, expected a text, or a list of objects with name and template"),
        ([{"name": "default"}], "chat_template is a list, expected a text, or a list"),
        ("{% if %}", "the chat template of .* is broken: line 1: Expected an expression"),
    ],
)
def test_load_without_a_usable_template_is_refused(tmp_path: Path, config: object, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        load_chat_template(make_chat_tokenizer(tmp_path, config))


def test_load_template_file_missing_is_refused(folder: Path) -> None:
    with pytest.raises(DataError, match="chat template .*nowhere.jinja cannot be read: .*Expected a Jinja file in UTF-8"):
        load_chat_template(folder, file=str(folder / "nowhere.jinja"))


def test_digest_changes_with_template_and_variables_but_not_with_the_day(folder: Path) -> None:
    first = template(folder, LLAMA_3)
    assert first.digest == template(folder, LLAMA_3).digest
    assert first.digest != template(folder, LLAMA_3 + " ").digest
    assert first.digest != template(folder, LLAMA_3, {"date_string": "1 Jan 2024"}).digest
