"""Columns of a micro-batch on the device."""

import numpy as np
import pytest
import torch

from slime_ppo.data.pack import pack_micro_batch
from slime_ppo.types.micro_batch import MicroBatch
from tests.dist.backends.cases import make_batch


def _packed() -> MicroBatch:
    return pack_micro_batch(make_batch(), np.array([2, 0]), multiple=1, device=torch.device("cpu"), context=None)


def test_column_read_only_arrays_of_an_object_store_become_tensors_of_their_own() -> None:
    micro_batch = _packed()
    array = micro_batch.batch.rollout_log_probs
    array.setflags(write=False)
    column = micro_batch.column("rollout_log_probs")
    assert column.tolist() == array.tolist() and column.dtype == torch.float32
    column += 1
    assert column.tolist() != array.tolist()


def test_column_not_computed_yet_is_named() -> None:
    with pytest.raises(ValueError, match="column advantages of rollout 5 has not been computed yet"):
        _packed().column("advantages")
