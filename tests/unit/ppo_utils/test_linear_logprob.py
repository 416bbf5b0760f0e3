"""Log-probs from states and weight on one rank against float64 log_softmax of the dense logits; over ranks in tests/dist."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slime_ppo.errors import DataError, ParallelError
from slime_ppo.ppo_utils.linear_blocks import BlockPlan
from slime_ppo.ppo_utils.linear_logprob import linear_log_probs, linear_support_log_probs, linear_token_loss
from slime_ppo.ppo_utils.top_p import TokenSupports, support_and_vocab_log_probs
from slime_ppo.ppo_utils.vocab_parallel import TokenLogProbs, vocab_log_probs

NAN = float("nan")
HIDDEN = 5
# blocks that divide neither 11 states nor 40 ids; blocks of one; one block
PLANS = [(3, 7), (1, 1), (64, 64)]


def _plan(rows: int, columns: int, dtype: torch.dtype = torch.float64) -> BlockPlan:
    return BlockPlan(rows, columns, held_rows=max(rows - 1, 1), dtype=dtype)


def _case(num_states: int = 11, width: int = 43, vocab_size: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    """States, weight with `width` - `vocab_size` padding rows that hold NaN, labels; float64."""
    generator = torch.Generator().manual_seed(num_states * width)
    hidden = torch.randn((num_states, HIDDEN), generator=generator, dtype=torch.float64)
    weight = torch.randn((width, HIDDEN), generator=generator, dtype=torch.float64)
    weight[vocab_size:] = NAN
    return hidden, weight, torch.randint(0, vocab_size, (num_states,), generator=generator)


def _supports(num_states: int, vocab_size: int, *, unrestricted: bool = False) -> TokenSupports:
    """Supports of 0 to 4 ids."""
    generator = torch.Generator().manual_seed(7)
    counts = torch.arange(num_states) % 5
    marked = (torch.arange(num_states) % 4 == 2) if unrestricted else None
    if marked is not None:
        counts = counts.masked_fill(marked, 0)
    return TokenSupports(torch.cat([torch.randperm(vocab_size, generator=generator)[:n] for n in counts.tolist()]), counts, marked)


def _upstream(num: int, num_states: int) -> Tensor:
    return torch.randn((num, num_states), generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def _options(vocab_size: int, entropy: str = "grad", **more: Any) -> dict[str, Any]:
    return {"vocab_size": vocab_size, "temperature": 0.7, "group": None, "entropy": entropy, **more}


def _dense(hidden: Tensor, weight: Tensor, labels: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    log_p = (hidden @ weight[:vocab_size].T / 0.7).log_softmax(-1)
    return log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def _leaves(*tensors: Tensor) -> list[Tensor]:
    return [x.clone().requires_grad_() for x in tensors]


def _assert_same_gradients(ours: list[Tensor], theirs: list[Tensor], vocab_size: int) -> None:
    for found, expected in zip(ours, theirs, strict=True):
        assert found.grad is not None and expected.grad is not None
        assert torch.allclose(found.grad, expected.grad, rtol=1e-10, atol=1e-13)
    assert ours[1].grad is not None and ours[1].grad[vocab_size:].eq(0).all()


@pytest.mark.parametrize("blocks", PLANS)
@pytest.mark.parametrize("vocab_size", [40, 43])
def test_log_probs_values_and_gradients_equal_dense_log_softmax(blocks: tuple[int, int], vocab_size: int) -> None:
    hidden, weight, labels = _case(vocab_size=vocab_size)
    ours, theirs = _leaves(hidden, weight), _leaves(hidden, weight)
    out = linear_log_probs(*ours, labels, plan=_plan(*blocks), **_options(vocab_size))
    log_probs, entropy = _dense(*theirs, labels, vocab_size)
    upstream = _upstream(2, len(labels))
    (out.log_probs @ upstream[0] + out.entropy @ upstream[1]).backward()
    (log_probs @ upstream[0] + entropy @ upstream[1]).backward()
    assert torch.allclose(out.log_probs, log_probs, rtol=1e-12) and torch.allclose(out.entropy, entropy, rtol=1e-12)
    _assert_same_gradients(ours, theirs, vocab_size)


def test_log_prob_and_entropy_of_one_state_match_hand_value() -> None:
    hidden, weight = torch.tensor([[2.0]], dtype=torch.float64), torch.tensor([[0.0], [math.log(3.0)]], dtype=torch.float64)
    out = linear_log_probs(
        hidden, weight, torch.tensor([1]), vocab_size=2, temperature=2.0, group=None, entropy="metric", plan=_plan(1, 1)
    )
    assert out.log_probs.item() == pytest.approx(math.log(0.75), rel=1e-12)
    assert out.entropy is not None
    assert out.entropy.item() == pytest.approx(-0.25 * math.log(0.25) - 0.75 * math.log(0.75), rel=1e-12)


@pytest.mark.parametrize("entropy", ["none", "metric", "grad"])
def test_log_probs_gradients_match_finite_differences(entropy: str) -> None:
    hidden, weight, labels = _case(4, 6, 6)

    def outputs(hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        out = linear_log_probs(hidden, weight, labels, plan=_plan(3, 4), **_options(6, entropy))
        return (out.log_probs, out.entropy) if entropy == "grad" and out.entropy is not None else (out.log_probs,)

    assert torch.autograd.gradcheck(outputs, _leaves(hidden, weight))


@pytest.mark.parametrize("entropy_support", ["full", "sampled"])
def test_support_log_probs_gradients_match_finite_differences(entropy_support: str) -> None:
    hidden, weight, labels = _case(4, 6, 6)
    supports = _supports(4, 6, unrestricted=True)

    def outputs(hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        options = _options(6, entropy_support=entropy_support)
        out = linear_support_log_probs(hidden, weight, labels, supports, plan=_plan(3, 4), **options)
        assert out.entropy is not None
        return out.log_probs, out.full_log_probs, out.entropy

    assert torch.autograd.gradcheck(outputs, _leaves(hidden, weight))


@pytest.mark.parametrize("blocks", [(3, 7), (64, 64)])
@pytest.mark.parametrize("unrestricted", [False, True])
@pytest.mark.parametrize("entropy_support", ["full", "sampled"])
@pytest.mark.parametrize("reached", [(0,), (1,), (0, 2), (0, 1, 2)])
def test_support_log_probs_equal_those_of_the_dense_logits(
    blocks: tuple[int, int], unrestricted: bool, entropy_support: str, reached: tuple[int, ...]
) -> None:
    hidden, weight, labels = _case()
    supports = _supports(len(labels), 40, unrestricted=unrestricted)
    # 0 * NaN of a padding row would reach the dense gradient of the states
    ours, theirs = _leaves(hidden, weight), _leaves(hidden, weight.nan_to_num())
    options = _options(40, entropy_support=entropy_support)
    out = linear_support_log_probs(*ours, labels, supports, plan=_plan(*blocks), **options)
    expected = support_and_vocab_log_probs(theirs[0] @ theirs[1].T, labels, supports, **options)
    upstream = _upstream(3, len(labels))
    for found in (out, expected):
        columns = (found.log_probs, found.full_log_probs, found.entropy)
        torch.stack([columns[column] @ upstream[column] for column in reached]).sum().backward()
    for name in ("log_probs", "full_log_probs", "outside_mass", "entropy"):
        assert torch.allclose(getattr(out, name), getattr(expected, name), rtol=1e-12, atol=1e-14), name
    _assert_same_gradients(ours, theirs, 40)


@pytest.mark.parametrize("blocks", PLANS)
@pytest.mark.parametrize("entropy", ["none", "metric", "grad"])
def test_token_loss_values_and_gradients_equal_dense_log_softmax(blocks: tuple[int, int], entropy: str) -> None:
    hidden, weight, labels = _case()
    ours, theirs = _leaves(hidden, weight), _leaves(hidden, weight.nan_to_num())
    upstream = _upstream(2, len(labels))

    def loss(rows: slice, found: TokenLogProbs) -> Tensor:
        per_token = found.log_probs.exp() * upstream[0, rows]
        return per_token if found.entropy is None else per_token + found.entropy.square() * upstream[1, rows]

    out = linear_token_loss(*ours, labels, loss, plan=_plan(*blocks), **_options(40, entropy))
    log_probs, entropies = _dense(*theirs, labels, 40)
    expected = log_probs.exp() @ upstream[0]
    if entropy != "none":
        assert out.entropy is not None and torch.allclose(out.entropy, entropies, rtol=1e-12)
        expected = expected + (entropies if entropy == "grad" else entropies.detach()).square() @ upstream[1]
    (out.loss * -2.0).backward()
    (expected * -2.0).backward()
    assert out.loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert torch.allclose(out.log_probs, log_probs, rtol=1e-12) and not out.log_probs.requires_grad
    _assert_same_gradients(ours, theirs, 40)


@pytest.mark.parametrize("needed", [(True, False), (False, True), (False, False)])
def test_gradients_go_only_where_they_are_required(needed: tuple[bool, bool]) -> None:
    hidden, weight, labels = _case()
    supports, upstream = _supports(len(labels), 40), _upstream(1, len(labels))[0]
    full = _leaves(hidden, weight)
    (linear_log_probs(*full, labels, **_options(40, "none")).log_probs @ upstream).backward()
    alone = _leaves(hidden, weight)
    (linear_support_log_probs(*alone, labels, supports, **_options(40, "none")).log_probs @ upstream).backward()
    for function, expected in (("plain", full), ("token", full), ("support", alone)):
        leaves = [x.clone().requires_grad_(need) for x, need in zip((hidden, weight), needed, strict=True)]
        if function == "plain":
            loss = linear_log_probs(*leaves, labels, **_options(40, "none")).log_probs @ upstream
        elif function == "support":
            loss = linear_support_log_probs(*leaves, labels, supports, **_options(40, "none")).log_probs @ upstream
        else:
            loss = linear_token_loss(
                *leaves, labels, lambda rows, found: found.log_probs * upstream[rows], **_options(40, "none")
            ).loss
        assert loss.requires_grad == any(needed)
        if any(needed):
            loss.backward()
        for x, whole, need in zip(leaves, expected, needed, strict=True):
            assert (x.grad is None) != need
            assert x.grad is None or (whole.grad is not None and torch.allclose(x.grad, whole.grad, rtol=1e-10, atol=1e-13))


def test_token_loss_without_autograd_makes_no_gradient() -> None:
    hidden, weight, labels = _case()
    leaves = _leaves(hidden, weight)
    with torch.no_grad(), _Sizes() as sizes:
        out = linear_token_loss(*leaves, labels, lambda rows, found: -found.log_probs, plan=_plan(3, 7), **_options(40))
    assert not out.loss.requires_grad and out.loss.item() == pytest.approx(-out.log_probs.sum().item(), rel=1e-12)
    # one matmul unit, the logits; gradients are added up by addmm_
    assert "aten::mm" in sizes.operators and "aten::addmm_" not in sizes.operators


def test_positions_choose_the_scored_states_and_others_get_no_gradient() -> None:
    hidden, weight, labels = _case()
    positions = torch.tensor([7, 2, 9])
    ours, theirs = _leaves(hidden, weight), _leaves(hidden, weight)
    (linear_log_probs(*ours, labels[:3], positions=positions, **_options(40)).log_probs @ _upstream(1, 3)[0]).backward()
    (_dense(theirs[0][positions], theirs[1], labels[:3], 40)[0] @ _upstream(1, 3)[0]).backward()
    _assert_same_gradients(ours, theirs, 40)


class _Sizes(TorchDispatchMode):
    """Names of operators, and shapes of the tensors they make."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()
        self.operators: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators.add(func._schema.name)
        out = func(*args, **(kwargs or {}))
        self.shapes.update(tuple(x.shape) for x in tree_leaves(out) if isinstance(x, Tensor))
        return out

    @property
    def largest(self) -> int:
        return max(math.prod(shape) for shape in self.shapes)


