"""Import layers: a module imports from its own layer or below, frameworks stay where they belong, the driver stays light."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "slime_ppo"
LAYERS = (
    ("errors", "registry", "log", "disk"),
    ("parallel",),
    ("ppo_utils",),
    # the families' declarations and the look of folders: plain data, from which the config reads shapes too
    (
        "types",
        "config",
        "conversion.mapping",
        "conversion.families",
        "conversion.table",
        "conversion.shapes",
        "conversion.torch_dist",
        "conversion.torch_dist_folder",
    ),  # fmt: skip
    ("data", "rewards", "conversion", "tracking"),
    ("rollout", "weight_sync", "checkpoint"),
    ("backends",),
    ("orchestration",),
    ("evaluation", "rollout_source", "saver"),
    ("trainer", "rollout_only"),
    ("sft_trainer",),
    ("inputs", "run_folder"),
    ("launch",),
    ("command",),
)
RANK_OF = {name: rank for rank, names in enumerate(LAYERS) for name in names}
FRAMEWORKS = {
    "megatron": lambda path: path.startswith("backends/megatron/"),
    "ray": lambda path: path == "orchestration/placement.py" or path.startswith("orchestration/ray_"),
    "sglang": lambda path: path.startswith("rollout/sglang/"),
    "triton": lambda path: path.startswith("ppo_utils/triton_kernels/"),
}
DRIVER_SIDE = (
    "config",
    "types",
    "data",
    "rewards",
    "orchestration",
    "tracking",
    "weight_sync",
    "checkpoint",
    "evaluation",
    "saver",
    "rollout_source",
    "rollout_only",
    "trainer",
    "sft_trainer",
    "inputs",
    "run_folder",
    "launch",
    "command",
    "registry",
)
RUNS_ON_A_RANK = {"types/micro_batch.py", "data/pack.py"}


def _modules() -> list[str]:
    return sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


def _imports(tree: ast.AST) -> Iterator[str]:
    """Every imported module, wherever the statement stands; `from slime_ppo import x` counts as slime_ppo.x."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise AssertionError(f"line {node.lineno}: relative import; expected absolute ones")
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _parsed(path: Path) -> list[str]:
    return list(_imports(ast.parse(path.read_text(encoding="utf-8"))))


def _layer(path: str) -> int | None:
    """Layer of a module by its path in the package; None for the package's own __init__."""
    name = path.removesuffix(".py").replace("/", ".")
    return None if name == "__init__" else _rank(name)


def _rank(name: str) -> int:
    """Layer of a module by its dotted name in the package: that of its first two parts where they have one of their own."""
    parts = name.split(".")
    return RANK_OF.get(".".join(parts[:2]), RANK_OF[parts[0]])


def _upward(path: str, imports: list[str]) -> list[str]:
    """Imports of our own modules from a higher layer than that of `path`."""
    own = _layer(path)
    names = [name.removeprefix("slime_ppo.") for name in imports if name.startswith("slime_ppo.")]
    return [name.split(".")[0] for name in names if own is None or _rank(name) > own]


@pytest.mark.parametrize("path", _modules())
def test_module_imports_from_its_layer_or_below(path: str) -> None:
    assert _upward(path, _parsed(PACKAGE / path)) == []


@pytest.mark.parametrize("path", _modules())
def test_module_imports_frameworks_only_where_they_belong(path: str) -> None:
    tops = {name.split(".")[0] for name in _parsed(PACKAGE / path)}
    assert [name for name, allowed in FRAMEWORKS.items() if name in tops and not allowed(path)] == []


def test_layers_a_wrong_import_is_found() -> None:
    """The checks themselves, on imports that must not be there."""
    source = "def f():\n    from slime_ppo.trainer import PpoTrainer\n    import ray\n    from slime_ppo import errors\n"
    imports = list(_imports(ast.parse(source)))
    assert _upward("config/cli.py", imports) == ["trainer"]
    assert _upward("config/cli.py", ["slime_ppo.conversion.shard.shard", "slime_ppo.conversion.families.FAMILIES"]) == [
        "conversion"
    ]
    assert _upward("conversion/families/llama.py", ["slime_ppo.conversion.shard.shard"]) == ["conversion"]
    assert _upward("errors.py", ["slime_ppo.types.sample.Sample"]) == ["types"]
    assert "ray" in {name.split(".")[0] for name in imports} and not FRAMEWORKS["ray"]("trainer.py")


def test_ppo_utils_imports_torch_and_numpy_alone() -> None:
    allowed = set(sys.stdlib_module_names) | {"torch", "numpy", "slime_ppo"}
    for path in (PACKAGE / "ppo_utils").glob("*.py"):  # Triton's kernels, which need Triton, are in a folder of their own
        names = _parsed(path)
        assert {name.split(".")[0] for name in names} <= allowed, path.name
        ours = {name.split(".")[1] for name in names if name.startswith("slime_ppo.")}
        assert ours <= {"ppo_utils", "errors", "registry", "parallel"}, path.name


def _loaded_after(code: str) -> set[str]:
    """Heavy packages that a fresh interpreter has loaded after running `code`."""
    heavy = ("torch", "transformers", "megatron", "ray", "sglang")
    program = f"import sys\n{code}\nprint('loaded', *[name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split()[1:])


def test_driver_side_imports_no_torch() -> None:
    paths = [path for path in _modules() if path.split("/")[0].removesuffix(".py") in DRIVER_SIDE and path not in RUNS_ON_A_RANK]
    assert {"trainer.py", "launch.py", "data/schedule.py"} <= set(paths)
    names = ["slime_ppo." + path.removesuffix(".py").replace("/", ".").removesuffix(".__init__") for path in paths]
    assert _loaded_after("\n".join(f"import {name}" for name in names)) <= {"ray"}


def test_launch_without_ray_imports_no_ray_and_the_driver_no_torch() -> None:
    names = ("launch", "orchestration.local", "orchestration.local_ranks", "orchestration.local_world", "orchestration.rank_role")
    assert _loaded_after("\n".join(f"import slime_ppo.{name}" for name in names)) == set()


def test_package_and_help_import_nothing_heavy() -> None:
    show_help = """
import runpy
import slime_ppo
sys.argv = ['train_ppo.py', '--help']
try:
    runpy.run_path('scripts/train_ppo.py', run_name='__main__')
except SystemExit as end:
    assert not end.code
"""
    assert _loaded_after(show_help) == set()
