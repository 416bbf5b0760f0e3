"""Log-probs over recorded supports against a masked log_softmax in float64, on one rank and over ranks."""

import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slime_ppo.errors import DataError
from slime_ppo.ppo_utils.top_p import (
    SupportLogProbs,
    TokenSupports,
    support_and_vocab_log_probs,
    support_log_probs,
    support_statistics,
)
from slime_ppo.ppo_utils.vocab_parallel import TokenLogProbs, VocabShard, merge_rows
from tests.helpers.dispatch import Allocations, Collectives
from tests.helpers.rank_pool import RankPool

NAN, INF = float("nan"), math.inf
VOCAB, WIDTH = 6, 8
LABELS = torch.tensor([1, 4, 0, 2, 5])
# row 1 lacks its label, row 2 is empty, row 3 holds its label only, row 4 is unrestricted
SUPPORTS = TokenSupports(
    torch.tensor([0, 1, 5, 2, 3, 2]), torch.tensor([3, 2, 0, 1, 0]), torch.tensor([False, False, False, False, True])
)
INSIDE = [[0, 1, 5], [2, 3, 4], [0], [2], [0, 1, 2, 3, 4, 5]]
KEEP = torch.tensor([[column in ids for column in range(WIDTH)] for ids in INSIDE])


def _logits() -> Tensor:
    return 3 * torch.randn((5, WIDTH), generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _sparse(logits: Tensor, supports: TokenSupports = SUPPORTS, entropy: str = "grad", temperature: float = 0.7) -> TokenLogProbs:
    options = {"vocab_size": VOCAB, "temperature": temperature, "group": None, "entropy": entropy}
    return support_log_probs(logits, LABELS, supports, **options)


def _both(logits: Tensor, entropy_support: str = "full", entropy: str = "grad", temperature: float = 0.7) -> SupportLogProbs:
    options = {"vocab_size": VOCAB, "temperature": temperature, "group": None, "entropy": entropy}
    return support_and_vocab_log_probs(logits, LABELS, SUPPORTS, entropy_support=entropy_support, **options)


def _entropy(log_p: Tensor) -> Tensor:
    return -(log_p.exp() * log_p.clamp(min=-1e30)).sum(-1)


def _expected(logits: Tensor, temperature: float = 0.7) -> dict[str, Tensor]:
    """A dense masked softmax."""
    z, keep = logits[:, :VOCAB] / temperature, KEEP[:, :VOCAB]
    full, inside = z.log_softmax(-1), z.masked_fill(~keep, -INF).log_softmax(-1)
    return {
        "log_probs": inside.gather(1, LABELS[:, None])[:, 0],
        "full_log_probs": full.gather(1, LABELS[:, None])[:, 0],
        "outside_mass": full.exp().masked_fill(keep, 0.0).sum(-1),
        "full": _entropy(full),
        "sampled": _entropy(inside),
    }


def test_support_log_probs_of_one_row_match_hand_value() -> None:
    logits = torch.tensor([[1.0, 2.0, 4.0, 1.0]]).double().log()
    case = (logits, torch.tensor([1]), TokenSupports(torch.tensor([0, 1]), torch.tensor([2])))
    options = {"vocab_size": 4, "temperature": 1.0, "group": None}
    sparse = support_log_probs(*case, entropy="metric", **options)
    # 2 of 1 + 2; entropy of (1/3, 2/3)
    assert sparse.log_probs.item() == pytest.approx(math.log(2 / 3), rel=1e-12)
    assert sparse.entropy is not None
    assert sparse.entropy.item() == pytest.approx(math.log(3) / 3 + 2 * math.log(3 / 2) / 3, rel=1e-12)
    both = support_and_vocab_log_probs(*case, entropy="none", **options)
    assert both.log_probs.item() == pytest.approx(math.log(2 / 3), rel=1e-12)
    assert both.full_log_probs.item() == pytest.approx(math.log(2 / 8), rel=1e-12)
    assert both.outside_mass.item() == pytest.approx(5 / 8, rel=1e-12)
    assert both.entropy is None


def test_support_log_probs_gradient_of_one_row_matches_hand_value() -> None:
    logits = torch.tensor([[1.0, 3.0, 4.0]]).double().log().requires_grad_()
    supports = TokenSupports(torch.tensor([0]), torch.tensor([1]))
    options = {"vocab_size": 3, "temperature": 0.5, "group": None, "entropy": "none"}
    support_log_probs(logits, torch.tensor([1]), supports, **options).log_probs.sum().backward()
    # weights 1 and 9 at temperature 0.5: (1[y] - p) / 0.5 on {0, 1}
    assert torch.allclose(logits.grad, torch.tensor([[-0.2, 0.2, 0.0]], dtype=torch.float64), rtol=0, atol=1e-12)
    assert logits.grad[0, 2] == 0


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_support_log_probs_values_equal_a_masked_softmax(temperature: float) -> None:
    expected = _expected(_logits(), temperature)
    sparse = _sparse(_logits(), temperature=temperature)
    assert torch.allclose(sparse.log_probs, expected["log_probs"], rtol=1e-12, atol=1e-12)
    assert torch.allclose(sparse.entropy, expected["sampled"], rtol=1e-12, atol=1e-12)
    for side in ("full", "sampled"):
        both = _both(_logits(), side, temperature=temperature)
        for name in ("log_probs", "full_log_probs", "outside_mass"):
            assert torch.allclose(getattr(both, name), expected[name], rtol=1e-12, atol=1e-12)
        assert torch.allclose(both.entropy, expected[side], rtol=1e-12, atol=1e-12)
    assert sparse.log_probs[2:4].tolist() == [0.0, 0.0] and sparse.entropy[2:4].tolist() == [0.0, 0.0]
    assert both.outside_mass[4] == 0 and both.log_probs[4] == both.full_log_probs[4]


def _weights() -> Tensor:
    return torch.randn((3, 5), generator=torch.Generator().manual_seed(2), dtype=torch.float64)


@pytest.mark.parametrize("entropy", ["none", "grad"])
def test_support_log_probs_gradient_equals_that_of_a_masked_softmax(entropy: str) -> None:
    ours, theirs, weights = _logits().requires_grad_(), _logits().requires_grad_(), _weights()
    out, expected = _sparse(ours, entropy=entropy), _expected(theirs)
    (out.log_probs @ weights[0] + (0.0 if out.entropy is None else out.entropy @ weights[1])).backward()
    (expected["log_probs"] @ weights[0] + (expected["sampled"] @ weights[1] if entropy == "grad" else 0.0)).backward()
    assert torch.allclose(ours.grad, theirs.grad, rtol=1e-10, atol=1e-12)
    assert ours.grad[~KEEP].eq(0).all() and ours.grad[2:4].eq(0).all()


@pytest.mark.parametrize("entropy_support", ["full", "sampled"])
@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 1), (0, 2), (0, 1, 2)])
def test_support_and_vocab_log_probs_gradient_equals_that_of_a_masked_softmax(used: tuple[int, ...], entropy_support: str) -> None:
    ours, theirs, weights = _logits().requires_grad_(), _logits().requires_grad_(), _weights()
    out, expected = _both(ours, entropy_support), _expected(theirs)
    columns = (out.log_probs, out.full_log_probs, out.entropy)
    wanted = (expected["log_probs"], expected["full_log_probs"], expected[entropy_support])
    torch.stack([columns[k] @ weights[k] for k in used]).sum().backward()
    torch.stack([wanted[k] @ weights[k] for k in used]).sum().backward()
    assert torch.allclose(ours.grad, theirs.grad, rtol=1e-10, atol=1e-12)
    assert not out.outside_mass.requires_grad
    if used == (0,) or (used == (2,) and entropy_support == "sampled"):
        assert ours.grad[~KEEP].eq(0).all() and ours.grad[2:4].eq(0).all()


