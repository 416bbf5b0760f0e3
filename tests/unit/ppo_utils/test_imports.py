"""What importing the package pulls in."""

import subprocess
import sys

import pytest

import slime_ppo.ppo_utils

TORCH_FREE = ("kl_controller", "lr_schedule", "denominator", "moments", "support_checks")


def test_torch_free_modules_import_no_torch() -> None:
    imports = "; ".join(f"import slime_ppo.ppo_utils.{name}" for name in TORCH_FREE)
    code = f"import sys; {imports}; from slime_ppo.ppo_utils import make_denominator; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_package_imports_nothing_but_torch() -> None:
    code = "import sys, slime_ppo.ppo_utils as p; [getattr(p, n) for n in dir(p)]; "
    code += "sys.exit(any(m in sys.modules for m in ('ray', 'megatron', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_exported_name_resolves_and_unknown_ones_do_not() -> None:
    for name in dir(slime_ppo.ppo_utils):
        assert getattr(slime_ppo.ppo_utils, name).__name__ == name
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = slime_ppo.ppo_utils.no_such_thing
