"""What must not change the losses of a step: how it is cut into micro-batches, the order of samples, masked tokens anywhere,
samples without a trainable token. Loss and gradient of every trainable token, for each policy loss with the value and KL loss.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slime_ppo.ppo_utils.aggregate import loss_sum
from slime_ppo.ppo_utils.denominator import make_denominator
from slime_ppo.ppo_utils.kl import kl_loss, unbiased_kl_loss
from slime_ppo.ppo_utils.policy_loss import ClipRange, PolicyInputs
from slime_ppo.ppo_utils.registries import POLICY_LOSSES, load
from slime_ppo.ppo_utils.value_loss import clipped_value_loss

NAN = float("nan")
MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
# columns of a sample: log-probs, old log-probs, reference log-probs, advantages, values, old values, returns
NUM_COLUMNS = 7
CLIPS = {"ppo": ClipRange(0.2, 0.3, 1.5), "gspo": ClipRange(0.1, 0.2), "cispo": ClipRange(None, 0.2)}


@dataclass(frozen=True)
class _Sample:
    """`columns` [NUM_COLUMNS, R], NaN where masked."""

    columns: Tensor
    mask: Tensor
    trajectory: int


@dataclass(frozen=True)
class _Result:
    """Loss of some micro-batches, and the gradient of log-probs and values at each sample's trainable tokens [2, n]."""

    loss: float
    gradients: list[Tensor]


def _share(samples: Sequence[_Sample], chosen: Sequence[int], mode: str, policy_loss: str) -> _Result:
    """Actor and critic loss of one micro-batch of the step `samples`."""
    denominator = make_denominator(
        [int(s.mask.sum()) for s in samples], [s.trajectory for s in samples], mode=mode, length_norm=3.0
    ).select(chosen)
    batch = [samples[row] for row in chosen]
    columns, mask = torch.cat([s.columns for s in batch], 1), torch.cat([s.mask for s in batch])
    lens = torch.tensor([len(s.mask) for s in batch])
    log_probs, old, ref, advantages, values, old_values, returns = columns
    log_probs, values = log_probs.clone().requires_grad_(), values.clone().requires_grad_()
    function = load(POLICY_LOSSES.entries[policy_loss].path)
    loss = function(PolicyInputs(log_probs, old, advantages, mask, lens), CLIPS[policy_loss]).loss
    loss = loss + 0.1 * kl_loss("k3", log_probs, ref, mask).kl
    loss = loss + 0.1 * unbiased_kl_loss("k1", log_probs, ref, log_probs - old, mask).kl
    loss = loss + clipped_value_loss(values, old_values, returns, mask, value_clip=0.2).loss
    total = loss_sum(loss, mask, lens, denominator)
    total.backward()
    assert log_probs.grad is not None and values.grad is not None
    assert bool((log_probs.grad[~mask] == 0).all()) and bool((values.grad[~mask] == 0).all())
    gradients = torch.stack([log_probs.grad, values.grad]).split(lens.tolist(), 1)
    return _Result(total.item(), [g[:, s.mask] for g, s in zip(gradients, batch, strict=True)])


def _whole(samples: Sequence[_Sample], mode: str, policy_loss: str) -> _Result:
    return _share(samples, range(len(samples)), mode, policy_loss)


def _require_same(found: _Result, expected: _Result) -> None:
    assert found.loss == pytest.approx(expected.loss, rel=1e-12, abs=1e-12)
    for one, other in zip(found.gradients, expected.gradients, strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-13)


def _sample(mask: Sequence[bool], trajectory: int, generator: torch.Generator) -> _Sample:
    """Numbers of a spread at which all branches of the clips are met."""
    kept = torch.tensor(mask, dtype=torch.bool)
    columns = 0.4 * torch.randn((NUM_COLUMNS, len(mask)), generator=generator, dtype=torch.float64)
    return _Sample(columns.where(kept, NAN), kept, trajectory)


@st.composite
def _steps(draw: st.DrawFn) -> list[_Sample]:
    masks = draw(st.lists(st.lists(st.booleans(), min_size=1, max_size=5), min_size=1, max_size=6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    return [_sample(mask, draw(st.integers(0, 3)), generator) for mask in masks]


def _property(examples: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A hypothesis test over steps, reducers and policy losses."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        drawn = given(step=_steps(), mode=st.sampled_from(MODES), policy_loss=st.sampled_from(sorted(CLIPS)), data=st.data())
        return settings(max_examples=examples, deadline=None, database=None)(drawn(test))

    return decorate


@_property(40)
def test_losses_any_partition_and_order_of_samples_gives_the_same(
    step: list[_Sample], mode: str, policy_loss: str, data: st.DataObject
) -> None:
    expected = _whole(step, mode, policy_loss)
    order = data.draw(st.permutations(range(len(step))))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(step)), max_size=3)) | {0, len(step)})
    parts = [order[begin:end] for begin, end in zip(cuts[:-1], cuts[1:], strict=True)]
    shares = [_share(step, part, mode, policy_loss) for part in parts]
    gradients = {row: g for part, share in zip(parts, shares, strict=True) for row, g in zip(part, share.gradients, strict=True)}
    found = _Result(sum(share.loss for share in shares), [gradients[row] for row in range(len(step))])
    _require_same(found, expected)


@_property(40)
def test_losses_masked_tokens_anywhere_change_nothing(
    step: list[_Sample], mode: str, policy_loss: str, data: st.DataObject
) -> None:
    padded = []
    for sample in step:
        gaps = data.draw(st.lists(st.integers(0, 2), min_size=len(sample.mask) + 1, max_size=len(sample.mask) + 1))
        kept = [place + sum(gaps[: place + 1]) for place in range(len(sample.mask))]
        columns = torch.full((NUM_COLUMNS, len(sample.mask) + sum(gaps)), NAN, dtype=torch.float64)
        mask = torch.zeros(columns.shape[1], dtype=torch.bool)
        columns[:, kept], mask[kept] = sample.columns, sample.mask
        padded.append(_Sample(columns, mask, sample.trajectory))
    _require_same(_whole(padded, mode, policy_loss), _whole(step, mode, policy_loss))


@_property(30)
def test_losses_sample_without_trainable_tokens_is_as_if_absent(
    step: list[_Sample], mode: str, policy_loss: str, data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(step)))
    empty = _sample([False] * data.draw(st.integers(0, 3)), data.draw(st.integers(0, 5)), torch.Generator())
    found = _whole([*step[:place], empty, *step[place:]], mode, policy_loss)
    assert found.gradients.pop(place).numel() == 0
    _require_same(found, _whole(step, mode, policy_loss))


def test_losses_of_the_drawn_spread_meet_every_clip() -> None:
    """The properties above are about all branches: at their spread each clip is active somewhere."""
    sample = _sample([True] * 60, 0, torch.Generator().manual_seed(0))
    log_probs, old, _, advantages, values, old_values, returns = sample.columns
    inputs = PolicyInputs(log_probs, old, advantages, sample.mask, torch.tensor([1] * 60))
    for name, clip in CLIPS.items():
        found = load(POLICY_LOSSES.entries[name].path)(inputs, clip)
        assert found.clipped_high.any() and bool(found.clipped_low.any()) == (clip.low is not None)
        assert bool(found.clipped_dual.any()) == (clip.dual is not None)
    assert clipped_value_loss(values, old_values, returns, sample.mask, value_clip=0.2).clipped.any()