@pytest.mark.parametrize("entropy", ["none", "metric", "grad"])
def test_support_log_probs_gradient_matches_finite_differences(entropy: str) -> None:
    def outputs(x: Tensor) -> tuple[Tensor, ...]:
        out = _sparse(x, entropy=entropy)
        return (out.log_probs, out.entropy) if entropy == "grad" else (out.log_probs,)

    assert torch.autograd.gradcheck(outputs, _logits().requires_grad_())


@pytest.mark.parametrize("entropy_support", ["full", "sampled"])
@pytest.mark.parametrize("entropy", ["none", "metric", "grad"])
def test_support_and_vocab_log_probs_gradient_matches_finite_differences(entropy: str, entropy_support: str) -> None:
    def outputs(x: Tensor) -> tuple[Tensor, ...]:
        out = _both(x, entropy_support, entropy)
        columns = (out.log_probs, out.full_log_probs)
        return (*columns, out.entropy) if entropy == "grad" else columns

    assert torch.autograd.gradcheck(outputs, _logits().requires_grad_())


def test_support_entropy_as_metric_equals_that_with_gradient_but_has_none() -> None:
    logits = _logits().requires_grad_()
    for run in (lambda mode: _sparse(logits, entropy=mode), lambda mode: _both(logits, "sampled", mode)):
        metric = run("metric")
        assert torch.equal(metric.entropy, run("grad").entropy) and not metric.entropy.requires_grad
        assert metric.log_probs.requires_grad and run("none").entropy is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_support_log_probs_of_low_precision_logits_are_computed_in_float32(dtype: torch.dtype) -> None:
    logits = _logits().to(dtype).requires_grad_()
    exact = logits.detach().double().requires_grad_()
    expected = _expected(exact)
    (expected["log_probs"].sum() + expected["sampled"].sum()).backward()
    for out in (_sparse(logits), _both(logits, "sampled")):
        assert out.log_probs.dtype == out.entropy.dtype == torch.float32
        assert (out.log_probs - expected["log_probs"]).abs().max() <= 2e-6
        assert (out.entropy - expected["sampled"]).abs().max() <= 2e-6
        (grad,) = torch.autograd.grad(out.log_probs.sum() + out.entropy.sum(), logits)
        assert grad.dtype == dtype
        assert torch.allclose(grad.double(), exact.grad, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)


