"""Log-probs and entropy on one rank against torch's log_softmax in float64; over ranks in tests/dist. Writing the gradient
over the logits is in test_overwrite_logits.py."""

import math

import pytest
import torch
from torch import Tensor

from slime_ppo.errors import DataError, ParallelError
from slime_ppo.ppo_utils.top_p import TokenSupports, support_log_probs
from slime_ppo.ppo_utils.vocab_parallel import (
    TokenLogProbs,
    VocabShard,
    dense_gradient,
    merge_rows,
    row_statistics,
    vocab_log_probs,
)
from slime_ppo.ppo_utils.vocab_rows import _row_blocks
from tests.helpers.dispatch import Allocations
from tests.helpers.rank_pool import RankPool

NAN = float("nan")


def _run(logits: Tensor, labels: Tensor, *, vocab_size: int, temperature: float = 1.0, entropy: str = "grad") -> TokenLogProbs:
    return vocab_log_probs(logits, labels, vocab_size=vocab_size, temperature=temperature, group=None, entropy=entropy)


def _random(num_tokens: int, width: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn((num_tokens, width), generator=generator, dtype=torch.float64)
    return logits, torch.randint(0, vocab_size, (num_tokens,), generator=generator)


def _expected(logits: Tensor, labels: Tensor, vocab_size: int, temperature: float) -> tuple[Tensor, Tensor]:
    log_p = (logits.double()[:, :vocab_size] / temperature).log_softmax(-1)
    return log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def test_log_probs_and_entropy_of_two_tokens_match_hand_value() -> None:
    out = _run(torch.tensor([[0.0, math.log(3.0)]], dtype=torch.float64), torch.tensor([1]), vocab_size=2)
    assert out.log_probs.item() == pytest.approx(math.log(0.75), rel=1e-12)
    assert out.entropy is not None
    assert out.entropy.item() == pytest.approx(-0.25 * math.log(0.25) - 0.75 * math.log(0.75), rel=1e-12)


@pytest.mark.parametrize(("width", "vocab_size"), [(40, 40), (48, 40), (300_000, 299_999)])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_values_and_gradients_equal_log_softmax(width: int, vocab_size: int, temperature: float) -> None:
    logits, labels = _random(5, width, vocab_size)
    weights = torch.randn((2, 5), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    out = _run(ours, labels, vocab_size=vocab_size, temperature=temperature)
    expected = _expected(theirs, labels, vocab_size, temperature)
    (out.log_probs @ weights[0] + out.entropy @ weights[1]).backward()
    (expected[0] @ weights[0] + expected[1] @ weights[1]).backward()
    assert torch.allclose(out.log_probs, expected[0], rtol=1e-12, atol=1e-12)
    assert torch.allclose(out.entropy, expected[1], rtol=1e-12, atol=1e-12)
    assert torch.allclose(ours.grad, theirs.grad, rtol=1e-10, atol=1e-14)
    assert ours.grad[:, vocab_size:].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_of_low_precision_logits_are_within_2e_6_of_float64(dtype: torch.dtype, temperature: float) -> None:
    logits, labels = _random(64, 2000, 2000)
    # half the size: the bound is about log-probs above -32, where float32 itself resolves it
    logits = (logits / 2).to(dtype)
    out = _run(logits, labels, vocab_size=2000, temperature=temperature)
    assert out.log_probs.dtype == torch.float32
    assert (out.log_probs - _expected(logits, labels, 2000, temperature)[0]).abs().max() <= 2e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_over_a_real_vocabulary_are_within_2e_6_of_float64(dtype: torch.dtype, temperature: float) -> None:
    logits, labels = _random(4, 151_936, 151_936)
    logits = (logits / 2).to(dtype)
    out = _run(logits, labels, vocab_size=151_936, temperature=temperature)
    log_probs, entropy = _expected(logits, labels, 151_936, temperature)
    assert (out.log_probs - log_probs).abs().max() <= 2e-6
    assert (out.entropy - entropy).abs().max() <= 4e-6


@pytest.mark.parametrize("entropy", ["none", "grad"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_gradient_matches_finite_differences(entropy: str, temperature: float) -> None:
    logits, labels = _random(3, 7, 6)

    def outputs(x: Tensor) -> tuple[Tensor, ...]:
        out = _run(x, labels, vocab_size=6, temperature=temperature, entropy=entropy)
        return (out.log_probs,) if out.entropy is None else (out.log_probs, out.entropy)

    assert torch.autograd.gradcheck(outputs, logits.requires_grad_())


def test_entropy_as_metric_equals_that_with_gradient_but_has_none() -> None:
    logits, labels = _random(4, 9, 9)
    out = _run(logits.requires_grad_(), labels, vocab_size=9, entropy="metric")
    assert out.entropy is not None and not out.entropy.requires_grad and out.log_probs.requires_grad
    assert torch.equal(out.entropy, _run(logits, labels, vocab_size=9).entropy)
    assert _run(logits, labels, vocab_size=9, entropy="none").entropy is None


@pytest.mark.parametrize("entropy", ["none", "grad"])
def test_nan_row_whose_upstream_gradient_is_zero_gets_zero_gradient(entropy: str) -> None:
    logits, labels = _random(3, 5, 5)
    logits[1] = NAN
    logits.requires_grad_()
    out = _run(logits, labels, vocab_size=5, entropy=entropy)
    keep = torch.tensor([True, False, True])
    total = torch.where(keep, out.log_probs, 0.0).sum()
    if out.entropy is not None:
        total = total + torch.where(keep, out.entropy, 0.0).sum()
    total.backward()
    assert logits.grad is not None and logits.grad[1].eq(0).all()
    assert torch.isfinite(logits.grad).all() and logits.grad[0].ne(0).any()


def test_minus_infinity_logits_have_no_probability_and_finite_gradients() -> None:
    logits = torch.tensor([[0.0, -math.inf, 1.0]], dtype=torch.float64, requires_grad=True)
    out = _run(logits, torch.tensor([0]), vocab_size=3)
    (out.log_probs.sum() + out.entropy.sum()).backward()
    expected = _expected(torch.tensor([[0.0, 1.0]]), torch.tensor([0]), 2, 1.0)
    assert torch.allclose(out.log_probs, expected[0]) and torch.allclose(out.entropy, expected[1])
    assert torch.isfinite(logits.grad).all() and logits.grad[0, 1] == 0


def test_row_of_minus_infinity_with_zero_upstream_gradient_leaves_the_others_alone() -> None:
    logits, labels = _random(3, 6, 6)
    logits[1] = -math.inf
    logits.requires_grad_()
    out = _run(logits, labels, vocab_size=6)
    keep = torch.tensor([True, False, True])
    (torch.where(keep, out.log_probs, 0.0) + torch.where(keep, out.entropy, 0.0)).sum().backward()
    log_probs, entropy = _expected(logits.detach()[keep], labels[keep], 6, 1.0)
    assert torch.allclose(out.log_probs[keep], log_probs) and torch.allclose(out.entropy[keep], entropy)
    assert logits.grad is not None and torch.isfinite(logits.grad).all() and logits.grad[1].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_logits_of_ten_thousand_give_hand_values_and_finite_gradients(dtype: torch.dtype) -> None:
    """Row 0: the label leads by 2e4, probability 1. Row 1: it trails by 2e4, log-prob -2e4 exactly. Row 2: two equal
    logits of 1e4, log-prob -log 2, however large they are. The gradient goes by the
    logit's distance to the row's maximum, so that it is as exact as with small logits."""
    rows = [[1e4, -1e4, -1e4], [-1e4, 1e4, -1e4], [1e4, 1e4, -1e4]]
    logits = torch.tensor(rows, dtype=dtype, requires_grad=True)
    out = _run(logits, torch.tensor([0, 0, 0]), vocab_size=3)
    (out.log_probs + out.entropy).sum().backward()
    assert out.log_probs.tolist() == pytest.approx([0.0, -2e4, -math.log(2.0)], rel=1e-6)
    assert out.entropy.tolist() == pytest.approx([0.0, 0.0, math.log(2.0)], rel=1e-6)
    expected = [[0.0, 0.0, 0.0], [1.0, -1.0, 0.0], [0.5, -0.5, 0.0]]
    assert torch.allclose(logits.grad, torch.tensor(expected, dtype=dtype), rtol=4 * torch.finfo(dtype).eps, atol=1e-9)


@pytest.mark.parametrize("size", [0.0, 1e3, 1e4])
@pytest.mark.parametrize("temperature", [1.0, 1e-3])
def test_gradients_of_large_logits_are_as_exact_as_those_of_log_softmax(size: float, temperature: float) -> None:
    """Logits about `size`, apart by a few temperatures. The float32 logits are given, so that float64 gives the truth. From
    the maximum z is exact to 2^-24 of itself, |z| <= 10, and the sum of the 50 exponentials adds a few roundings: 3e-6 of the
    largest entry. A log-sum-exp in one float32 is off by 2^-11 at 1e4: 5e-4 at temperature 1, all at 1e-3."""
    logits = (size + temperature * torch.randn((8, 50), generator=torch.Generator().manual_seed(6))).requires_grad_()
    labels = torch.arange(8)
    out = _run(logits, labels, vocab_size=50, temperature=temperature)
    supports = TokenSupports(torch.arange(50).repeat(8), torch.full((8,), 50))
    options = {"vocab_size": 50, "temperature": temperature, "group": None, "entropy": "grad"}
    sparse = support_log_probs(logits, labels, supports, **options)
    exact = logits.detach().double().requires_grad_()
    expected = _expected(exact, labels, 50, temperature)
    (wanted,) = torch.autograd.grad(expected[0].sum() + expected[1].sum(), exact)
    for found in (out, sparse):
        (grad,) = torch.autograd.grad(found.log_probs.sum() + found.entropy.sum(), logits)
        assert (grad - wanted).abs().max() <= 3e-6 * wanted.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_entropy_gradient_at_minus_infinity_stays_finite_under_a_large_upstream_gradient(dtype: torch.dtype) -> None:
    logits = torch.tensor([[0.0, -math.inf, 0.01]], dtype=dtype, requires_grad=True)
    supports = TokenSupports(torch.arange(3), torch.tensor([3]))
    options = {"vocab_size": 3, "temperature": 1e-2, "group": None, "entropy": "grad"}
    for out in (
        vocab_log_probs(logits, torch.tensor([0]), **options),
        support_log_probs(logits, torch.tensor([0]), supports, **options),
    ):
        (grad,) = torch.autograd.grad(1e30 * out.entropy.sum(), logits)
        assert torch.isfinite(grad).all() and grad[0, 1] == 0 and grad[0, 0] > 0


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
def test_labels_of_any_integer_type_give_the_same(dtype: torch.dtype) -> None:
    logits, labels = _random(5, 9, 9)
    assert torch.equal(_run(logits, labels.to(dtype), vocab_size=9).log_probs, _run(logits, labels, vocab_size=9).log_probs)
    column, _ = VocabShard(start=3, num_real=4, group=None).local(labels.to(dtype))
    # multiplied by a stride, a column of 32 bits overflows
    assert column.dtype == torch.int64


@pytest.mark.parametrize("shape", [(1,), (4,), (5, 1)])
def test_labels_that_do_not_fit_the_rows_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(DataError, match="do not agree; expected one label per row"):
        _run(torch.zeros((5, 9)), torch.zeros(shape, dtype=torch.int64), vocab_size=9)


def test_blocks_of_rows_are_larger_on_a_device() -> None:
    """A CPU's blocks stay in its cache; "meta" stands for any other device."""
    assert len(list(_row_blocks(torch.empty((64, 100_000))))) == 13
    assert len(list(_row_blocks(torch.empty((64, 100_000), device="meta")))) == 1


def test_label_outside_the_real_vocabulary_pushes_every_column_down() -> None:
    """Without its column the gradient of the log-prob is -p: the softmax's part alone."""
    logits, _ = _random(2, 6, 4)
    logits.requires_grad_()
    _run(logits, torch.tensor([-1, 5]), vocab_size=4, entropy="none").log_probs.sum().backward()
    assert torch.allclose(logits.grad[:, :4], -logits.detach()[:, :4].softmax(-1)) and logits.grad[:, 4:].eq(0).all()


@pytest.mark.parametrize("label", [-1, 4, 6])
def test_label_outside_the_real_vocabulary_has_log_prob_minus_infinity(label: int) -> None:
    out = _run(torch.randn(1, 6), torch.tensor([label]), vocab_size=4)
    assert out.log_probs.item() == -math.inf


def test_padding_columns_may_hold_anything() -> None:
    logits, labels = _random(3, 6, 4)
    filled = logits.clone()
    filled[:, 4:] = NAN
    assert torch.equal(_run(filled, labels, vocab_size=4).log_probs, _run(logits, labels, vocab_size=4).log_probs)


def test_no_tokens_give_empty_results() -> None:
    logits = torch.zeros((0, 5), requires_grad=True)
    _run(logits, torch.zeros(0, dtype=torch.int64), vocab_size=5).log_probs.sum().backward()
    assert logits.grad is not None and logits.grad.shape == (0, 5)


def test_shard_of_padding_only_has_empty_statistics_and_zero_gradient() -> None:
    logits, labels, shard = torch.full((2, 3), NAN), torch.tensor([0, 5]), VocabShard(start=9, num_real=0, group=None)
    stats = row_statistics(logits, labels, shard, temperature=0.7, with_entropy=True)
    assert stats.tolist() == [[-math.inf, 0.0, 0.0, -math.inf]] * 2
    upstream = {"grad_log_probs": torch.ones(2), "grad_entropy": torch.ones(2)}
    grad = dense_gradient(logits, labels, shard, torch.zeros((2, 2)), torch.ones(2), temperature=0.7, **upstream)
    assert grad.shape == (2, 3) and grad.eq(0).all()


def test_statistics_of_three_shards_merge_into_those_of_one() -> None:
    """The second shard is padding from its third column on, the third is padding only; in row 0 the first has -inf only."""
    logits, labels = _random(4, 12, 6)
    logits[0, :4], labels[0] = -math.inf, 5
    shards = [VocabShard(start=start, num_real=num, group=None) for start, num in [(0, 4), (4, 2), (8, 0)]]
    parts = [
        row_statistics(part, labels, shard, temperature=0.7, with_entropy=True)
        for part, shard in zip(logits.split(4, 1), shards, strict=True)
    ]
    totals = merge_rows(torch.stack(parts), temperature=0.7)
    log_probs, entropy = _expected(logits[1:], labels[1:], 6, 0.7)
    first = _expected(logits[:1, 4:6], labels[:1] - 4, 2, 0.7)
    assert torch.allclose(totals.log_probs(0.7), torch.cat([first[0], log_probs]))
    assert torch.allclose(totals.entropy, torch.cat([first[1], entropy]))


@pytest.mark.parametrize("entropy", ["none", "grad"])
def test_second_derivative_is_refused(entropy: str) -> None:
    logits, labels = _random(2, 5, 5)
    logits.requires_grad_()
    out = _run(logits, labels, vocab_size=5, entropy=entropy)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad((out.log_probs if out.entropy is None else out.entropy).sum(), logits, create_graph=True)


@pytest.mark.parametrize("entropy", ["none", "metric", "grad"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_the_gradient_is_as_large_as_the_logits(entropy: str, dtype: torch.dtype) -> None:
    num_tokens, width = 64, 100_000
    logits = torch.zeros((num_tokens, width), dtype=dtype, requires_grad=True)
    with Allocations(logits.nbytes // 2) as forward:
        out = _run(logits, torch.arange(num_tokens), vocab_size=width - 3, temperature=0.7, entropy=entropy)
    with Allocations(logits.nbytes // 2) as backward:
        (out.log_probs.sum() if entropy != "grad" else out.log_probs.sum() + out.entropy.sum()).backward()
    assert forward.names == [] and backward.names == ["aten.empty_like.default"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_collectives_are_one_forward_and_none_backward(rank_pool: RankPool, overwrite: bool) -> None:
    for forward, backward in rank_pool.run("tests.helpers.vocab_cases:collectives_of_rank", world=2, overwrite=overwrite):
        assert forward == ["c10d._allgather_base_.default"] and backward == []


def test_fewer_columns_than_the_vocabulary_are_refused() -> None:
    with pytest.raises(ParallelError, match="5 logit columns each hold fewer than the 6 ids"):
        _run(torch.zeros(1, 5), torch.tensor([0]), vocab_size=6)
