"""Host copies in blocks: nothing lost at the seams. Offload and wake as a whole are in tests/dist/backends/test_offload.py."""

import pytest
import torch

from slime_ppo.backends.megatron.memory import host_copy


@pytest.mark.parametrize(("num_bytes", "lens"), [(0, [0]), (5, [5]), (8, [8]), (9, [8, 1]), (24, [8, 8, 8])])
def test_host_copy_blocks_are_the_bytes_in_order_and_no_views_of_them(num_bytes: int, lens: list[int]) -> None:
    whole = torch.arange(num_bytes, dtype=torch.uint8)
    blocks = host_copy(whole, block_bytes=8)
    assert [len(block) for block in blocks] == lens
    before = whole.clone()
    whole.zero_()  # as the storage is freed
    assert torch.equal(torch.cat(blocks), before)
