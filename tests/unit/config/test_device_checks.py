"""What a device cannot do is refused as soon as `--device auto` has become one."""

from typing import Any

import pytest

from slime_ppo.config.device_checks import check_device
from slime_ppo.config.root import Config
from slime_ppo.errors import ConfigError
from slime_ppo.parallel.worker_settings import DeviceKind
from tests.helpers.configs import make_config


def _sglang(**values: Any) -> Config:
    return make_config(**({"rollout__engine": "sglang"} | values))


@pytest.mark.parametrize(
    ("values", "device", "message"),
    [
        ({"rollout__weight_sync": "distributed"}, "cuda", "NCCL allows one process of a group on each GPU"),
        ({"rollout__rollout_num_gpus": 2}, "cuda", "the engines have 2 GPUs, the actor 1"),
        ({"parallel__gradient_accumulation_fusion": True}, "cpu", "--gradient-accumulation-fusion on a CPU"),
        ({"model__transformer_impl": "transformer_engine"}, "cpu", "--transformer-impl transformer_engine on a CPU"),
    ],
)
def test_check_device_refuses_what_it_does_not_have(values: dict[str, Any], device: DeviceKind, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_device(_sglang(**values), device)


def test_check_device_knows_no_gpu_of_servers_on_a_cpu_or_of_no_servers() -> None:
    check_device(_sglang(rollout__weight_sync="distributed", rollout__rollout_num_gpus=2), "cpu")
    check_device(make_config(), "cuda")
