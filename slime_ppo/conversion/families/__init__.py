"""Model families, one module each: a module here that is not private defines FAMILY, and is found by being here."""

from collections.abc import Mapping
from importlib import import_module
from pkgutil import iter_modules

from slime_ppo.conversion.mapping import ModelFamily


def _find() -> Mapping[str, ModelFamily]:
    names = sorted(module.name for module in iter_modules(__path__) if not module.name.startswith("_"))
    found: list[ModelFamily] = [import_module(f"{__name__}.{name}").FAMILY for name in names]
    return {family.model_type: family for family in found}


FAMILIES = _find()
"""Family by the `model_type` of config.json."""
