"""HostAdam against torch.optim.AdamW and Adam, which it must equal."""

import pytest
import torch

from slime_ppo.backends.megatron.host_adam import HostAdam


def _parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((5, 3), (7,), (2,))]


@pytest.mark.parametrize(("decoupled", "reference"), [(True, torch.optim.AdamW), (False, torch.optim.Adam)])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_step_five_steps_equal_torch(decoupled: bool, reference: type, weight_decay: float) -> None:
    """The last parameter has no gradient; the rate changes between steps as a schedule's does."""
    ours, theirs = _parameters(), _parameters()
    settings = {"betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": weight_decay}
    fast = HostAdam(ours, lr=0.0, adam_w_mode=decoupled, master_weights=False, **settings)
    plain = reference(theirs, lr=0.0, **settings)
    generator = torch.Generator().manual_seed(1)
    for step in range(5):
        for own, other in zip(ours[:2], theirs[:2], strict=True):
            own.grad = torch.randn(own.shape, generator=generator)
            other.grad = own.grad.clone()
        for optimizer in (fast, plain):
            optimizer.param_groups[0]["lr"] = 0.01 * (step + 1)
            optimizer.step()
        for own, other in zip(ours, theirs, strict=True):
            assert torch.allclose(own, other, rtol=0, atol=1e-7)
    assert not torch.equal(ours[0], _parameters()[0]) and torch.equal(ours[2], _parameters()[2])


def test_state_has_the_layout_of_the_fused_adam() -> None:
    """The step count lives in the group, so that checkpoints of CPU and GPU have one format."""
    parameters = _parameters()[:1]
    parameters[0].grad = torch.ones(5, 3)
    optimizer = HostAdam(parameters, lr=0.1)
    optimizer.step()
    optimizer.step()
    assert optimizer.param_groups[0]["step"] == 2
    assert set(optimizer.state[parameters[0]]) == {"exp_avg", "exp_avg_sq"}


def test_step_restored_state_continues_as_if_never_interrupted() -> None:
    first, second = _parameters()[:1], _parameters()[:1]
    whole, before = HostAdam(first, lr=0.1), HostAdam(second, lr=0.1)
    for optimizer, parameters in ((whole, first), (before, second)):
        parameters[0].grad = torch.full((5, 3), 0.3)
        optimizer.step()
    after = HostAdam(second, lr=0.1)
    after.load_state_dict(before.state_dict())
    for optimizer, parameters in ((whole, first), (after, second)):
        parameters[0].grad = torch.full((5, 3), -0.7)
        optimizer.step()
    assert torch.equal(first[0], second[0])


def test_options_that_would_be_ignored_are_refused() -> None:
    with pytest.raises(ValueError, match="always corrects the bias"):
        HostAdam(_parameters(), bias_correction=False)
    with pytest.raises(ValueError, match="takes no closure"):
        HostAdam(_parameters()).step(lambda: 0.0)
