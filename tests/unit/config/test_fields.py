"""Option declarations: types, bounds and choices of single values."""

from dataclasses import dataclass
from typing import Literal

import pytest

from slime_ppo.config.fields import Bounds, OptionSpec, nearest, option, section_options, shown
from slime_ppo.config.root import OPTIONS


@dataclass(frozen=True, kw_only=True)
class _Example:
    ratio: float = option(0.5, help="a ratio", above=0, at_most=1, why="Because of a reason")
    color: Literal["red", "green"] = option("red", help="a colour")
    maybe: int | None = option(None, help="a count", default_text="off", at_least=1)
    name: str = option(help="a name", flag="--other-name")
    switch: bool = option(True, help="a switch")


def _spec(name: str) -> OptionSpec:
    [found] = [spec for spec in section_options("example", _Example) if spec.name == name]
    return found


def test_section_options_of_a_dataclass_carry_flag_kind_and_default() -> None:
    assert [spec.key for spec in section_options("example", _Example)] == [
        f"example.{name}" for name in ("ratio", "color", "maybe", "name", "switch")
    ]
    assert (_spec("name").flag, _spec("name").required, _spec("ratio").flag) == ("--other-name", True, "--ratio")
    assert (_spec("color").kind, _spec("color").choices) == ("str", ("red", "green"))
    assert (_spec("maybe").kind, _spec("maybe").optional, _spec("maybe").shown_default) == ("int", True, "off")
    assert _spec("switch").no_flag == "--no-switch"


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [("ratio", "1e-6", 1e-6), ("ratio", "1", 1.0), ("maybe", "1_000", 1000), ("switch", "False", False), ("name", "1e-6", "1e-6")],
)
def test_parse_of_valid_text_gives_the_typed_value(name: str, text: str, value: object) -> None:
    parsed = _spec(name).parse(text)
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ("name", "text"), [("ratio", "x"), ("maybe", "1.0"), ("maybe", "1e3"), ("maybe", "010"), ("switch", "yes")]
)
def test_parse_of_another_type_raises(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        _spec(name).parse(text)


@pytest.mark.parametrize(
    ("name", "value", "admitted"),
    [
        ("ratio", 1.0, True),
        ("ratio", 1, True),
        ("ratio", 0.0, False),
        ("ratio", 1.1, False),
        ("ratio", float("nan"), False),
        ("ratio", True, False),
        ("color", "green", True),
        ("color", "blue", False),
        ("maybe", None, True),
        ("maybe", 0, False),
        ("maybe", 1.0, False),
        ("name", "", False),
        ("name", None, False),
        ("switch", 1, False),
    ],
)
def test_admits_checks_type_choices_and_bounds(name: str, value: int | float | str | None, admitted: bool) -> None:
    assert _spec(name).admits(value) is admitted


def test_refusal_names_place_key_found_expected_and_reason() -> None:
    text = _spec("ratio").refusal("3", "a.yaml:7")
    assert text == "a.yaml:7: example.ratio is 3, expected a number > 0 and <= 1. Because of a reason. Meaning: a ratio"
    assert "Did you mean green?" in _spec("color").refusal("gren", "--color")


def test_bounds_without_limits_refuse_infinity_only() -> None:
    assert Bounds().admit(-1e300)
    assert not Bounds().admit(float("inf"))


def test_nearest_of_a_far_word_is_none() -> None:
    assert nearest("lrr", ["lr", "seed"]) == "lr"
    assert nearest("zzz", ["lr", "seed"]) is None


def test_shown_writes_values_as_yaml_does() -> None:
    assert [shown(value) for value in (None, True, 1e-6, 3, "x")] == ["null", "true", "1e-06", "3", "x"]


def test_options_of_the_config_have_unique_flags_and_admitted_defaults() -> None:
    flags = [flag for spec in OPTIONS for flag in ((spec.flag, spec.no_flag) if spec.kind == "bool" else (spec.flag,))]
    assert len(flags) == len(set(flags))
    assert [spec.key for spec in OPTIONS if not spec.required and not spec.admits(spec.default)] == []
    assert [spec.key for spec in OPTIONS if spec.optional and spec.default_text is None and spec.default is None] == []


def test_options_of_the_config_are_no_prefix_of_a_global_flag() -> None:
    assert not {"--config", "--print-config", "--dry-run", "--help"} & {spec.flag for spec in OPTIONS}
