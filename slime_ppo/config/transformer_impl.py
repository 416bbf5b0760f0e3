"""--transformer-impl with auto resolved, and what is refused before any device is used."""

import importlib.util
from typing import Literal

from slime_ppo.config.model import ModelConfig
from slime_ppo.errors import ConfigError
from slime_ppo.parallel.worker_settings import DeviceKind, TransformerImpl


def chosen_transformer_impl(model: ModelConfig, device: DeviceKind) -> TransformerImpl:
    """What the layers are made of on `device`. Raises ConfigError as check_transformer_impl."""
    check_transformer_impl(model, device)
    if model.transformer_impl != "auto":
        return model.transformer_impl
    fits = device == "cuda" and model.dtype == "bfloat16" and _installed()
    return "transformer_engine" if fits else "local"


def check_transformer_impl(model: ModelConfig, device: DeviceKind | Literal["auto"]) -> None:
    """Refuse transformer-engine on a CPU, in float32, and where it is not installed; it is looked for, not imported.

    A device that is still `auto` may become either.
    """
    if model.transformer_impl != "transformer_engine":
        return
    asked = "--transformer-impl transformer_engine"
    if device == "cpu":
        raise ConfigError(f"{asked} on a CPU (--device): its kernels need a GPU. Use --transformer-impl local, or a GPU")
    if model.dtype == "float32":
        raise ConfigError(
            f"{asked} with --dtype float32: its matrix products round float32 to TF32, and its fused attention takes bfloat16 "
            "only. Use --dtype bfloat16, or --transformer-impl local"
        )
    if not _installed():
        raise ConfigError(
            f"{asked}: the package transformer-engine is not installed in this environment. Install slime-ppo[gpu], or use "
            "--transformer-impl local"
        )


def _installed() -> bool:
    return importlib.util.find_spec("transformer_engine") is not None
