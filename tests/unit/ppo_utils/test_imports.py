"""What importing the package pulls in."""

import inspect
import subprocess
import sys

import pytest

import slime_ppo.ppo_utils

TORCH_FREE = (
    "kl_controller",
    "lr_schedule",
    "denominator",
    "moments",
    "off_policy_stats",
    "registries",
    "reward_shaping",
    "support_checks",
)
TORCH_FREE_NAMES = ("make_denominator", "resolve_estimator", "POLICY_LOSSES", "overlong_penalty", "CorrectionSettings", "Mismatch")


def _exit_code(code: str) -> int:
    return subprocess.run([sys.executable, "-c", f"import sys; {code}"], check=False).returncode


def test_torch_free_modules_import_no_torch() -> None:
    imports = "; ".join(f"import slime_ppo.ppo_utils.{name}" for name in TORCH_FREE)
    names = f"from slime_ppo.ppo_utils import {', '.join(TORCH_FREE_NAMES)}"
    assert _exit_code(f"import slime_ppo.ppo_utils; {imports}; {names}; sys.exit('torch' in sys.modules)") == 0


def test_package_imports_nothing_but_torch() -> None:
    code = "import slime_ppo.ppo_utils as p; [getattr(p, n) for n in dir(p)]; "
    code += "sys.exit(any(m in sys.modules for m in ('ray', 'megatron', 'transformers')))"
    assert _exit_code(code) == 0


def test_every_exported_name_resolves_where_it_is_defined_and_unknown_ones_do_not() -> None:
    for name in dir(slime_ppo.ppo_utils):
        found = getattr(slime_ppo.ppo_utils, name)
        module = slime_ppo.ppo_utils._MODULE_OF[name]
        if inspect.isclass(found) or inspect.isfunction(found):
            assert (found.__name__, found.__module__) == (name, f"slime_ppo.ppo_utils.{module}")
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = slime_ppo.ppo_utils.no_such_thing


def test_overview_names_every_module_that_exports_something() -> None:
    overview = slime_ppo.ppo_utils.__doc__
    assert overview is not None
    assert {module for module in slime_ppo.ppo_utils._MODULE_OF.values() if f"{module}.py" not in overview} == set()