@pytest.mark.parametrize("function", ["plain", "support", "token"])
def test_no_tensor_is_larger_than_a_few_rows_of_the_logits(function: str) -> None:
    num_states, vocab_size = 120, 700
    hidden, weight, labels = _case(num_states, vocab_size, vocab_size)
    leaves = _leaves(hidden, weight)
    supports, options = _supports(num_states, vocab_size), _options(vocab_size, plan=BlockPlan(20, 90, 20, torch.float64))
    with _Sizes() as sizes:
        if function == "plain":
            out = linear_log_probs(*leaves, labels, **options)
            (out.log_probs.sum() + out.entropy.sum()).backward()
        elif function == "support":
            both = linear_support_log_probs(*leaves, labels, supports, **options)
            (both.log_probs.sum() + both.full_log_probs.sum() + both.entropy.sum()).backward()
        else:
            linear_token_loss(*leaves, labels, lambda rows, found: found.log_probs + found.entropy, **options).loss.backward()
    # one block of logits has 1,800 elements, the weight 3,500, the statistics of all blocks 6,720, the logits 84,000
    assert (20, 90) in sizes.shapes
    assert sizes.largest <= 10 * vocab_size


def _unfused_bfloat16(hidden: Tensor, weight: Tensor, labels: Tensor, upstream: Tensor) -> list[Tensor]:
    """Gradients of states and weight through whole bfloat16 logits."""
    leaves = _leaves(hidden, weight)
    out = vocab_log_probs(leaves[0] @ leaves[1].T, labels, vocab_size=len(weight), temperature=1.0, group=None, entropy="none")
    (out.log_probs @ upstream).backward()
    return [x.grad for x in leaves if x.grad is not None]


