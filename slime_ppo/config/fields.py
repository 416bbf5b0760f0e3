"""One declaration per option: a dataclass field made by `option(...)` carries help, unit, bounds and flag.

The parser, the YAML reader, the checks and the generated flag reference all read `OptionSpec`, so a new option is one line
in its section.
"""

import difflib
import math
import re
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml

Kind = Literal["int", "float", "str", "bool"]
Value = int | float | str | bool | None

_KINDS: dict[Any, Kind] = {int: "int", float: "float", str: "str", bool: "bool"}
_KIND_WORDS = {"int": "a whole number", "float": "a number", "str": "a text", "bool": "true or false"}
# line breaks that PyYAML writes raw into a quoted text and folds to spaces when it reads them
_FOLDED_BREAKS = ("\x85", "\u2028", "\u2029")
# no leading zero: YAML 1.1 would read 010 as 8
_WHOLE_NUMBER = re.compile(r"[+-]?(0|[1-9]\d*(_\d+)*)")


@dataclass(frozen=True)
class Bounds:
    """Limits of a number. `why` is what would go wrong beyond them, for the error text."""

    above: float | None = None
    at_least: float | None = None
    below: float | None = None
    at_most: float | None = None
    why: str = ""

    def admit(self, value: float) -> bool:
        """True when a finite `value` lies inside."""
        return (
            (isinstance(value, int) or math.isfinite(value))
            and (self.above is None or value > self.above)
            and (self.at_least is None or value >= self.at_least)
            and (self.below is None or value < self.below)
            and (self.at_most is None or value <= self.at_most)
        )

    def __str__(self) -> str:
        limits = ((">", self.above), (">=", self.at_least), ("<", self.below), ("<=", self.at_most))
        return " and ".join(f"{sign} {_limit_text(limit)}" for sign, limit in limits if limit is not None)


def _limit_text(limit: float) -> str:
    return str(limit) if isinstance(limit, int) else f"{limit:g}"


@dataclass(frozen=True)
class _Declaration:
    help: str
    unit: str
    bounds: Bounds
    flag: str | None
    default_text: str | None


def option(
    default: Any = MISSING,
    *,
    help: str,
    unit: str = "",
    flag: str | None = None,
    default_text: str | None = None,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
    why: str = "",
) -> Any:
    """A dataclass field that is also a flag and a YAML key. Without `default` the option is required.

    `flag` is given only where it differs from the field name in kebab-case; `default_text` says what a default of None
    stands for. Choices are not given here: they are the field's `Literal` type.
    """
    bounds = Bounds(above=above, at_least=at_least, below=below, at_most=at_most, why=why)
    declaration = _Declaration(help=help, unit=unit, bounds=bounds, flag=flag, default_text=default_text)
    return field(default=default, metadata={"option": declaration})


@dataclass(frozen=True)
class OptionSpec:
    """Everything known about one option."""

    section: str
    name: str
    kind: Kind
    optional: bool
    choices: tuple[str, ...]
    required: bool
    default: Value
    help: str
    unit: str
    bounds: Bounds
    flag: str
    default_text: str | None

    @property
    def key(self) -> str:
        """`section.name`, as in the YAML file."""
        return f"{self.section}.{self.name}"

    @property
    def no_flag(self) -> str:
        """The flag that sets a boolean to false."""
        return f"--no-{self.flag.removeprefix('--')}"

    @property
    def expected(self) -> str:
        """The valid values, in words."""
        words = f"one of {', '.join(self.choices)}" if self.choices else _KIND_WORDS[self.kind]
        limits = str(self.bounds)
        return words + (f" {limits}" if limits else "") + (" or null" if self.optional else "")

    @property
    def shown_default(self) -> str:
        """The default as a reader should see it."""
        if self.required:
            return "required"
        return self.default_text if self.default_text is not None else shown(self.default)

    def parse(self, text: str) -> Value:
        """The value written as `text`. ValueError when the text has another type; bounds are `admits`'s business."""
        if self.kind == "int":
            if not _WHOLE_NUMBER.fullmatch(text):
                raise ValueError(text)
            return int(text)
        if self.kind == "float":
            return float(text)
        if self.kind == "bool":
            if text.lower() not in ("true", "false"):
                raise ValueError(text)
            return text.lower() == "true"
        return text

    def admits(self, value: Value) -> bool:
        """True when `value` has the option's type and lies within its choices and bounds."""
        if value is None:
            return self.optional
        if self.kind == "str":
            return isinstance(value, str) and (value in self.choices if self.choices else value != "")
        if self.kind == "bool":
            return isinstance(value, bool)
        number_types = (int,) if self.kind == "int" else (int, float)
        return isinstance(value, number_types) and not isinstance(value, bool) and self.bounds.admit(value)

    def refusal(self, found: str, where: str) -> str:
        """The error text for a value that is not admitted; `found` as written, `where` it was written."""
        near = nearest(found, self.choices)
        return (
            f"{where}: {self.key} is {found}, expected {self.expected}."
            + (f" Did you mean {near}?" if near else "")
            + (f" {self.bounds.why}." if self.bounds.why else "")
            + f" Meaning: {self.help}"
        )


def shown(value: Value) -> str:
    """A value as YAML would write it, for tables and messages."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def yaml_text(value: object) -> str:
    """YAML of a value or of nested sections that reads back exactly; not ASCII only, unless a text needs escapes."""
    text: str = yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=10_000)
    if any(mark in text for mark in _FOLDED_BREAKS):
        text = yaml.safe_dump(value, sort_keys=False, width=10_000)
    return text


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known name closest to `word`, or None when nothing is close."""
    matches = difflib.get_close_matches(word, list(known), n=1)
    return matches[0] if matches else None


def section_options(section: str, declared: type) -> tuple[OptionSpec, ...]:
    """The options of one section's dataclass, in the order of declaration."""
    hints = get_type_hints(declared)
    return tuple(_spec(section, one.name, hints[one.name], one) for one in fields(declared))


def _spec(section: str, name: str, annotation: Any, declared: Any) -> OptionSpec:
    declaration: _Declaration = declared.metadata["option"]
    members = get_args(annotation) if type(None) in get_args(annotation) else (annotation,)
    [member] = [one for one in members if one is not type(None)]
    choices = get_args(member) if get_origin(member) is Literal else ()
    required = declared.default is MISSING
    return OptionSpec(
        section=section,
        name=name,
        kind="str" if choices else _KINDS[member],
        optional=len(members) > 1,
        choices=choices,
        required=required,
        default=None if required else declared.default,
        help=declaration.help,
        unit=declaration.unit,
        bounds=declaration.bounds,
        flag=declaration.flag or f"--{name.replace('_', '-')}",
        default_text=declaration.default_text,
    )
