"""The flags of the installed SGLang, read from its source: importing it costs 8 CPU seconds and half a GB."""

import ast
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from slime_ppo.errors import ConfigError

Kind = Literal["switch", "int", "float", "text"]
_KINDS: Mapping[str, Kind] = {"bool": "switch", "int": "int", "float": "float"}


@dataclass(frozen=True)
class InstalledFlag:
    """One flag: the field of ServerArgs that it sets, the kind of its value or of each of its values, and its choices where the
    source lists them."""

    field: str
    kind: Kind
    choices: tuple[str, ...] = ()
    is_list: bool = False


def installed_flags(source: Path | None = None) -> dict[str, InstalledFlag]:
    """Flags by name, aliases too, in snake case and without dashes (`mem_fraction_static`).

    `source` is the folder `sglang`, by default that of the installed package. ConfigError when there is none.
    """
    folder = source or _installed_folder()
    flags: dict[str, InstalledFlag] = {}
    for path in sorted((folder / "srt" / "arg_groups" / "fields").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                flags |= _of_field(node.target.id, node.annotation)
    for name, kind in _added_by_hand(ast.parse((folder / "srt" / "server_args.py").read_text(encoding="utf-8"))):
        flags.setdefault(name, InstalledFlag(name, kind))
    if not flags:
        raise ConfigError(f"no flags found in {folder}; expected SGLang 0.5.23: pip install 'slime-ppo[sglang]'")
    return flags


def _installed_folder() -> Path:
    found = importlib.util.find_spec("sglang")
    if found is None or not found.submodule_search_locations:
        raise ConfigError("sglang is not installed; --rollout-engine sglang needs it: pip install 'slime-ppo[sglang]'")
    return Path(found.submodule_search_locations[0])


def _of_field(field: str, annotation: ast.expr) -> dict[str, InstalledFlag]:
    """The flags of one field: none without SGLang's mark `A[type, help text or Arg(...)]`, or with `no_cli`."""
    if not (isinstance(annotation, ast.Subscript) and isinstance(annotation.slice, ast.Tuple)):
        return {}
    if ast.unparse(annotation.value) != "A":
        return {}
    declared, *marks = annotation.slice.elts
    calls = [mark for mark in marks if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "Arg"]
    given = {key.arg: key.value for call in calls for key in call.keywords if key.arg is not None}
    if "no_cli" in given:
        return {}
    names = [_text(given["cli_name"])] if "cli_name" in given else [field]
    names += [_text(alias) for alias in getattr(given.get("aliases"), "elts", [])]
    if _action(given) == "BooleanOptionalAction":
        names += ["no_" + name.lstrip("-") for name in names]
    flag = InstalledFlag(field, _kind(declared, given), _choices(declared, given), _element(declared, given) is not None)
    return {name.lstrip("-").replace("-", "_"): flag for name in names}


def _kind(declared: ast.expr, given: Mapping[str, ast.expr]) -> Kind:
    if _action(given) == "BooleanOptionalAction":
        return "switch"
    # what an action or a parser of SGLang's own accepts is not in the annotation
    if "action" in given or "type_parser" in given:
        return "text"
    return _KINDS.get(ast.unparse(_element(declared, given) or _without_optional(declared)), "text")


def _element(declared: ast.expr, given: Mapping[str, ast.expr]) -> ast.expr | None:
    """What a list holds whose values are given one by one; None for everything else."""
    inner = _without_optional(declared)
    if "action" in given or "type_parser" in given or not isinstance(inner, ast.Subscript):
        return None
    return inner.slice if ast.unparse(inner.value) in ("List", "list") else None


def _action(given: Mapping[str, ast.expr]) -> str:
    """The class name of the argparse action, "" for the usual ones."""
    return ast.unparse(given["action"]).rpartition(".")[2] if "action" in given else ""


def _choices(declared: ast.expr, given: Mapping[str, ast.expr]) -> tuple[str, ...]:
    """The values that the source spells out, in the declaration or as Literal; () otherwise."""
    listed = given.get("choices")
    literal = _without_optional(declared)
    if listed is None and isinstance(literal, ast.Subscript) and ast.unparse(literal.value) == "Literal":
        listed = literal.slice
    elements = getattr(listed, "elts", [])
    values = [element.value for element in elements if isinstance(element, ast.Constant)]
    return tuple(map(str, values)) if len(values) == len(elements) else ()


def _without_optional(declared: ast.expr) -> ast.expr:
    if isinstance(declared, ast.Subscript) and ast.unparse(declared.value) == "Optional":
        return declared.slice
    return declared


def _added_by_hand(tree: ast.AST) -> Iterator[tuple[str, Kind]]:
    """Flags that `ServerArgs.add_cli_args` adds itself: those with choices made at run time, and old spellings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            actions = [ast.unparse(key.value) for key in node.keywords if key.arg == "action"]
            switch = any("StoreTrue" in action or "store_true" in action for action in actions)
            for name in (_text(one) for one in node.args):
                yield name.lstrip("-").replace("-", "_"), "switch" if switch else "text"


def _text(node: ast.expr) -> str:
    return str(ast.literal_eval(node))
