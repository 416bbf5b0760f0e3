"""vocab_log_probs(overwrite_logits=True): the gradient in the logits' memory equals the one in memory of its own, bit for bit,
and every use that this would break raises."""

import pytest
import torch
from torch import Tensor

from slime_ppo.ppo_utils.vocab_parallel import TokenLogProbs, VocabShard, dense_gradient, vocab_log_probs
from tests.helpers.dispatch import Allocations

NAN = float("nan")
LABELS = torch.tensor([0, 3, 9, 7, 12])
VOCAB, WIDTH = 13, 16


def _run(logits: Tensor, labels: Tensor = LABELS, *, temperature: float = 0.7, entropy: str = "grad") -> TokenLogProbs:
    """With the gradient over the logits; three of the columns are padding."""
    vocab_size = logits.shape[1] - 3
    return vocab_log_probs(
        logits, labels, vocab_size=vocab_size, temperature=temperature, group=None, entropy=entropy, overwrite_logits=True
    )


def _loss(out: TokenLogProbs) -> Tensor:
    """Weighs every row differently and row 2 not at all, where it may be NaN."""
    weights = torch.tensor([1.0, -0.5, 0.0, 2.0, 0.3], dtype=out.log_probs.dtype)
    terms = [out.log_probs] if out.entropy is None else [out.log_probs, 3 * out.entropy]
    return sum(torch.where(weights == 0, 0.0, term * weights).sum() for term in terms)


