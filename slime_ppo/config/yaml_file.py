"""Reads a YAML config file into settings that remember their line.

The file is read as nodes, not objects: every key and value keeps its line, a doubled key is seen, and no tag builds anything.
Paths in a file are relative to the current directory, as on the command line.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import yaml

from slime_ppo.config.fields import OptionSpec, Value, nearest
from slime_ppo.config.root import OPTIONS
from slime_ppo.errors import ConfigError

_NULL, _TEXT = "tag:yaml.org,2002:null", "tag:yaml.org,2002:str"
_PLAIN_TAGS = (_TEXT, "tag:yaml.org,2002:int", "tag:yaml.org,2002:float", "tag:yaml.org,2002:bool")


@dataclass(frozen=True)
class Setting:
    """One option that a file or the command line gives, and where: `file.yaml:12` or `--flag`."""

    spec: OptionSpec
    value: Value
    origin: str


def read_config_file(path: str, options: Sequence[OptionSpec] = OPTIONS) -> list[Setting]:
    """The settings of one YAML file, in its order; it may set `options`.

    Raises ConfigError, with file and line, for a file that cannot be read, broken YAML, an unknown or doubled key, a key in
    the wrong section, and a value of the wrong type or out of bounds.
    """
    root = _compose(path)
    if root is None:
        return []
    settings = []
    for where, section, block in _pairs(root, path, "the file"):
        specs = {spec.name: spec for spec in options if spec.section == section}
        if not specs:
            raise ConfigError(f"{where}: unknown section {section!r}. {_section_hint(section, options)}")
        for place, key, value in _pairs(block, path, f"section {section}"):
            if key not in specs:
                raise ConfigError(f"{place}: unknown key {key!r} in section {section}. {_key_hint(section, key, options)}")
            settings.append(_setting(place, specs[key], value))
    return settings


def _compose(path: str) -> yaml.Node | None:
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start}); --config expects a YAML file saved as UTF-8") from error
    except OSError as error:
        raise ConfigError(f"--config {path}: cannot be read ({error.strerror}); give the path of a YAML file") from error
    try:
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        reason = ", ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(f"{path}{line}: not valid YAML: {reason}. Expected `section:` with `key: value` below") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error


def _pairs(node: yaml.Node, path: str, what: str) -> Iterator[tuple[str, str, yaml.Node]]:
    """`file:line`, key and value of each entry of a mapping; nothing for an empty one."""
    if node.tag == _NULL:
        return
    line = node.start_mark.line + 1
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{path}:{line}: {what} is {_found(node)}, expected `key: value` lines")
    first_line: dict[str, int] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(f"{path}:{line}: a key of {what} is {_found(key_node)}, expected a name")
        key = key_node.value
        if key in first_line:
            raise ConfigError(f"{path}:{line}: {key} was given in line {first_line[key]} already; keep one of them")
        first_line[key] = line
        yield f"{path}:{line}", key, value_node


def _setting(where: str, spec: OptionSpec, node: yaml.Node) -> Setting:
    try:
        value = _convert(spec, node)
    except ValueError:
        raise ConfigError(spec.refusal(_found(node), where) + _quote_hint(spec, node)) from None
    if not spec.admits(value):
        raise ConfigError(spec.refusal(_found(node), where))
    return Setting(spec, value, where)


def _convert(spec: OptionSpec, node: yaml.Node) -> Value:
    """The value of a scalar by the option's type. YAML 1.1 takes 1e-6 for a text; here the option decides."""
    if not isinstance(node, yaml.ScalarNode):
        raise ValueError(node.tag)
    if node.tag == _NULL:
        return None
    if node.tag not in _PLAIN_TAGS:
        raise ValueError(node.tag)
    quoted = node.style is not None
    fits = (quoted or node.tag == _TEXT) if spec.kind == "str" else not quoted
    if not fits:
        raise ValueError(node.value)
    return spec.parse(node.value)


def _found(node: yaml.Node) -> str:
    if isinstance(node, yaml.MappingNode):
        return "a block of keys"
    if isinstance(node, yaml.SequenceNode):
        return "a list"
    if node.tag == _NULL:
        return "null"
    if node.tag.startswith("tag:yaml.org,2002:python"):
        return f"a Python tag ({node.tag.removeprefix('tag:yaml.org,2002:')})"
    quoted = isinstance(node, yaml.ScalarNode) and node.style is not None
    return repr(node.value) if quoted else str(node.value)


def _quote_hint(spec: OptionSpec, node: yaml.Node) -> str:
    if not isinstance(node, yaml.ScalarNode):
        return ""
    if spec.kind == "str":
        return " Quote the value to make it a text."
    return " Write the value without quotes." if node.style is not None else ""


def _section_hint(name: str, options: Sequence[OptionSpec]) -> str:
    homes = [spec for spec in options if name in (spec.name, spec.flag[2:], spec.flag[2:].replace("-", "_"))]
    if homes:
        return f"It is a key of section {homes[0].section}: write it as {homes[0].name} under `{homes[0].section}:`."
    sections = list(dict.fromkeys(spec.section for spec in options))
    near = nearest(name, sections)
    return (f"Did you mean {near!r}? " if near else "") + f"Sections are {', '.join(sections)}."


def _key_hint(section: str, key: str, options: Sequence[OptionSpec]) -> str:
    plain = key.replace("-", "_")
    homes = [spec for spec in options if plain in (spec.name, spec.flag[2:].replace("-", "_"))]
    here = [spec for spec in homes if spec.section == section]
    if here:
        return f"Did you mean {here[0].name!r}?"
    if homes:
        return f"It belongs to section {homes[0].section}: write it as {homes[0].name} under `{homes[0].section}:`."
    names = {spec.name: spec for spec in options if spec.section == section}
    near = nearest(plain, names)
    if near:
        return f"Did you mean {near!r}? ({names[near].help})"
    elsewhere = nearest(plain, [spec.name for spec in options])
    if elsewhere:
        [home, *_] = [spec for spec in options if spec.name == elsewhere]
        return f"Did you mean {elsewhere!r} of section {home.section}?"
    return f"Keys of this section are {', '.join(names)}."
