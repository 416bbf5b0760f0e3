"""Which modules and kernels --transformer-impl stands for, where there is no GPU and no transformer-engine."""

from dataclasses import asdict, fields
from unittest.mock import patch

import pytest

from slime_ppo.backends.megatron.fusions import Fusions, fusions_of
from tests.helpers.rank_pool import RankPool

HERE = "tests.unit.backends.megatron.test_spec"


def layers_and_config_names() -> tuple[bool, str, set[str]]:
    """(local modules are LOCAL, the error that transformer-engine's give, the names of TransformerConfig's fields)."""
    from slime_ppo.backends.megatron.device import prepare_megatron

    prepare_megatron("cpu")
    from megatron.core.transformer.transformer_config import TransformerConfig

    from slime_ppo.backends.megatron import spec
    from slime_ppo.errors import ConfigError

    names = {field.name for field in fields(TransformerConfig)}
    try:
        spec.layer_modules("transformer_engine")
    except ConfigError as error:
        return spec.layer_modules("local") is spec.LOCAL, str(error), names
    return False, "no error", names


def test_layer_modules_without_transformer_engine_say_so_once_and_local_ones_are_there(rank_pool: RankPool) -> None:
    """On a CPU it is hidden from Megatron even where it is installed."""
    local, error, names = rank_pool.run(f"{HERE}:layers_and_config_names", world=1)[0]
    assert local
    assert error.startswith("--transformer-impl transformer_engine: megatron-core could not import transformer_engine")
    assert "use --transformer-impl local" in error
    assert {"transformer_impl", *asdict(Fusions())} <= names


@pytest.mark.parametrize("apex", [True, False])
def test_fusions_are_off_for_local_layers_and_need_apex_for_gradient_accumulation(apex: bool) -> None:
    with patch("importlib.util.find_spec", return_value=object() if apex else None):
        assert set(asdict(fusions_of("local")).values()) == {False}
        expected = dict.fromkeys(asdict(Fusions()), True) | {"gradient_accumulation_fusion": apex}
        assert asdict(fusions_of("transformer_engine")) == expected
        assert asdict(fusions_of("local", True)) == dict.fromkeys(expected, False) | {"gradient_accumulation_fusion": True}
        assert asdict(fusions_of("transformer_engine", False)) == expected | {"gradient_accumulation_fusion": False}
