"""Where SGLang's servers live and listen, by the nodes and GPUs of their hosts."""

from dataclasses import replace

import pytest

from slime_ppo.errors import RolloutError
from slime_ppo.orchestration.ray_server import HostPlace, placed_specs
from slime_ppo.rollout.sglang.server_args import ServerSpec

SPEC = ServerSpec(hf_folder="model", dtype="float32", device="cuda", max_positions=64, log_file="log", tp_size=2)
FIRST = [HostPlace("a", "10.0.0.1", (2,)), HostPlace("a", "10.0.0.1", (3,))]
OTHER = [HostPlace("b", "10.0.0.2", (0,)), HostPlace("b", "10.0.0.2", (1,))]


def test_placed_specs_take_the_gpus_of_their_hosts() -> None:
    one, two = placed_specs([SPEC, SPEC], [FIRST, FIRST])
    assert (one.gpu_ids, one.host) == ((2, 3), "127.0.0.1") == (two.gpu_ids, two.host)


def test_placed_specs_on_loopback_of_another_node_are_refused_before_the_start() -> None:
    with pytest.raises(RolloutError, match="on several nodes and listen on 127.0.0.1"):
        placed_specs([SPEC, SPEC], [FIRST, OTHER])


def test_placed_specs_listen_on_the_address_of_their_own_node() -> None:
    open_spec = replace(SPEC, host="10.0.0.1", api_key="key")
    assert [spec.host for spec in placed_specs([open_spec, open_spec], [FIRST, OTHER])] == ["10.0.0.1", "10.0.0.2"]


def test_placed_specs_refuse_an_engine_on_two_nodes() -> None:
    with pytest.raises(RolloutError, match="2 devices of an SGLang engine are on 2 nodes"):
        placed_specs([SPEC], [[FIRST[0], OTHER[0]]])