def test_support_log_probs_minus_infinity_outside_the_support_changes_nothing() -> None:
    logits, masked = _logits().requires_grad_(), _logits()
    masked[~KEEP] = -INF
    masked.requires_grad_()
    plain, out = _sparse(logits), _sparse(masked)
    assert torch.equal(plain.log_probs, out.log_probs) and torch.equal(plain.entropy, out.entropy)
    both = _both(masked)
    assert both.outside_mass.abs().max() <= 1e-12
    (both.log_probs.sum() + both.full_log_probs.sum() + both.entropy.sum()).backward()
    assert torch.isfinite(masked.grad).all() and masked.grad[~KEEP].eq(0).all()


def test_support_log_probs_minus_infinity_inside_the_support_has_no_probability_and_a_finite_gradient() -> None:
    logits = _logits()
    logits[0, 5] = -INF
    logits.requires_grad_()
    z = logits.detach()[0, [0, 1]] / 0.7
    for out in (_sparse(logits), _both(logits, "sampled")):
        assert out.log_probs[0].item() == pytest.approx(z.log_softmax(0)[1].item(), rel=1e-12)
        assert out.entropy[0].item() == pytest.approx(_entropy(z.log_softmax(0)).item(), rel=1e-12)
        (grad,) = torch.autograd.grad(out.log_probs.sum() + out.entropy.sum(), logits)
        assert torch.isfinite(grad).all() and grad[0, 5] == 0 and grad[0, 0] != 0


def test_support_log_probs_sampled_token_without_probability_is_minus_infinity() -> None:
    logits = _logits()
    logits[0, 1] = -INF
    logits[2] = -INF
    for log_probs in (_sparse(logits).log_probs, _both(logits).log_probs):
        assert log_probs[0] == -INF and log_probs[2] == -INF and torch.isfinite(log_probs[[1, 3, 4]]).all()


