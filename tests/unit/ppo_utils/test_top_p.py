"""Log-probs over a recorded support against a masked log_softmax in float64; over ranks in tests/dist."""

import math

import pytest
import torch
from torch import Tensor

from slime_ppo.errors import DataError
from slime_ppo.ppo_utils.top_p import SupportLogProbs, support_log_probs

NAN = float("nan")
LABELS = torch.tensor([1, 4, 0, 2])
# the second row lacks its label, the third is empty, the last holds its label only
IDS = torch.tensor([0, 1, 5, 2, 3, 2], dtype=torch.int32)
COUNTS = torch.tensor([3, 2, 0, 1], dtype=torch.int32)
SUPPORTS = [[0, 1, 5], [2, 3, 4], [0], [2]]


def _logits() -> Tensor:
    return 3 * torch.randn((4, 8), generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _run(logits: Tensor, entropy: str = "grad", temperature: float = 0.7) -> SupportLogProbs:
    return support_log_probs(logits, LABELS, IDS, COUNTS, vocab_size=6, temperature=temperature, group=None, entropy=entropy)


def _expected(logits: Tensor, temperature: float = 0.7) -> list[Tensor]:
    z = logits[:, :6] / temperature
    keep = torch.zeros(4, 6, dtype=torch.bool)
    for row, ids in enumerate(SUPPORTS):
        keep[row, ids] = True
    full = z.log_softmax(-1)
    restricted = z.masked_fill(~keep, -math.inf).log_softmax(-1)
    picked = [x.gather(1, LABELS[:, None])[:, 0] for x in (restricted, full)]
    return [*picked, full.exp().masked_fill(keep, 0.0).sum(-1), -(full.exp() * full).sum(-1)]


def test_support_log_probs_of_one_row_match_hand_value() -> None:
    logits = torch.tensor([[1.0, 2.0, 4.0, 1.0]]).double().log()
    out = support_log_probs(
        logits,
        torch.tensor([1]),
        torch.tensor([0, 1]),
        torch.tensor([2]),
        vocab_size=4,
        temperature=1.0,
        group=None,
        entropy="none",
    )
    assert out.log_probs.item() == pytest.approx(math.log(2 / 3), rel=1e-12)
    assert out.full_log_probs.item() == pytest.approx(math.log(2 / 8), rel=1e-12)
    assert out.outside_mass.item() == pytest.approx(5 / 8, rel=1e-12)
    assert out.entropy is None


def test_support_log_probs_values_equal_a_masked_softmax() -> None:
    out = _run(_logits())
    for found, expected in zip(
        (out.log_probs, out.full_log_probs, out.outside_mass, out.entropy), _expected(_logits()), strict=True
    ):
        assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12)
    assert out.log_probs[2:].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1), (0, 1, 3)])
def test_support_log_probs_gradients_equal_a_masked_softmax(used: tuple[int, ...]) -> None:
    weights = torch.randn((4, 4), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    ours, theirs = _logits().requires_grad_(), _logits().requires_grad_()
    out = _run(ours)
    columns = (out.log_probs, out.full_log_probs, out.outside_mass, out.entropy)
    torch.stack([columns[k] @ weights[k] for k in used]).sum().backward()
    expected = _expected(theirs)
    torch.stack([expected[k] @ weights[k] for k in used]).sum().backward()
    assert torch.allclose(ours.grad, theirs.grad, rtol=1e-10, atol=1e-12)
    if used == (0,):
        outside = torch.ones(4, 8, dtype=torch.bool)
        for row, ids in enumerate(SUPPORTS):
            outside[row, ids] = False
        assert ours.grad[outside].eq(0).all() and ours.grad[2:].eq(0).all()


def test_support_log_probs_gradient_matches_finite_differences() -> None:
    assert torch.autograd.gradcheck(lambda x: (_run(x).log_probs, _run(x).full_log_probs), _logits().requires_grad_())


def test_support_log_probs_bfloat16_logits_are_computed_in_float32() -> None:
    logits = _logits().bfloat16().requires_grad_()
    out = _run(logits)
    out.log_probs.sum().backward()
    assert (out.log_probs - _expected(logits.double())[0]).abs().max() <= 2e-6
    assert logits.grad is not None and logits.grad.dtype == torch.bfloat16


def test_support_log_probs_minus_infinity_outside_the_support_gives_finite_gradients() -> None:
    logits = _logits()
    logits[0, [2, 3, 4]] = -math.inf
    logits.requires_grad_()
    out = _run(logits)
    (out.log_probs.sum() + out.full_log_probs.sum() + out.entropy.sum()).backward()
    assert torch.isfinite(out.log_probs).all() and torch.isfinite(logits.grad).all()
    assert out.outside_mass[0].item() == pytest.approx(0.0, abs=1e-12)


def test_support_log_probs_nan_row_without_upstream_gradient_gets_zero_gradient() -> None:
    logits = _logits()
    logits[1] = NAN
    logits.requires_grad_()
    out = _run(logits)
    keep = torch.tensor([True, False, True, True])
    (torch.where(keep, out.log_probs, 0.0).sum() + torch.where(keep, out.full_log_probs, 0.0).sum()).backward()
    assert logits.grad[1].eq(0).all() and torch.isfinite(logits.grad).all() and logits.grad[0].ne(0).any()


def test_support_log_probs_second_derivative_is_refused() -> None:
    logits = _logits().requires_grad_()
    log_probs = _run(logits).log_probs
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(log_probs.sum(), logits, create_graph=True)


def test_support_log_probs_counts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(DataError, match="add up to 7"):
        support_log_probs(
            _logits(), LABELS, IDS, COUNTS + torch.tensor([0, 0, 1, 0]), vocab_size=6, temperature=1.0, group=None, entropy="none"
        )
    with pytest.raises(DataError, match="do not agree"):
        support_log_probs(_logits(), LABELS, IDS, COUNTS[:3], vocab_size=6, temperature=1.0, group=None, entropy="none")
