"""The head of the actor on one rank: what its backward pass does to logits."""

import numpy as np
import pytest
import torch

from slime_ppo.backends.megatron import lm_head
from slime_ppo.data.pack import pack_micro_batch
from tests.dist.backends.cases import VOCAB, make_batch


def test_log_probs_backward_uses_up_the_selected_logits_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient is written over the selected copy (so that a second pass is refused), not over the model's output."""
    monkeypatch.setattr(lm_head, "tensor_parallel_group", lambda: None)
    head = lm_head.LmHead(vocab_size=VOCAB, temperature=1.0, entropy_support="full", weight=None, sequence_parallel=False)
    micro_batch = pack_micro_batch(make_batch(), np.arange(2), multiple=1, device=torch.device("cpu"), context=None)
    output = torch.randn((len(micro_batch.tokens), VOCAB), generator=torch.Generator().manual_seed(0)).requires_grad_()
    before = output.detach().clone()
    total = head.log_probs(micro_batch, output, "none").log_probs.sum()
    total.backward(retain_graph=True)
    assert torch.equal(output.detach(), before)
    with pytest.raises(RuntimeError, match="wrote its gradient over the logits"):
        total.backward()
