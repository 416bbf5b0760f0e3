"""Our code asks megatron-core for nothing that a supported version lacks: CI runs the oldest, a table has what others took away."""

import ast
from collections.abc import Iterator
from dataclasses import make_dataclass
from pathlib import Path

import pytest

from tools.megatron_removals import parameters_of, removals

ROOT = Path(__file__).resolve().parents[4]
TABLE = {
    name: why
    for line in Path(__file__).with_name("removals.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
    for name, _, why in [line.partition(" ")]
}


def complaints(source: str, table: dict[str, str]) -> list[str]:
    """Lines of the table that the code falls under."""
    tree = ast.parse(source)
    imported = dict(_imports(tree))
    found = [name for name in imported.values() for name in (name, name.rpartition(".")[0]) if name in table]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (name := _full_name(node, imported)) in table:
            found.append(name)
        if isinstance(node, ast.Call) and (name := _full_name(node.func, imported)):
            given = {keyword.arg for keyword in node.keywords}
            for entry, why in table.items():
                callee, _, parameter = entry.removesuffix(")").partition("(")
                if callee == name and (parameter in given) == why.startswith("gone") and parameter:
                    found.append(entry)
    return [f"{name} {table[name]}" for name in found]


def _imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Local name -> full name of what is imported from megatron.core."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron.core"):
            yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.asname or alias.name, alias.name) for alias in node.names if alias.name.startswith("megatron.core"))


def _full_name(node: ast.AST, imported: dict[str, str]) -> str:
    """`megatron.core...` of a name or a dotted name that begins with an imported one, else nothing."""
    written = ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""
    for local, full in imported.items():
        if written == local or written.startswith(local + "."):
            return full + written.removeprefix(local)
    return ""


@pytest.mark.parametrize("path", sorted((ROOT / "slime_ppo" / "backends").rglob("*.py")), ids=lambda path: path.name)
def test_our_code_asks_megatron_for_nothing_that_a_supported_version_lacks(path: Path) -> None:
    assert complaints(path.read_text(encoding="utf-8"), TABLE) == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from megatron.core.transformer.moe.experts import GroupedMLP", "experts.GroupedMLP gone in 0.17.1"),
        ("from megatron.core.transformer.moe.grouped_gemm_util import gmm", "moe.grouped_gemm_util gone in 0.17.1"),
        ("from megatron.core import parallel_state as ps\nps.is_unitialized()", "parallel_state.is_unitialized gone in 0.17.1"),
        (
            "from megatron.core import parallel_state\n"
            "parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, create_all_gather_group=True)",
            "parallel_state.initialize_model_parallel(create_all_gather_group) gone in 0.18.2",
        ),
        (
            "from megatron.core.transformer.mlp import MLPSubmodules\nMLPSubmodules(linear_fc1=int)",
            "mlp.MLPSubmodules(linear_fc2) needs 0.17.1",
        ),
        (
            "from megatron.core.transformer.transformer_config import TransformerConfig\nTransformerConfig(moe_extended_tp=True)",
            "transformer_config.TransformerConfig(moe_extended_tp) gone in 0.17.1",
        ),
    ],
)
def test_complaints_of_code_for_one_version_name_the_other(source: str, expected: str) -> None:
    (found,) = complaints(source, TABLE)
    assert found.endswith(expected)


def test_removals_of_two_later_versions_say_the_first_that_lacks_the_name() -> None:
    oldest = {"m": {}, "m.kept": {"a": True, "b": False}, "m.f": {"a": True}, "m.g": {"x": False, "y": False}, "n": {}, "n.h": {}}
    later = {
        "2": {"m": {}, "m.kept": {"a": True, "b": False}, "m.g": {"x": True}, "n": {}, "n.h": {}},
        "3": {"m": {}, "m.kept": {"a": True, "b": False}, "m.g": None},
    }
    assert removals(oldest, later) == {"m.f": "gone in 2", "m.g(x)": "needs 2", "m.g(y)": "gone in 2", "n": "gone in 3"}


def test_parameters_of_a_dataclass_a_class_and_a_function_of_any_keywords() -> None:
    class Layer:
        def __init__(self, config: int, *rest: int, name: str = "") -> None: ...

    def anything(config: int, **kwargs: int) -> None: ...

    assert parameters_of(make_dataclass("Parts", ["first", ("second", int, 0)])) == {"first": True, "second": False}
    assert parameters_of(Layer) == {"config": True, "name": False}
    assert parameters_of(anything) is None
    assert parameters_of(3) == {}