def _source(dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    source = 3 * torch.randn((len(LABELS), WIDTH), generator=generator, dtype=torch.float64)
    source[2, 1] = NAN
    source[:, VOCAB:] = NAN
    return source.to(dtype).requires_grad_()


def _same(x: Tensor) -> Tensor:
    return x * 1.0


def _transposed(x: Tensor) -> Tensor:
    return (x.t() * 1.0).t()


def _sliced(x: Tensor) -> Tensor:
    """Columns of a wider buffer, every second row: neither dimension contiguous."""
    return torch.nn.functional.pad(x, (2, 5)).repeat_interleave(2, 0)[::2, 2 : 2 + WIDTH]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", [_same, _transposed, _sliced])
@pytest.mark.parametrize("entropy", ["none", "metric", "grad"])
def test_overwritten_logits_hold_the_gradient_bit_for_bit(dtype: torch.dtype, layout, entropy: str) -> None:
    ours, theirs = _source(dtype), _source(dtype)
    logits = layout(ours)
    found = _run(logits, entropy=entropy)
    expected = vocab_log_probs(layout(theirs), LABELS, vocab_size=VOCAB, temperature=0.7, group=None, entropy=entropy)
    assert torch.equal(found.log_probs.nan_to_num(), expected.log_probs.nan_to_num())
    _loss(found).backward() if entropy == "grad" else _loss(TokenLogProbs(found.log_probs, None)).backward()
    _loss(expected).backward() if entropy == "grad" else _loss(TokenLogProbs(expected.log_probs, None)).backward()
    assert torch.equal(ours.grad, theirs.grad) and torch.isfinite(theirs.grad).all() and theirs.grad[0].ne(0).any()
    assert torch.equal(logits.detach(), theirs.grad)
    assert ours.grad[:, VOCAB:].eq(0).all() and ours.grad[2].eq(0).all()


def test_gradient_reaches_both_sides_of_the_matmul_that_made_the_logits() -> None:
    generator = torch.Generator().manual_seed(1)
    given = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((5, 4), (4, WIDTH))]
    gradients = []
    for overwrite in (False, True):
        hidden, weight = (tensor.clone().requires_grad_() for tensor in given)
        options = {"vocab_size": VOCAB, "temperature": 0.7, "group": None, "entropy": "grad"}
        _loss(vocab_log_probs(hidden @ weight, LABELS, overwrite_logits=overwrite, **options)).backward()
        gradients.append((hidden.grad, weight.grad))
    assert all(torch.equal(found, expected) for found, expected in zip(*gradients, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("entropy", ["metric", "grad"])
def test_overwriting_allocates_nothing_as_large_as_the_logits(dtype: torch.dtype, entropy: str) -> None:
    num_tokens, width = 64, 100_000
    hidden, weight = torch.ones((num_tokens, 1), dtype=dtype, requires_grad=True), torch.zeros((1, width), dtype=dtype)
    logits = hidden @ weight
    with Allocations(logits.nbytes // 2) as seen:
        out = _run(logits, torch.arange(num_tokens), entropy=entropy)
        (out.log_probs.sum() if entropy == "metric" else out.log_probs.sum() + out.entropy.sum()).backward()
    assert seen.names == [] and hidden.grad is not None


def test_no_tokens_and_a_shard_of_padding_only_are_overwritten_with_zeros() -> None:
    empty = torch.zeros((0, 5), requires_grad=True)
    _run(empty * 1.0, LABELS[:0]).log_probs.sum().backward()
    assert empty.grad is not None and empty.grad.shape == (0, 5)
    logits, ones = torch.full((2, 3), NAN), torch.ones(2)
    upstream = {"grad_log_probs": ones, "grad_entropy": ones, "temperature": 0.7, "out": logits}
    found = dense_gradient(logits, LABELS[:2], VocabShard(start=16, num_real=0, group=None), torch.ones((2, 2)), ones, **upstream)
    assert found is logits and logits.eq(0).all()


def test_second_backward_is_refused() -> None:
    logits = _source() * 1.0
    loss = _loss(_run(logits))
    loss.backward(retain_graph=True)
    written = logits.detach().clone()
    with pytest.raises(RuntimeError, match="second backward through log-probs with overwrite_logits=True"):
        loss.backward()
    assert torch.equal(logits.detach(), written)


def test_second_derivative_is_refused_and_nothing_is_written() -> None:
    source = _source()
    logits = source * 1.0
    before = logits.detach().clone()
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(_loss(_run(logits)), source, create_graph=True)
    assert torch.equal(logits.detach().nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize("view", [lambda leaf: leaf, lambda leaf: leaf[:, :WIDTH], lambda leaf: leaf.t().t()])
def test_leaf_that_requires_grad_and_its_views_are_refused(view) -> None:
    leaf = _source()
    with pytest.raises(ValueError, match=r"over a leaf tensor of shape \(5, 16\) that requires grad"):
        _run(view(leaf))


def test_expanded_logits_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(5, 16\) with strides \(16, 0\) shares them|strides \(0, 1\) shares them"):
        _run((_source()[:1] * 1.0).expand(5, WIDTH))


def test_producer_that_needs_the_logits_raises_instead_of_a_wrong_gradient() -> None:
    """tanh's backward reads its result, which is the gradient by then; autograd's count of writes tells."""
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        _loss(_run(torch.tanh(_source()))).backward()


def test_other_consumer_of_the_logits_raises_instead_of_a_wrong_gradient() -> None:
    logits = _source().nan_to_num(0.0)
    total = logits.square().sum()  # its backward reads the logits, after ours: autograd goes from the last operation back
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (total + _loss(_run(logits))).backward()


def test_consumer_that_does_not_need_their_values_gets_its_share_of_the_gradient() -> None:
    ours, theirs = _source(), _source()
    logits = ours.nan_to_num(0.0)
    (logits[:, :4].sum() + _loss(_run(logits))).backward()
    logits = theirs.nan_to_num(0.0)
    options = {"vocab_size": VOCAB, "temperature": 0.7, "group": None, "entropy": "grad"}
    (logits[:, :4].sum() + _loss(vocab_log_probs(logits, LABELS, **options))).backward()
    assert torch.equal(ours.grad, theirs.grad)


def test_logits_changed_before_the_backward_pass_raise() -> None:
    logits = _source() * 1.0
    loss = _loss(_run(logits))
    with torch.no_grad():
        logits.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_logits_without_gradient_are_not_written() -> None:
    logits = _source().detach()
    before = logits.clone()
    out = _run(logits)
    assert not out.log_probs.requires_grad and torch.equal(logits.nan_to_num(), before.nan_to_num())
    with torch.no_grad():
        assert torch.equal(_run(_source() * 1.0).log_probs.nan_to_num(), out.log_probs.nan_to_num())
