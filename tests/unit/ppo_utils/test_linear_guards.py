"""What could change logits or gradients of the lm-head behind its back: autocast, in-place changes, float16, many host reads."""

import pytest
import torch
from torch import Tensor

from slime_ppo.errors import DataError
from slime_ppo.ppo_utils.linear_blocks import BlockPlan
from slime_ppo.ppo_utils.linear_logprob import linear_log_probs, linear_support_log_probs, linear_token_loss
from slime_ppo.ppo_utils.linear_supports import _cut
from slime_ppo.ppo_utils.top_p import TokenSupports
from slime_ppo.ppo_utils.vocab_parallel import VocabShard

VOCAB = 40
PLAN = BlockPlan(rows=3, columns=7, held_rows=2, dtype=torch.float32)


def _leaves(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((11, 5), (VOCAB, 5))
    hidden, weight = (torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes)
    return hidden, weight


def _labels() -> Tensor:
    return torch.arange(11) * 3


def _supports() -> TokenSupports:
    """Two ids a state, of which one row's are all the vocabulary."""
    counts = torch.full((11,), 2)
    counts[4] = 0
    return TokenSupports(torch.arange(20) * 2, counts, torch.arange(11) == 4)


def _loss(function: str, hidden: Tensor, weight: Tensor, labels: Tensor, supports: TokenSupports) -> Tensor:
    options: dict = {"vocab_size": VOCAB, "temperature": 0.7, "group": None, "entropy": "grad", "plan": PLAN}
    if function == "token":
        return linear_token_loss(hidden, weight, labels, lambda _, found: found.log_probs + found.entropy, **options).loss
    if function == "plain":
        found = linear_log_probs(hidden, weight, labels, **options)
    elif function == "support":
        found = linear_support_log_probs(hidden, weight, labels, supports, **options)
    else:
        restricted = TokenSupports(supports.ids, supports.counts)
        found = linear_support_log_probs(hidden, weight, labels, restricted, entropy_support="sampled", **options)
    return (found.log_probs + found.entropy).sum()


@pytest.mark.parametrize("function", ["plain", "support", "support_only", "token"])
def test_autocast_changes_neither_loss_nor_gradient(function: str) -> None:
    """Also where only the forward pass is under autocast, as a training loop has it."""
    losses, grads = [], []
    for forward, backward in ((False, False), (True, False), (True, True)):
        leaves = _leaves()
        with torch.autocast("cpu", torch.bfloat16, enabled=forward):
            loss = _loss(function, *leaves, _labels(), _supports())
        with torch.autocast("cpu", torch.bfloat16, enabled=backward):
            loss.backward()
        losses.append(loss)
        grads.append([x.grad for x in leaves])
    assert all(loss.item() == losses[0].item() for loss in losses)
    for found in grads[1:]:
        assert all(torch.equal(x, expected) for x, expected in zip(found, grads[0], strict=True))


@pytest.mark.parametrize(
    ("function", "changed"),
    [("plain", "labels"), *(("support", name) for name in ("labels", "ids", "counts", "unrestricted"))],
)
def test_labels_or_supports_changed_before_backward_are_refused(function: str, changed: str) -> None:
    labels, supports = _labels(), _supports()
    loss = _loss(function, *_leaves(), labels, supports)
    {"labels": labels, "ids": supports.ids, "counts": supports.counts, "unrestricted": supports.unrestricted}[changed].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_token_loss_of_float16_states_is_refused() -> None:
    with pytest.raises(DataError, match="float16 states: .* use bfloat16, or linear_log_probs"):
        _loss("token", *_leaves(torch.float16), _labels(), _supports())


def test_supports_cut_into_blocks_hold_their_own_ids_in_order() -> None:
    """Hand-cut: five states in blocks of two, ids 10 to 19 of this rank in blocks of four."""
    supports = TokenSupports(torch.tensor([18, 3, 11, 14, 10, 25, 13, 19, 12]), torch.tensor([4, 0, 2, 1, 2]))
    cut = _cut(supports, BlockPlan(2, 4, 2, torch.float32), VocabShard(10, 10, None))
    found = {at: (part.ids.tolist(), part.counts.tolist()) for at, part in cut.items()}
    assert found == {
        (0, 10): ([11], [1, 0]),
        (0, 14): ([14], [1, 0]),
        (0, 18): ([18], [1, 0]),
        (2, 10): ([10, 13], [1, 1]),
        (2, 14): ([], [0, 0]),
        (2, 18): ([], [0, 0]),
        (4, 10): ([12], [1]),
        (4, 14): ([], [0]),
        (4, 18): ([19], [1]),
    }
