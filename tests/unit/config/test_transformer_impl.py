"""--transformer-impl: what auto becomes on each device, and what is refused before one is used."""

import importlib.util
import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from typing import Literal
from unittest.mock import patch

import pytest

from slime_ppo.config.checks import check_config
from slime_ppo.config.fields import Value
from slime_ppo.config.transformer_impl import check_transformer_impl, chosen_transformer_impl
from slime_ppo.errors import ConfigError
from slime_ppo.orchestration.worker_settings import worker_settings
from slime_ppo.parallel.worker_settings import DeviceKind
from tests.helpers.configs import make_config

ASKED: dict[str, Value] = {"model__transformer_impl": "transformer_engine", "model__dtype": "bfloat16"}


@contextmanager
def package(*, installed: bool) -> Iterator[None]:
    """An environment that has transformer-engine, or has not, whatever the one of the tests has; it cannot be imported."""
    found = ModuleSpec("transformer_engine", None) if installed else None
    real = importlib.util.find_spec

    def find(name: str, *rest: str) -> ModuleSpec | None:
        return found if name == "transformer_engine" else real(name, *rest)

    with patch("importlib.util.find_spec", find), patch.dict(sys.modules, {"transformer_engine": None}):
        yield


def test_auto_is_transformer_engine_only_on_a_gpu_in_bfloat16_and_where_it_is_installed() -> None:
    chosen = set()
    for device, dtype, installed in itertools.product(("cpu", "cuda"), ("float32", "bfloat16"), (False, True)):
        model = make_config(model__dtype=dtype).model
        with package(installed=installed):
            if chosen_transformer_impl(model, device) == "transformer_engine":
                chosen.add((device, dtype, installed))
    assert chosen == {("cuda", "bfloat16", True)}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_local_is_local_on_every_device(device: DeviceKind) -> None:
    with package(installed=True):
        model = make_config(model__transformer_impl="local", model__dtype="bfloat16").model
        assert chosen_transformer_impl(model, device) == "local"


@pytest.mark.parametrize("device", ["cuda", "auto"])
def test_transformer_engine_that_fits_is_not_refused(device: Literal["cuda", "auto"]) -> None:
    with package(installed=True):
        check_transformer_impl(make_config(**ASKED).model, device)
        assert chosen_transformer_impl(make_config(**ASKED).model, "cuda") == "transformer_engine"


@pytest.mark.parametrize(
    ("values", "installed", "parts"),
    [
        ({"cluster__device": "cpu"}, True, ("on a CPU", "need a GPU", "Use --transformer-impl local")),
        ({"model__dtype": "float32"}, True, ("--dtype float32", "TF32", "Use --dtype bfloat16")),
        ({}, False, ("transformer-engine is not installed", "Install slime-ppo[gpu]", "--transformer-impl local")),
    ],
)
def test_check_config_refuses_transformer_engine_where_it_cannot_run(
    values: dict[str, Value], installed: bool, parts: tuple[str, ...]
) -> None:
    config = make_config(**(ASKED | {"reward__rm_type": "vader"} | values))
    with package(installed=installed), pytest.raises(ConfigError) as caught:
        check_config(config)
    assert str(caught.value).startswith("--transformer-impl transformer_engine")
    assert [part for part in parts if part not in str(caught.value)] == []


def test_device_auto_that_turns_out_to_be_a_cpu_is_refused_when_the_ranks_settings_are_made() -> None:
    config = make_config(**ASKED)
    with package(installed=True):
        check_transformer_impl(config.model, config.cluster.device)
        with pytest.raises(ConfigError, match="on a CPU"):
            worker_settings(config, "actor", init_method="tcp://a:1", device="cpu")


def test_worker_settings_tell_every_rank_of_both_roles_what_was_chosen() -> None:
    with package(installed=True):
        for device, impl in (("cpu", "local"), ("cuda", "transformer_engine")):
            config = make_config(model__dtype="bfloat16")
            for role in config.roles:
                found = worker_settings(config, role, init_method="tcp://a:1", device=device)  # type: ignore[arg-type]
                assert {one.model.transformer_impl for one in found} == {impl}