def _errors(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [float((x.double() - y).norm() / y.norm()) for x, y in zip(found, exact, strict=True)]


@pytest.mark.parametrize("matmul", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [8, 24, 48])
def test_bfloat16_gradients_are_no_worse_than_unfused_ones(matmul: torch.dtype, rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn((48, 32), generator=generator).bfloat16()
    weight = (torch.randn((16000, 32), generator=generator) / 2).bfloat16()
    labels, upstream = torch.randint(0, 16000, (48,), generator=generator), torch.randn(48, generator=generator)
    options = _options(16000, "none", plan=BlockPlan(rows, 128, rows, matmul)) | {"temperature": 1.0}
    exact = _leaves(hidden.double(), weight.double())
    log_probs = (exact[0] @ exact[1].T).log_softmax(-1).gather(1, labels[:, None])[:, 0]
    (log_probs @ upstream.double()).backward()
    unfused = _errors(_unfused_bfloat16(hidden, weight, labels, upstream), [x.grad for x in exact])
    ours = _leaves(hidden, weight)
    out = linear_log_probs(*ours, labels, **options)
    (out.log_probs @ upstream).backward()
    in_forward = _leaves(hidden, weight)
    linear_token_loss(*in_forward, labels, lambda at, found: found.log_probs * upstream[at], **options).loss.backward()
    assert out.log_probs.dtype == torch.float32 and ours[0].grad.dtype == ours[1].grad.dtype == torch.bfloat16
    if matmul == torch.float32:
        assert (out.log_probs - log_probs).abs().max() <= 4e-6
    for leaves in (ours, in_forward):
        for error, limit in zip(_errors([x.grad for x in leaves], [x.grad for x in exact]), unfused, strict=True):
            assert error <= (1.0 if matmul == torch.float32 else 1.02) * limit  # two blocks summed in bfloat16 round twice


@pytest.mark.parametrize("function", ["plain", "support", "support_only", "token"])
def test_nan_state_without_upstream_gradient_contributes_exactly_zero(function: str) -> None:
    hidden, weight, labels = _case()
    supports, options = _supports(len(labels), 40), _options(40, plan=_plan(4, 7))
    keep = torch.arange(len(labels)) != 5

    def gradients(state: float) -> list[Tensor]:
        states = hidden.clone()
        states[5] = state
        leaves = _leaves(states, weight)
        if function == "token":
            linear_token_loss(
                *leaves,
                labels,
                lambda rows, found: torch.where(keep[rows], found.log_probs + found.entropy, 0.0),
                **options,
            ).loss.backward()
        elif function == "plain":
            out = linear_log_probs(*leaves, labels, **options)
            torch.where(keep, out.log_probs + out.entropy, 0.0).sum().backward()
        else:
            both = linear_support_log_probs(*leaves, labels, supports, **options)
            total = both.log_probs if function == "support_only" else both.log_probs + both.full_log_probs
            torch.where(keep, total, 0.0).sum().backward()
        return [x.grad for x in leaves if x.grad is not None]

    poisoned, clean = gradients(NAN), gradients(0.5)
    assert poisoned[0][5].eq(0).all() and poisoned[0][4].ne(0).all()
    assert all(torch.equal(x, y) for x, y in zip(poisoned, clean, strict=True))


def test_no_scored_states_give_empty_results_and_zero_gradients() -> None:
    hidden, weight, labels = _case()
    none = torch.zeros(0, dtype=torch.int64)
    for function in ("plain", "support", "token"):
        leaves, options = _leaves(hidden, weight), _options(40, positions=none, plan=_plan(3, 7))
        if function == "plain":
            loss = linear_log_probs(*leaves, labels[:0], **options).log_probs.sum()
        elif function == "support":
            loss = linear_support_log_probs(*leaves, labels[:0], TokenSupports(none, none), **options).log_probs.sum()
        else:
            loss = linear_token_loss(*leaves, labels[:0], lambda rows, found: found.log_probs, **options).loss
        loss.backward()
        assert loss.item() == 0
        assert all(x.grad is not None and x.grad.eq(0).all() for x in leaves), function


@pytest.mark.parametrize("label", [-1, 40, 50])
def test_label_outside_the_real_vocabulary_has_log_prob_minus_infinity(label: int) -> None:
    hidden, weight, _ = _case(1)
    labels, none = torch.tensor([label]), torch.zeros(0, dtype=torch.int64)
    assert linear_log_probs(hidden, weight, labels, **_options(40)).log_probs.item() == -math.inf
    leaves = _leaves(hidden, weight)
    out = linear_support_log_probs(*leaves, labels, TokenSupports(none, torch.tensor([0])), **_options(40))
    assert out.log_probs.item() == out.full_log_probs.item() == -math.inf
    out.log_probs.sum().backward()
    assert all(x.grad is not None and x.grad.eq(0).all() for x in leaves)


@pytest.mark.parametrize("function", ["plain", "support", "token"])
def test_second_derivative_is_refused(function: str) -> None:
    hidden, weight, labels = _case()
    hidden.requires_grad_()
    if function == "plain":
        loss = linear_log_probs(hidden, weight, labels, **_options(40)).log_probs.sum()
    elif function == "support":
        loss = linear_support_log_probs(hidden, weight, labels, _supports(11, 40), **_options(40)).log_probs.sum()
    else:
        loss = linear_token_loss(hidden, weight, labels, lambda rows, found: found.log_probs, **_options(40)).loss
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(loss, hidden, create_graph=True)


def test_token_loss_refuses_a_second_backward() -> None:
    hidden, weight, labels = _case()
    loss = linear_token_loss(hidden.requires_grad_(), weight, labels, lambda rows, found: found.log_probs, **_options(40)).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward through linear_token_loss"):
        loss.backward()


def test_token_loss_that_is_no_longer_per_token_is_refused() -> None:
    hidden, weight, labels = _case()
    with pytest.raises(DataError, match=r"shape \(\) for 2 states, rows 0 to 2; expected one number per state"):
        linear_token_loss(hidden, weight, labels, lambda rows, found: found.log_probs.sum(), plan=_plan(3, 7), **_options(40))


def test_token_loss_of_constants_has_zero_gradient() -> None:
    hidden, weight, labels = _case()
    leaves = _leaves(hidden, weight)
    loss = linear_token_loss(*leaves, labels, lambda rows, found: torch.ones_like(found.log_probs), **_options(40)).loss
    loss.backward()
    assert loss.item() == 11 and all(x.grad is not None and x.grad.eq(0).all() for x in leaves)


def test_shapes_and_dtypes_that_do_not_fit_are_refused() -> None:
    hidden, weight, labels = _case()
    with pytest.raises(DataError, match=r"hidden states \(11, 5\) of torch.float64 do not fit a weight \(43, 4\)"):
        linear_log_probs(hidden, weight[:, :4], labels, **_options(40))
    with pytest.raises(DataError, match=r"of torch.float64 do not fit a weight \(43, 5\) of torch.float32"):
        linear_log_probs(hidden, weight.float(), labels, **_options(40))
    with pytest.raises(DataError, match=r"labels \(11,\) do not fit 2 scored states"):
        linear_log_probs(hidden, weight, labels, positions=torch.tensor([1, 2]), **_options(40))
    supports = _supports(11, 40)
    with pytest.raises(DataError, match="counts add up to 20, but there are 19 support ids"):
        linear_support_log_probs(hidden, weight, labels, TokenSupports(supports.ids[1:], supports.counts), **_options(40))
    with pytest.raises(DataError, match=r"counts \(10,\), unrestricted marks \(10,\) and labels \(11,\) do not agree"):
        linear_support_log_probs(hidden, weight, labels, TokenSupports(supports.ids, supports.counts[1:]), **_options(40))
    marked = TokenSupports(supports.ids, supports.counts, torch.ones(11, dtype=torch.bool))
    with pytest.raises(DataError, match="rows marked unrestricted hold 20 support ids"):
        linear_support_log_probs(hidden, weight, labels, marked, **_options(40))
    with pytest.raises(ParallelError, match="fewer than the 44 ids"):
        linear_log_probs(hidden, weight, labels, **_options(44))
