"""Adam's count of steps, wherever an implementation keeps it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime_ppo.backends.megatron.device import prepare_megatron

prepare_megatron("cpu")

from slime_ppo.backends.megatron.host_adam import HostAdam  # noqa: E402
from slime_ppo.backends.megatron.stored_state import set_steps_done, steps_done  # noqa: E402


@pytest.mark.parametrize("kind", [HostAdam, torch.optim.AdamW], ids=["counts per group", "counts per parameter"])
def test_set_steps_done_makes_the_next_step_that_of_an_adam_which_has_done_them(kind: Any) -> None:
    """HostAdam keeps the count where the fused Adams for GPUs do, torch's own is Megatron's choice where they are not installed."""
    start = torch.randn(5)

    def adam() -> tuple[torch.Tensor, Any]:
        parameter = start.clone().requires_grad_()
        inner = kind([parameter], lr=0.1)
        return parameter, SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=inner, param_groups=inner.param_groups)])

    def step(parameter: torch.Tensor, optimizer: Any, seed: int) -> None:
        parameter.grad = torch.randn(5, generator=torch.Generator().manual_seed(seed))
        optimizer.chained_optimizers[0].optimizer.step()

    straight, first = adam()
    assert steps_done(first) == 0
    for seed in range(3):
        step(straight, first, seed)
    assert steps_done(first) == 3
    resumed, second = adam()
    step(resumed, second, 9)  # what it has done before counts no more
    set_steps_done(second, 3)
    own, other = (one.chained_optimizers[0].optimizer.state for one in (second, first))
    for name in ("exp_avg", "exp_avg_sq"):
        assert not own[resumed][name].any()
        own[resumed][name].copy_(other[straight][name])
    resumed.data.copy_(straight.data)
    for parameter, optimizer in ((straight, first), (resumed, second)):
        step(parameter, optimizer, 7)
    assert torch.equal(resumed, straight) and steps_done(second) == 4
    set_steps_done(second, 0)
    assert steps_done(second) == 0 and not own