@pytest.mark.parametrize("row", [1, 4])
def test_support_log_probs_nan_row_without_upstream_gradient_gets_zero_gradient(row: int) -> None:
    logits = _logits()
    logits[row] = NAN
    logits.requires_grad_()
    keep = torch.arange(5) != row
    for out in (_sparse(logits), _both(logits)):
        assert torch.isnan(out.log_probs[row]) and torch.isfinite(out.log_probs[keep]).all()
        total = torch.where(keep, out.log_probs, 0.0).sum() + torch.where(keep, out.entropy, 0.0).sum()
        (grad,) = torch.autograd.grad(total, logits)
        assert grad[row].eq(0).all() and torch.isfinite(grad).all() and grad[0].ne(0).any()


def test_support_log_probs_padding_columns_may_hold_anything() -> None:
    filled = _logits()
    filled[:, VOCAB:] = NAN
    assert torch.equal(_sparse(filled).log_probs, _sparse(_logits()).log_probs)
    assert torch.equal(_both(filled).full_log_probs, _both(_logits()).full_log_probs)


def test_support_log_probs_of_a_view_with_gaps_equal_those_of_its_copy() -> None:
    wide = torch.randn((5, 3, WIDTH), generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    transposed = torch.randn((WIDTH, 5), generator=torch.Generator().manual_seed(4), dtype=torch.float64).t()
    for view in (wide[:, 1], transposed):
        leaf, copy = view.detach().requires_grad_(), view.clone(memory_format=torch.contiguous_format).requires_grad_()
        _sparse(leaf).log_probs.sum().backward()
        _sparse(copy).log_probs.sum().backward()
        assert torch.equal(_sparse(view).log_probs, _sparse(copy).log_probs) and torch.equal(leaf.grad, copy.grad)


def test_support_log_probs_without_tokens_are_empty() -> None:
    logits, none = torch.zeros((0, WIDTH), requires_grad=True), torch.zeros(0, dtype=torch.int64)
    supports = TokenSupports(none, none, torch.zeros(0, dtype=torch.bool))
    for run in (support_log_probs, support_and_vocab_log_probs):
        out = run(logits, none, supports, vocab_size=VOCAB, temperature=1.0, group=None, entropy="grad")
        out.log_probs.sum().backward()
        assert out.log_probs.shape == (0,) and logits.grad is not None and logits.grad.shape == (0, WIDTH)


def test_support_log_probs_of_more_unrestricted_rows_than_are_copied_at_once_equal_log_softmax() -> None:
    logits = torch.randn((150, WIDTH), generator=torch.Generator().manual_seed(5), dtype=torch.float64, requires_grad=True)
    labels, none = torch.arange(150) % VOCAB, torch.zeros(0, dtype=torch.int64)
    supports = TokenSupports(none, torch.zeros(150, dtype=torch.int64), torch.ones(150, dtype=torch.bool))
    options = {"vocab_size": VOCAB, "temperature": 0.7, "group": None, "entropy": "grad"}
    log_p = (logits[:, :VOCAB] / 0.7).log_softmax(-1)
    upstream = torch.linspace(-1, 1, 150, dtype=torch.float64)
    expected = log_p.gather(1, labels[:, None])[:, 0] @ upstream + _entropy(log_p).sum()
    (wanted,) = torch.autograd.grad(expected, logits)
    for out in (
        support_log_probs(logits, labels, supports, **options),
        support_and_vocab_log_probs(logits, labels, supports, **options),
    ):
        (grad,) = torch.autograd.grad(out.log_probs @ upstream + out.entropy.sum(), logits)
        assert torch.allclose(grad, wanted, rtol=1e-10, atol=1e-14)


def test_support_log_probs_second_derivative_is_refused() -> None:
    logits = _logits().requires_grad_()
    for log_probs in (_sparse(logits).log_probs, _both(logits).log_probs):
        with pytest.raises(NotImplementedError, match="no second derivative"):
            torch.autograd.grad(log_probs.sum(), logits, create_graph=True)


@pytest.mark.parametrize(
    ("supports", "message"),
    [
        (TokenSupports(SUPPORTS.ids, SUPPORTS.counts + torch.tensor([0, 0, 1, 0, 0])), "add up to 7, but there are 6"),
        (TokenSupports(SUPPORTS.ids, torch.tensor([3, 3, -1, 1, 0])), "1 support counts are negative.*validate_support names"),
        (TokenSupports(SUPPORTS.ids, SUPPORTS.counts[:4]), "do not agree"),
        (TokenSupports(SUPPORTS.ids, SUPPORTS.counts, torch.tensor([True])), "do not agree"),
        (TokenSupports(SUPPORTS.ids, SUPPORTS.counts, torch.tensor([False, True, False, False, False])), "hold 2 support ids"),
    ],
)
def test_support_log_probs_supports_that_do_not_fit_are_refused(supports: TokenSupports, message: str) -> None:
    for run in (support_log_probs, support_and_vocab_log_probs):
        with pytest.raises(DataError, match=message):
            run(_logits(), LABELS, supports, vocab_size=VOCAB, temperature=1.0, group=None, entropy="none")


@st.composite
def _rows(draw: st.DrawFn) -> tuple[list[int], list[list[int]]]:
    """Labels, and rows of distinct ids, in any order, with or without the label."""
    labels = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6))
    return labels, [draw(st.lists(st.integers(0, VOCAB - 1), unique=True)) for _ in labels]


