"""Chat templates: messages to the text a chat model was trained on, rendered as transformers renders them, without it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from slime_ppo.data.tokenizer import read_json
from slime_ppo.errors import DataError

# where transformers looks, in this order; named templates lie in the folder
_FILE = "chat_template.jinja"
_FOLDER = "additional_chat_templates"
_CONFIG = "tokenizer_config.json"
# the template of this name is taken for prompts with tools
_WITH_TOOLS = "tool_use"
_DEFAULT = "default"


@dataclass(frozen=True)
class ChatTemplate:
    """The chat template of one model.

    `sources` are the texts of its templates by name ("default", and perhaps "tool_use"), `variables` what every rendering gets:
    the special tokens by name and what --apply-chat-template-kwargs says. `origin` is where it came from, for messages.
    """

    sources: Mapping[str, str]
    variables: Mapping[str, object]
    origin: str
    _compiled: Mapping[str, jinja2.Template] = field(repr=False, compare=False)

    def render(
        self, messages: Sequence[Mapping[str, object]], tools: Sequence[object] | None = None, *, add_generation_prompt: bool = True
    ) -> str:
        """The text of a conversation, with the beginning of the answer unless `add_generation_prompt` is off.

        It holds the special tokens that the model expects: encode it without adding any (`TextTokenizer.encode`), or the first
        one would be there twice. Raises DataError when the template refuses the messages.
        """
        template = self._compiled[_WITH_TOOLS if tools is not None and _WITH_TOOLS in self._compiled else _DEFAULT]
        given = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": add_generation_prompt}
        try:
            return template.render(**{**given, **self.variables})
        except Exception as error:  # templates fail with whatever their expressions raise
            raise DataError(f"the chat template of {self.origin} cannot render it: {type(error).__name__}: {error}") from error

    @property
    def digest(self) -> str:
        """sha256 of templates and variables: the same where the same messages give the same text, but for a date."""
        return sha256(json.dumps([dict(self.sources), dict(self.variables)], sort_keys=True).encode()).hexdigest()


def load_chat_template(
    folder: str | Path, *, file: str | None = None, variables: Mapping[str, object] | None = None
) -> ChatTemplate:
    """The chat template of a model folder, or the one in `file` with that folder's special tokens.

    In the folder it is chat_template.jinja (beside it, named ones in additional_chat_templates), or else "chat_template" in
    tokenizer_config.json, a text or a list of named ones. `variables` are handed to every rendering. Raises DataError when there
    is none or its syntax is wrong, CheckpointError for a file that is no JSON.
    """
    folder = Path(folder)
    config = read_json(folder / _CONFIG)
    if file is None:
        sources, origin = _sources(folder, config), str(folder)
    else:
        sources, origin = {_DEFAULT: _read_text(Path(file))}, file
    if _DEFAULT not in sources:
        found = f"only templates named {', '.join(sorted(sources))}" if sources else "none"
        raise DataError(
            f"model folder {folder} has no chat template ({_FILE}, or chat_template in {_CONFIG}): found {found}. Give one as "
            "--chat-template, or leave out --apply-chat-template for a model that is no chat model"
        )
    compiled = {name: _compile(source, origin) for name, source in sources.items()}
    return ChatTemplate(sources, {**_special_tokens(folder, config), **(variables or {})}, origin, compiled)


def _sources(folder: Path, config: Mapping[str, object]) -> dict[str, str]:
    files = {path.stem: path for path in sorted((folder / _FOLDER).glob("*.jinja"))}
    if (folder / _FILE).is_file():
        files[_DEFAULT] = folder / _FILE
    if files:
        return {name: _read_text(path) for name, path in files.items()}
    value = config.get("chat_template")
    if value is None:
        return {}
    if isinstance(value, str):
        return {_DEFAULT: value}
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in _list(value)}
    except (TypeError, KeyError) as error:
        raise DataError(
            f"{folder / _CONFIG}: chat_template is a {type(value).__name__}, expected a text, or a list of objects with name and "
            "template"
        ) from error


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(value)
    return value


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"chat template {file} cannot be read: {error}. Expected a Jinja file in UTF-8") from error


def _special_tokens(folder: Path, config: Mapping[str, object]) -> dict[str, object]:
    """Texts by name, as in bos_token. Folders of older versions of transformers have another file, which then wins."""
    listed = config if "added_tokens_decoder" in config else {**config, **read_json(folder / "special_tokens_map.json")}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in listed.items()}
    return {name: text for name, text in texts.items() if name.endswith("_token") and isinstance(text, str)}


def _compile(source: str, origin: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise DataError(f"the chat template of {origin} is broken: line {error.lineno}: {error.message}") from error


class _GenerationTag(Extension):
    """{% generation %} marks the assistant's words for other trainers; its content is rendered like any other."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own filter it leaves <, > and & alone."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
