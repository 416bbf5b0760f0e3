"""What megatron-core has taken away since the oldest version we run on: code for all versions must do without it.

    make megatron-removals        writes tests/unit/backends/megatron/removals.txt, which test_removals.py reads

    python tools/megatron_removals.py FOLDER FOLDER...      what of the first folder's megatron-core is gone in a later one's

A line names a function or class of a module, or one of its parameters in brackets, and the first version without it, or with
`needs` the first version in which a parameter that had a default must be given. Each folder is what `pip install --target` makes.
"""

import importlib
import importlib.util
import inspect
import json
import os
import pkgutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import cast

ROOT = Path(__file__).resolve().parents[1]

# what a trainer can have a use for; the rest is inference, data sets, and models of other kinds
PACKAGES = (
    "dist_checkpointing", "distributed", "models.common", "models.gpt", "optimizer", "pipeline_parallel", "tensor_parallel",
    "transformer",
)  # fmt: skip
FOREIGN = ".fsdp.src."  # a package of its own that is shipped inside megatron-core

# parameters of a callable: True for those without a default; None when it takes any
Parameters = dict[str, bool] | None
Interface = dict[str, Parameters]


def interface() -> Interface:
    """Names in the modules of the megatron-core that this process imports, with their parameters where there are some."""
    from slime_ppo.backends.megatron.device import prepare_megatron

    prepare_megatron("cpu")
    found: Interface = {}
    for name in _modules():
        if FOREIGN in name:
            continue
        try:
            module = importlib.import_module(name)
        except ImportError:  # a module for a package that is not installed
            continue
        found[name] = {}
        for attribute, value in vars(module).items():
            home = getattr(value, "__module__", name)
            reexported = hasattr(module, "__path__") and str(home).startswith(name)
            if not attribute.startswith("_") and (home == name or reexported) and not inspect.ismodule(value):
                found[f"{name}.{attribute}"] = parameters_of(value)
    return found


def _modules() -> Iterator[str]:
    import megatron.core

    for entry in pkgutil.iter_modules(megatron.core.__path__, "megatron.core."):
        if not entry.ispkg:
            yield entry.name
    for package in PACKAGES:
        name = f"megatron.core.{package}"
        yield name
        folders = [str(Path(next(iter(megatron.core.__path__)), *package.split(".")))]
        yield from (entry.name for entry in pkgutil.walk_packages(folders, f"{name}.", lambda _: None))


def parameters_of(value: object) -> Parameters:
    """Those of a function or a class that can be given by name; none for anything else."""
    try:
        signature = inspect.signature(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return {}
    if any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
        return None
    return {name: p.default is p.empty for name, p in signature.parameters.items() if p.kind is not p.VAR_POSITIONAL}


def removals(oldest: Interface, later: Mapping[str, Interface]) -> dict[str, str]:
    """`name` or `name(parameter)` -> `gone in VERSION` or `needs VERSION`, without what is in a removed module. `later` goes up."""
    gone: dict[str, str] = {}
    for version, new in later.items():
        for name, parameters in oldest.items():
            if name not in new:
                gone.setdefault(name, f"gone in {version}")
                continue
            now = new[name]
            for parameter, required in (parameters or {}).items():
                if now is not None and parameter not in now:
                    gone.setdefault(f"{name}({parameter})", f"gone in {version}")
                elif now is not None and now[parameter] and not required:
                    gone.setdefault(f"{name}({parameter})", f"needs {version}")
    return {name: why for name, why in gone.items() if name.partition("(")[0].rpartition(".")[0] not in gone}


def _of(folder: str) -> tuple[str, Interface]:
    """Version and interface of the megatron-core in a folder, read by a process of its own."""
    code = "import json; from tools.megatron_removals import interface; found = interface(); import megatron.core; "
    code += "print(json.dumps([megatron.core.__version__, found]))"
    path = os.pathsep.join([os.path.abspath(folder), str(ROOT)])
    command = [sys.executable, "-W", "ignore", "-c", code]
    found = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, cwd=ROOT, capture_output=True, text=True, check=True)
    return cast(tuple[str, Interface], tuple(json.loads(found.stdout.splitlines()[-1])))


def main() -> None:
    """The table, on standard output."""
    (oldest, first), *later = (_of(folder) for folder in sys.argv[1:])
    versions = ", ".join(version for version, _ in later)
    print(f"# What megatron-core {versions} took away of {oldest}; written by `make megatron-removals`")
    for name, why in sorted(removals(first, dict(later)).items()):
        print(name, why)


if __name__ == "__main__":
    main()