def _run_rows(labels: list[int], rows: list[list[int]]) -> list[Tensor]:
    logits = 3 * torch.randn((len(labels), WIDTH), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    logits.requires_grad_()
    supports = TokenSupports(
        torch.tensor([i for row in rows for i in row], dtype=torch.int64), torch.tensor([len(row) for row in rows])
    )
    options = {"vocab_size": VOCAB, "temperature": 0.7, "group": None, "entropy": "grad"}
    sparse = support_log_probs(logits, torch.tensor(labels), supports, **options)
    both = support_and_vocab_log_probs(logits, torch.tensor(labels), supports, **options)
    (grad,) = torch.autograd.grad(sparse.log_probs.sum() + 2 * sparse.entropy.sum(), logits)
    return [sparse.log_probs, sparse.entropy, both.log_probs, both.outside_mass, grad]


@given(case=_rows(), data=st.data())
@settings(max_examples=40, deadline=None)
def test_support_log_probs_order_of_ids_changes_nothing(case: tuple[list[int], list[list[int]]], data: st.DataObject) -> None:
    labels, rows = case
    shuffled = [data.draw(st.permutations(row)) for row in rows]
    for found, expected in zip(_run_rows(labels, shuffled), _run_rows(labels, rows), strict=True):
        assert torch.allclose(found, expected, rtol=1e-12, atol=1e-14)


@given(case=_rows())
@settings(max_examples=40, deadline=None)
def test_support_log_probs_adding_or_dropping_the_label_changes_nothing(case: tuple[list[int], list[list[int]]]) -> None:
    labels, rows = case
    without = [[i for i in row if i != label] for label, row in zip(labels, rows, strict=True)]
    appended = [[*row, label] for label, row in zip(labels, without, strict=True)]
    expected = _run_rows(labels, rows)
    for changed in (without, appended):
        for found, wanted in zip(_run_rows(labels, changed), expected, strict=True):
            assert torch.allclose(found, wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("entropy", ["none", "metric", "grad"])
def test_support_log_probs_make_nothing_of_the_size_of_the_logits_but_the_gradient(entropy: str) -> None:
    num_tokens, width, num_ids = 16, 3000, 96
    logits = torch.randn((num_tokens, width), requires_grad=True)
    labels, ids = torch.arange(num_tokens), (torch.arange(num_ids) * 31) % width
    unrestricted = torch.zeros(num_tokens, dtype=torch.bool)
    supports = TokenSupports(ids, torch.full((num_tokens,), num_ids // num_tokens), unrestricted)
    options = {"vocab_size": width, "temperature": 0.7, "group": None, "entropy": entropy}
    # twice the ids, which are int64; the logits are 125 times that
    with Allocations(num_bytes=16 * num_ids) as forward:
        out = support_log_probs(logits, labels, supports, **options)
    total = out.log_probs.sum() + (out.entropy.sum() if entropy == "grad" else 0.0)
    with Allocations(num_bytes=16 * num_ids) as backward:
        total.backward()
    assert forward.names == []
    assert backward.names == ["aten.zeros_like.default"]
    with Allocations(num_bytes=4 * num_ids) as anything:
        support_log_probs(logits, labels, supports, **options)
    assert anything.names


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_support_statistics_of_shards_merge_to_those_of_the_whole(num_ranks: int) -> None:
    width = WIDTH // num_ranks
    supports = TokenSupports(SUPPORTS.ids, SUPPORTS.counts)
    parts = []
    for rank, part in enumerate(_logits().chunk(num_ranks, dim=1)):
        shard = VocabShard(rank * width, min(max(VOCAB - rank * width, 0), width), None)
        parts.append(support_statistics(part, LABELS, supports, shard, temperature=0.7))
    totals = merge_rows(torch.stack(parts), temperature=0.7)
    expected = _expected(_logits())
    assert torch.allclose(totals.log_probs(0.7)[:4], expected["log_probs"][:4], rtol=1e-12, atol=1e-12)
    assert torch.allclose(totals.entropy[:4], expected["sampled"][:4], rtol=1e-12, atol=1e-12)
    if num_ranks == 8:
        # one column a rank: rank 3 holds one id of row 1, and none of the other rows
        assert parts[3][0].tolist() == [-INF, 0.0, 0.0, -INF] and parts[3][1, 0] == _logits()[1, 3]


def split_over_ranks(unrestricted: bool) -> list[Tensor]:
    """What one rank of a vocabulary split gets: log-probs and entropies, the number of collectives, its columns' gradients."""
    supports = SUPPORTS if unrestricted else TokenSupports(SUPPORTS.ids, SUPPORTS.counts)
    own = _logits().chunk(dist.get_world_size(), dim=1)[dist.get_rank()]
    logits = [own.clone(memory_format=torch.contiguous_format).requires_grad_() for _ in range(2)]
    options = {"vocab_size": VOCAB, "temperature": 0.7, "group": dist.group.WORLD, "entropy": "grad"}
    with Collectives() as seen:
        sparse = support_log_probs(logits[0], LABELS, supports, **options)
        both = support_and_vocab_log_probs(logits[1], LABELS, supports, entropy_support="sampled", **options)
        for out in (sparse, both):
            (out.log_probs @ _weights()[0] + out.entropy @ _weights()[1]).backward()
    values = [x.detach() for x in (sparse.log_probs, sparse.entropy, both.log_probs, both.entropy)]
    return [*values, torch.tensor(len(seen.names)), *(x.grad for x in logits)]


@pytest.mark.parametrize("unrestricted", [False, True])
@pytest.mark.parametrize("world", [2, 4])
def test_support_log_probs_over_ranks_equal_a_masked_softmax_with_one_collective_each(
    rank_pool: RankPool, world: int, unrestricted: bool
) -> None:
    results = rank_pool.run(f"{__name__}:split_over_ranks", world=world, unrestricted=unrestricted)
    rows = slice(0, 5 if unrestricted else 4)
    logits = _logits().requires_grad_()
    expected = _expected(logits)
    (expected["log_probs"][rows] @ _weights()[0, rows] + expected["sampled"][rows] @ _weights()[1, rows]).backward()
    for log_probs, entropy, log_probs_of_both, entropy_of_both, num_collectives, *_ in results:
        for found, wanted in ((log_probs, "log_probs"), (entropy, "sampled")):
            assert torch.allclose(found[rows], expected[wanted][rows], rtol=1e-12, atol=1e-12)
        assert torch.allclose(log_probs, log_probs_of_both) and torch.allclose(entropy, entropy_of_both)
        assert num_collectives == 2
    for column in (-2, -1):
        found = torch.cat([result[column] for result in results], 1)
        assert torch.allclose(found[rows], logits.grad[rows], rtol=1e-10, atol=1e-12)
